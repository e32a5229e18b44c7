"""The one error that users meet: it names the thing, the value, the limit and the way out."""


class Refused(ValueError):
    """A request, engine, checkpoint or option that cannot be served as asked; the message is one line."""
