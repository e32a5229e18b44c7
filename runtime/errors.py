"""Errors are data: what was refused, under which name, why, the way out. The sentence is made at the door.

`Refused(code, field, value, limit, way_out)` reads as one line: `FIELD is VALUE, LIMIT; WAY_OUT`.
* `code` is one of CODES. Programs look at it and at `field`, never at the sentence.
* `field` is a neutral name: `max_len`, or a path such as `messages[0].content`. Files and machines have none.
* `value` is what was given. A type stands for a value of it; `Amount(66, "tokens")` reads "has 66 tokens".
* `limit` says what does not fit, `way_out` what to do.
* `message` replaces "FIELD is VALUE, LIMIT" where a message has another form: files, checkpoints, devices.

A text that names fields is a tuple of strings and Names: `("lower ", Name("max_rows"))`. `Name("max_len", 9)`
is the field with a value. `str(error)` writes them as Python does: `max_rows`, `max_len=9`.

Each door has its own names. `error.renamed(door)` is the same error in that door's words: `--max-len 9` on a
command line, `input[0].content` in a JSON body (`cli/options.py`, `serving/openai/errors.py`).
`error.under("structured_outputs")` is about a field of that field, `error.at(path)` says in which file it is.
Between the Triton model and its clients errors travel as JSON (`serving/error_text.py`).
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple, TypeAlias, get_args

MAX_SAID = 500  # characters of somebody else's in a line of ours

Code = Literal[
    "unknown",  # no such name: an option, a key, a tool
    "missing",  # needed and not given
    "wrong_type",  # of another kind: a text for a number
    "malformed",  # cannot be read as what it should be: JSON, UTF-8, a grammar
    "out_of_range",  # outside of what is taken
    "too_long",  # more of something than is taken: tokens, characters, entries
    "conflict",  # does not go with something else that was given
    "unsupported",  # well formed, and not served here
    "not_found",  # a file, server or device that is not there
    "damaged",  # a file that is not what it was when it was written
    "exhausted",  # not enough memory, disk or other room
    "in_use",  # somebody else has it: a port, a folder
    "closed",  # it has ended
    "failed",  # a tool or library that is needed for it failed
    "other",  # from a server of another version, which names no code that is known here
]
CODES: tuple[Code, ...] = get_args(Code)


def one_line(error: object) -> str:
    """What somebody else said, for a line of ours. Libraries repeat what they refuse, however long it is."""
    text = _printable(" ".join(str(error).split()))
    return text if len(text) <= MAX_SAID else f"{text[:MAX_SAID]}..."


def _printable(text: str) -> str:
    """Without what a terminal obeys: names of tensors, fields and files may be anybody's."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)


def counted(num: int, one: str, more: str) -> str:
    return f"{num} {one if num == 1 else more}"


def shown(value: object) -> str:
    """A value that was given, in a line of ours."""
    text = ""
    for piece in _written(value):
        text += piece
        if len(text) > 80 and isinstance(value, (list, tuple, dict)):
            return f"{text[:60]}... ({counted(len(value), 'entry', 'entries')})"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _written(value: object) -> Iterator[str]:
    """As Python writes it, in pieces: of a long list little is shown, and one call holds up all threads."""
    if not isinstance(value, (list, tuple, dict)) or type(value) not in (list, tuple, dict):
        try:
            yield repr(value)
        except ValueError:  # Python writes no number of more than 4,300 digits
            yield "a number of thousands of digits"
        return
    opening, closing = {list: "[]", tuple: "()", dict: "{}"}[type(value)]
    yield opening
    for at, entry in enumerate(value):
        yield ", " if at else ""
        yield from _written(entry)
        if isinstance(value, dict):
            yield ": "
            yield from _written(value[entry])
    yield ",)" if type(value) is tuple and len(value) == 1 else closing


class Absent(Enum):
    VALUE = "absent"  # None is a value


ABSENT = Absent.VALUE


@dataclass(frozen=True, slots=True)
class Name:
    """A field in a sentence. With a value: the setting of it."""

    field: str
    value: object = ABSENT


class Amount(NamedTuple):
    number: int
    unit: str


Text: TypeAlias = str | tuple[str | Name, ...]
Door: TypeAlias = Callable[[Name], str]  # how a door writes a name


