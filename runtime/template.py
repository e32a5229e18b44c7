"""Chat templates: rendered as Hugging Face does, in a sandbox, with a limit on their work.

A template comes with a checkpoint, so from a stranger. It reaches nothing of Python, and its work is counted:
characters that it makes, items of lists, and a fixed sum for each turn of a loop and each call.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from datetime import datetime
from functools import cached_property, wraps
from itertools import chain
from typing import Any, NamedTuple

from jinja2 import Template as Compiled
from jinja2 import TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter, make_multi_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from hemiola.runtime.errors import Refused

TURN = 64  # of a loop, or a call
ITEM = 16  # of a list or the like, and each value within
LEAST_WORK = 2**25  # half a million turns: about a second
WORK_PER_CHARACTER = 64  # of the messages
LARGEST = 2**1024  # of numbers to calculate with
LARGEST_READ = 2**15000  # from a text; the largest that JSON holds has 4,300 digits
MAX_FORMAT = 256  # characters of a format of dates
# Their work cannot be told from their arguments, and no chat needs them.
NO_FILTERS = ("filesizeformat", "pprint", "striptags", "urlize", "wordwrap", "xmlattr")
NO_ATTRIBUTES = {
    "encode",
    "expandtabs",
    "from_bytes",
    "fromkeys",
    "maketrans",
    "striptags",
    "to_bytes",
    "translate",
}
EACH, CONCAT, MADE, READ, CUT = (
    "for",
    "~",
    "[",
    "==",
    ":",
)  # filters of ours: no template can write these names
# They compare items, or an attribute of each: the place of its name behind the value, if they have one.
COMPARE = {"dictsort": None, "groupby": 0, "max": 1, "min": 1, "sort": 2, "unique": 1}
# Methods of texts that may look at all of another text at each of their own characters.
MATCH = {"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"}
AT_ONCE = {"count", "first", "last", "length"}  # filters whose work does not grow with the list
PADDED = {"center", "ljust", "rjust", "zfill"}


class _Size(NamedTuple):
    items: int
    characters: int


def _size(value: Any, limit: float) -> _Size:
    """Of a value when it is written out; not much further than `limit`."""
    items, characters, left = 0, 0, [value]
    while left and items + characters <= limit:
        value = left.pop()
        items += ITEM
        if isinstance(value, str):
            characters += len(value)
        elif isinstance(value, Mapping):
            left += chain(value.keys(), value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            left += value
    return _Size(items, characters)


class ChatTemplate:
    def __init__(self, source: str) -> None:
        self.source = source

    def __reduce__(self) -> tuple[type["ChatTemplate"], tuple[str]]:
        return ChatTemplate, (self.source,)  # its code cannot be sent

    def render(self, variables: Mapping[str, object]) -> str:
        try:
            size = _size(list(variables.values()), float("inf"))
            environment = _Environment(LEAST_WORK + WORK_PER_CHARACTER * sum(size))
            pieces = self._load(environment).generate(**variables)
            return "".join(map(environment.made, pieces))
        except TemplateError as error:
            message = f"the chat template refuses these messages: {error}"
            raise Refused("unsupported", "messages", message=message, way_out="change them") from None
        except RecursionError:
            message, way_out = "the chat template calls itself too often", "use another template"
            raise Refused("unsupported", "messages", message=message, way_out=way_out) from None
        except (TypeError, LookupError, AttributeError, ValueError, ArithmeticError, SyntaxError) as error:
            message = f"the chat template does not fit these messages ({error})"
            raise Refused("unsupported", "messages", message=message, way_out="change them") from None

    def _load(self, environment: "_Environment") -> Compiled:
        return Compiled.from_code(environment, self._code, environment.make_globals(None))

    @cached_property
    def _code(self) -> Any:
        return _Environment(LEAST_WORK).compile(self.source)

    @cached_property
    def variables(self) -> frozenset[str]:
        """What the template reads; it would ignore anything else."""
        environment = _Environment(LEAST_WORK)
        try:
            read = meta.find_undeclared_variables(environment.parse(self.source))
        except (TemplateError, RecursionError, ValueError):  # of a number of thousands of digits
            return frozenset()  # `render` says what is wrong with it
        return frozenset(read) - environment.globals.keys()


class _Environment(ImmutableSandboxedEnvironment):
    """For one rendering: it counts."""

    intercepted_binops = frozenset("+-*/%") | {"**", "//"}

    def __init__(self, work: int) -> None:
        extensions = [_Generation, "jinja2.ext.loopcontrols"]
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False, finalize=self.made
        )
        self._limit = self._left = work
        for name in NO_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = _to_json
        for name, plain in list(self.filters.items()):
            self.filters[name] = self._counted_filter(name, plain)
        for name, plain in list(self.tests.items()):
            self.tests[name] = self._counted_test(name, plain)
        self.filters |= {EACH: self._each, CONCAT: self._concat, MADE: self.made, READ: self._read}
        self.filters[CUT] = self._cut
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = self._time
        self.globals["namespace"] = _Namespace
        del self.globals["lipsum"]

    def spend(self, work: int) -> None:
        self._left -= work
        if self._left < 0:
            raise SecurityError(
                f"it takes more work than {self._limit} (characters and items made, {TURN} for each turn of a"
                " loop); use another template, or fewer messages"
            )

    def _time(self, form: str) -> str:
        if len(form) > MAX_FORMAT or re.search(r"%[^a-zA-Z%]", form):
            raise SecurityError(f"strftime_now takes at most {MAX_FORMAT} characters, and no widths")
        return datetime.now().strftime(form)

    def made(self, value: Any) -> Any:
        """Counts a text or list that was made; what is in a list may not be too long when written out."""
        self.spend(len(value) if isinstance(value, str) else self.size(value).items)
        return value

    def size(self, value: Any) -> _Size:
        size = _size(value, self._limit)
        if sum(size) > self._limit:
            self.spend(self._limit + 1)
        return size

    def _read(self, value: Any) -> Any:
        """Counts that all of a value is looked at; what makes its items one by one counts them."""
        if isinstance(value, str):
            self.spend(len(value) // TURN)
        elif isinstance(value, (list, tuple, dict)):
            size = self.size(value)
            self.spend(size.items + size.characters // TURN)
        elif isinstance(value, Sized) and not isinstance(value, LoopContext):  # a range, a dict's keys
            self.spend(ITEM * len(value))
        return self._counted(value)

    def _counted(self, value: Any) -> Any:
        is_lazy = isinstance(value, Iterator) and not isinstance(value, LoopContext)
        return self._each(value) if is_lazy else value

    def _cut(self, value: Any) -> Any:
        """A slice: the items of a list are not copied."""
        self.spend(len(value) if isinstance(value, str) else ITEM * len(value))
        return value

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Rewrite().visit(super()._parse(source, name, filename))

    def _each(self, items: Iterable[Any]) -> Iterator[Any]:
        return _Turns(iter(items), self.spend)

    def _concat(self, parts: list[Any]) -> str:
        return self.made("".join(map(str, self._written(parts))))

    def _written(self, values: Any) -> Any:
        self.spend(sum(self.size(values)))
        return values

    def _counted_filter(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        num_passed = 1 if hasattr(plain, "jinja_pass_arg") else 0

        @wraps(plain)  # with jinja's own marks
        def counted(*args: Any, **kwargs: Any) -> Any:
            passed, given = args[:num_passed], args[num_passed:]
            if name in ("join", "sum"):
                given, kwargs = self._attributes(name, *given, **kwargs), {}
            given = (self._compared(name, *given, **kwargs), *given[1:])
            value, *others = [*given, *kwargs.values()]
            self.spend(TURN)
            if name == "wordcount":
                self.spend(len(value))
            elif name not in AT_ONCE and hasattr(value, "__len__"):  # some read all of it, and make little
                self.spend(len(value) // TURN if isinstance(value, str) else ITEM * len(value))
            self._before_filter(name, value, others, kwargs)
            result = plain(*passed, *given, **kwargs)
            if name == "int":
                _check_numbers(result, largest=LARGEST_READ)
            return self.made(result)

        return counted

    def _compared(self, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        """The value of a filter; of one that compares what the value holds, that is counted."""
        if name not in COMPARE or isinstance(value, str):
            return self._counted(value)
        items = value if isinstance(value, Mapping) else list(self._each(value))
        given, place = kwargs.get("attribute"), COMPARE[name]
        if given is None and place is not None and len(args) > place:
            given = args[place]
        compared = items if given is None else list(map(make_multi_attrgetter(self, given), items))
        self._written(compared)  # some compare copies, in lower case
        return items

    def _counted_test(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        num_passed = 1 if hasattr(plain, "jinja_pass_arg") else 0

        @wraps(plain)
        def counted(*args: Any) -> Any:
            given = [self._read(arg) for arg in args[num_passed:]]
            if name in ("lower", "upper"):
                self.spend(len(str(given[0])))
            elif name == "divisibleby":
                _check_numbers(*given)
            return plain(*args[:num_passed], *given)

        return counted

    def _attributes(self, name: str, value: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Arguments of `join` and `sum`, with a list of what they put together in place of its holders."""
        names = ("d", "attribute") if name == "join" else ("attribute", "start")
        given = dict(zip(names, args, strict=False)) | kwargs
        items = list(self._each(value))
        if (attribute := given.get("attribute")) is not None:
            items = list(map(make_attrgetter(self, attribute), items))
        if name == "join":
            self._written(items)
            return [items, given.get("d", "")]
        start = given.get("start", 0)
        if not all(isinstance(item, (int, float)) for item in (start, *items)):
            self.spend(len(items) * sum(self.size([start, *items])))  # each sum copies the one before
        return [items, None, start]

    def _before_filter(self, name: str, value: Any, others: list[Any], named: dict[str, Any]) -> None:
        """What it will make, where that may be more than it is given."""
        width = max([abs(other) for other in others if isinstance(other, int)], default=0)
        if name == "format":
            self.check_format(value, others)
        elif name == "replace":
            self._check_replace(str(value), [named.get("old", others[0]), named.get("new", others[1])])
        elif name == "join":
            self.spend(len(str(others[0])) * len(value) if others else 0)
        elif name == "indent":
            width = max([width, *(len(other) for other in others if isinstance(other, str))])
            self.spend((width or 4) * (str(value).count("\n") + 1))
        elif name == "tojson":
            self.spend(sum(self.size(value)) * (1 + width + self.size(others).characters))
        elif name == "round":
            self.spend(width * width)
        elif name in ("batch", "center", "slice"):
            self.spend(width)
        elif name in ("float", "int") and isinstance(value, str):
            self.spend(2 * len(value))
        elif name == "trim":
            self._match(str(value), others)

    def _match(self, text: str, others: Iterable[Any]) -> None:
        self.spend(len(text) * sum(len(other) for other in others if isinstance(other, str)) // TURN)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_numbers(left, right)
        if operator == "-":  # of a dict's keys it makes a set
            self._read(left)
            self._read(right)
        elif operator == "*":
            for one, times in ((left, right), (right, left)):
                if isinstance(times, int) and not isinstance(one, (int, float)):
                    self.spend(sum(self.size(one)) * max(0, times))
        elif operator == "%" and isinstance(left, str):
            self.check_format(left, right if isinstance(right, tuple) else [right])
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > LARGEST.bit_length():
                raise SecurityError(f"a number beyond {LARGEST.bit_length()} bits")
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self.spend(len(left) + len(right))  # pyright: ignore[reportArgumentType]
        result = super().call_binop(context, operator, left, right)
        _check_numbers(result)
        return result if isinstance(result, str) else self.made(result)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.spend(TURN + ITEM * (len(args) + len(kwargs)))
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        self._read(owner)
        if not isinstance(function, (LoopContext, Macro)):
            args = tuple(map(self._read, args))
            kwargs = {key: self._read(value) for key, value in kwargs.items()}
        elif isinstance(function, Macro) and (function.catch_varargs or function.catch_kwargs):
            self.made([args, kwargs])  # which it may put into its next ones, and so on
        if isinstance(function, LoopContext):  # a loop within its own loop
            args = (self._each(args[0]), *args[1:])
        elif isinstance(owner, str) and name in MATCH:
            self._match(owner, [*args, *kwargs.values()])
        elif isinstance(owner, str) and name.startswith("is"):
            self.spend(len(owner))
        elif isinstance(owner, str) and name == "replace":
            self._check_replace(owner, list(args))
        elif isinstance(owner, str) and name == "join":
            args = (list(self._each(args[0])), *args[1:])
            self.spend(len(owner) * len(args[0]))
            self._written(args[0])
        elif isinstance(owner, str) and name in PADDED:
            self.spend(max([arg for arg in args if isinstance(arg, int)], default=0))
        return self.made(super().call(context, function, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, self._read(argument))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in NO_ATTRIBUTES and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"it reads {attribute!r} of a {type(obj).__name__}, which is not for templates")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        text = value.__self__
        if value.__name__ == "format_map" or isinstance(text, Markup):
            raise SecurityError(f"{value.__name__} of a template's text is not served")
        return lambda *args, **kwargs: _Formatter(self).vformat(text, args, kwargs)

    def check_format(self, text: Any, others: Iterable[Any]) -> None:
        """Widths: digits anywhere in the text, and with a `*` among what is put in."""
        widths = [int(digits[:18]) for digits in re.findall(r"\d+", str(text))]
        if "*" in str(text):
            widths += [abs(other) for other in others if isinstance(other, int)]
        self.spend(sum(widths))
        self._written(list(others))

    def _check_replace(self, text: str, others: list[Any]) -> None:
        if len(others) >= 2:
            self.spend(text.count(str(others[0])) * len(str(others[1])))


class _Turns(Iterator[Any]):
    """Items, each of which is work. No generator: of those that hold each other, as filters of filters do,
    Python frees as many at once as there are, with a stack for each."""

    def __init__(self, items: Iterator[Any], spend: Callable[[int], None]) -> None:
        self._items, self._spend = items, spend

    def __next__(self) -> Any:
        item = next(self._items)
        self._spend(TURN)
        return item


class _Rewrite(NodeTransformer):
    """Puts filters that count around what jinja2 gives no other access to."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802  # jinja2's names
        self.generic_visit(node)
        node.iter = _filtered(node.iter, EACH)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), CONCAT)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _filtered(node.expr, READ)
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, READ)
        return node

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, MADE)

    visit_Dict = visit_List  # noqa: N815

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, CUT) if isinstance(node.arg, nodes.Slice) else node

    def visit_AssignBlock(self, node: nodes.AssignBlock | nodes.FilterBlock) -> nodes.Node:  # noqa: N802
        """The first filter of a block's text, which stands innermost."""
        self.generic_visit(node)
        first: Any = node.filter
        while first is not None and first.node is not None:
            first = first.node
        counted = _filtered(None, MADE)
        if first is None:
            node.filter = counted
        else:
            first.node = counted
        return node

    visit_FilterBlock = visit_AssignBlock  # noqa: N815

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, MADE) if node.ctx == "load" else node


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=getattr(node, "lineno", None))


class _Formatter(SandboxedFormatter):
    def __init__(self, environment: "_Environment") -> None:
        super().__init__(environment)
        self._check = environment.check_format

    def format_field(self, value: Any, format_spec: str) -> str:
        self._check(format_spec, [value])
        return super().format_field(value, format_spec)


def _check_numbers(*values: Any, largest: int = LARGEST) -> None:
    """Python divides numbers of a million digits for minutes."""
    if any(isinstance(value, int) and abs(value) > largest for value in values):
        raise SecurityError(f"a number beyond {largest.bit_length()} bits")


class _Namespace(Namespace):
    """Prints nothing of what it holds, which may be itself."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise TemplateError(message)
