"""The errors that users meet: one line that names the thing, the value, the limit and the way out."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

MOST_SAID = 500  # characters of somebody else's in a line of ours


def one_line(error: object) -> str:
    """What somebody else said, for a line of ours. Libraries repeat what they refuse, however long it is."""
    text = " ".join(str(error).split())
    return text if len(text) <= MOST_SAID else f"{text[:MOST_SAID]}..."


def counted(num: int, one: str, more: str) -> str:
    return f"{num} {one if num == 1 else more}"


class Refused(ValueError):
    """A request, engine, checkpoint or option that cannot be served as asked; the message is one line."""


@contextmanager
def within(name: str) -> Iterator[None]:
    """What is refused there names it."""
    try:
        yield
    except Refused as error:
        raise Refused(f"{name}: {error}") from None


class Failed(RuntimeError):
    """The engine is lost and takes no more requests, whatever they ask; the message is one line."""


class Busy(RuntimeError):
    """The server has too many requests. Nothing of this one was done; it may be sent again."""

    @property
    def retry_after_s(self) -> int:
        """When to send it again."""
        found = re.search(r"try again in (\d+) s", str(self))
        return int(found.group(1)) if found else 1


class Cancelled(RuntimeError):
    """Somebody cancelled the request."""


class Lost(RuntimeError):
    """The connection to the server, or the server, went away with the request."""
