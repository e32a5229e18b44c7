"""The errors that users meet: one line that names the thing, the value, the limit and the way out."""


class Refused(ValueError):
    """A request, engine, checkpoint or option that cannot be served as asked; the message is one line."""


class Failed(RuntimeError):
    """The engine is lost and takes no more requests, whatever they ask; the message is one line."""