def any_of(*fields: str) -> tuple[str | Name, ...]:
    """`a, b or c`."""
    *others, last = fields
    before = [part for field in others for part in (Name(field), ", ")][:-1]
    return (*before, *([" or "] if others else []), Name(last))


def in_python(name: Name) -> str:
    return name.field if name.value is ABSENT else f"{name.field}={name.value!r}"


def as_option(name: Name) -> str:
    """As it is written on a command line."""
    option = f"--{name.field.replace('_', '-')}"
    value = str(name.value).lower() if isinstance(name.value, bool) else name.value
    return option if value is ABSENT else f"{option} {value}"


def joined(name: str, field: str) -> str:
    """The path of a field within another."""
    return f"{name}{'.' if name and field and field[0] != '[' else ''}{field}"


class Refused(ValueError):
    """A request, engine, checkpoint or option that cannot be served as asked; the sentence is one line."""

    code: Code
    field: str

    def __init__(
        self,
        code: Code,
        field: str = "",
        value: object = ABSENT,
        limit: Text = "",
        way_out: Text = "",
        *,
        message: Text = "",
    ) -> None:
        super().__init__(code, field, value, limit, way_out)  # what pickle and copy make it from
        self.code = code
        self.field = field
        self.value = value
        self.limit = limit
        self.way_out = way_out
        self._message = message
        self._where: tuple[str | Name, ...] = ()

    @property
    def parts(self) -> tuple[str | Name, ...]:
        """The sentence before a door has written its names."""
        said = _parts(self._message) or self._pattern()
        return (*self._where, *said, *(("; ", *_parts(self.way_out)) if self.way_out else ()))

    def _pattern(self) -> tuple[str | Name, ...]:
        limit = (", ", *_parts(self.limit)) if self.limit else ()
        return (Name(self.field), _phrase(self.value), *limit)

    def __str__(self) -> str:
        return self.sentence(in_python)

    def sentence(self, door: Door) -> str:
        return _printable("".join(part if isinstance(part, str) else door(part) for part in self.parts))

    def renamed(self, door: Door) -> "Refused":
        """The same, with the names of a door."""
        field = door(Name(self.field)) if self.field else ""
        return Refused(self.code, field, self.value, message=self.sentence(door))

    def at(self, place: str, door: Door | None = None) -> "Refused":
        """The same, in this file, line or variant. door: how names are written there."""
        made = copy.copy(self) if door is None else self.renamed(door)
        made._where = (f"{place}: ", *self._where)
        return made

    def under(self, name: str) -> "Refused":
        """The same, of a field within this one."""
        made = copy.copy(self)
        if self._message or self._where:
            made._where = (Name(name), ": ", *self._where)
        made.field = joined(name, self.field)
        return made


def _parts(text: Text) -> tuple[str | Name, ...]:
    return text if isinstance(text, tuple) else (text,) if text else ()


def _phrase(value: object) -> str:
    match value:
        case Absent.VALUE:
            return ""
        case Amount():
            return f" has {value.number} {value.unit}"
        case type():
            return f" is {value.__name__}"
        case tuple():
            return f" is {shown(list(value))}"
        case _:
            return f" is {shown(value)}"


@contextmanager
def within(place: str, door: Door | None = None) -> Iterator[None]:
    """What is refused there names it; door: as in Refused.at."""
    try:
        yield
    except Refused as error:
        raise error.at(place, door) from None


class Failed(RuntimeError):
    """The engine is lost and takes no more requests, whatever they ask; the message is one line."""


class Lost(RuntimeError):
    """The connection to the server, or the server, went away with the request."""


class RankLost(Failed, Lost):
    """A rank of the engine has ended, hangs or differs from the others, and with it all of the engine."""


class Busy(RuntimeError):
    """The server has too many requests. Nothing of this one was done; it may be sent again."""

    def __init__(
        self, message: str, *, retry_after_s: float = 1, max_rows: int = 0, max_queue: int = 0
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s  # when to send it again
        self.max_rows = max_rows  # requests that run at once, and so many more that may wait; 0: unknown
        self.max_queue = max_queue


class Cancelled(RuntimeError):
    """Somebody cancelled the request."""
