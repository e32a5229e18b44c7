"""What an op is: one declaration, from which the torch op and its fake are made, and the forms it runs in.

An op's folder holds `spec.py` (the declaration), `reference.py` (the truth: a plain loop) and its forms, one
file each: `compiled.py` (CPU), `cuda.py` (CUDA, launches the kernels of `triton.py`). Shapes are strings of
letters, one per dimension: T tokens, N rows, S slots, H heads, and so on; a letter means the same size
wherever it stands in one declaration, a digit itself.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch

from hemiola.plugins.gpu.dtypes import ENGINES
from hemiola.plugins.groups import E4M3 as E4M3
from hemiola.plugins.groups import Layout

LIBRARY = torch.library.Library("hemiola", "DEF")

FLOAT = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FP32 = (torch.float32, torch.float64)
INT = (torch.int32,)
Pack = Callable[[Any], torch.Tensor]  # of a weight, or of a WeightGroup where a form takes its layout


class Reason(str):
    """Why a form does not take a call, and the option of an engine that decides it, if one does."""

    option: str

    def __new__(cls, text: str, option: str) -> "Reason":
        made = super().__new__(cls, text)
        made.option = option
        return made


class Unsupported(ValueError):
    """No form of an op takes a call; the message says why, and `option` what a user may choose otherwise."""

    def __init__(self, message: str, option: str = "") -> None:
        super().__init__(message)
        self.option = option


class Arg(NamedTuple):
    """One tensor argument; `*` as a last letter of `shape` admits a zero-length tensor, meaning absent."""

    name: str
    shape: str
    dtypes: tuple[torch.dtype, ...] = FLOAT
    mutated: bool = False


class Attr(NamedTuple):
    """One constant argument, fixed when the graph is built; with a letter it is that letter's size, too."""

    name: str
    type: type
    letter: str = ""


class Result(NamedTuple):
    """One output, in the dtype of the op's first argument unless it has its own."""

    shape: str
    dtype: torch.dtype | None = None
    divisor: int = 1  # of its last size


ROWS = Arg("rows", "N8", INT)  # plugins/rows.py


class Call(NamedTuple):
    """What is known of one node of a graph when its form is chosen."""

    dtypes: dict[str, torch.dtype]  # by argument, absent ones left out
    sizes: dict[str, int]  # by letter, of those that are constant
    attrs: dict[str, Any]
    layouts: dict[str, Layout] = {}  # noqa: RUF012  # by argument, of those that are quantised weights
    options: tuple[str, ...] = ()  # that the call has


class Form(NamedTuple):
    """One way to run an op: `plugins/<op>/<name>.py` has a function of the op's name and arguments.

    Arguments named in `packs` it gets in the layout that their function makes of a weight, applied when the
    engine is built; `sizes` are letters whose sizes it gets behind the op's arguments. A quantised weight is
    packed as a group (groups.py); its layout comes as `<argument>_layout`.
    """

    name: str
    device: str  # cpu | cuda
    refuses: Callable[[Call], str]  # "" or the reason
    packs: dict[str, Pack] = {}  # noqa: RUF012
    sizes: str = ""
    refuses_layout: Callable[[Layout], str] = lambda layout: "it reads no quantised weights"
    options: tuple[str, ...] = ()  # of the op's, that it takes
    endings: tuple[str, ...] = ()  # of the op's, that it computes

    def reason(self, call: Call) -> str:
        """Why it does not take a call, or ""."""
        for name in call.options:
            if name not in self.options:
                return f"it takes no {name}"
        for name, layout in call.layouts.items():
            reason = self.refuses_layout(layout) or ("" if name in self.packs else "it is not packed")
            if reason:
                return f"{name} is {layout}: {reason}"
        return self.refuses(call)


class Ending(NamedTuple):
    """Another end of an op's kernels, with results of its own: `torch.ops.hemiola.<op>_<name>`. Functions of
    forms and the reference get its name as `ending`."""

    name: str
    results: tuple[Result, ...]
    refuses: Callable[[Call], str] = lambda call: ""


class FormChoice(NamedTuple):
    """The form for a call, and why the ones before it in the op's list refused."""

    form: Form
    refused: dict[str, str]  # reason by form


@dataclass(frozen=True)
class Op:
    """A declared op; `forms` are in order of preference."""

    name: str  # and that of its folder: `step.fill` is plugins/step/fill; behind it that of an ending
    args: tuple[Arg, ...]
    attrs: tuple[Attr, ...]
    results: tuple[Result, ...]
    reference: Callable[..., Any]
    forms: tuple[Form, ...]
    options: tuple[Arg, ...] = ()  # tensors behind the attributes, put there by a pass of the builder
    by_line: bool = False  # line t of the results depends on line t of the arguments alone
    endings: tuple[Ending, ...] = ()
    ending: str = ""  # of this one; such calls are in engines of our own kernels only

    @property
    def folder(self) -> str:
        """With dots, as Python writes it."""
        return self.name.removesuffix(f"_{self.ending}")

    def every_ending(self) -> "list[Op]":
        """This op, and one for each other ending, which has no options."""
        return [self, *map(self._ended, self.endings)]

    def _ended(self, end: Ending) -> "Op":
        forms = [
            form._replace(refuses=first_reason(end.refuses, form.refuses), options=())
            for form in self.forms
            if end.name in form.endings
        ]
        return replace(
            self,
            name=f"{self.name}_{end.name}",
            results=end.results,
            reference=partial(self.reference, ending=end.name),
            forms=tuple(forms),
            options=(),
            endings=(),
            ending=end.name,
        )

    def runs_on(self, device: str) -> bool:
        """Whether it has a form for it."""
        return any(form.device == device for form in self.forms)

    @property
    def exchanges(self) -> bool:
        """Between ranks; engines of other compilers have none."""
        return any(arg.name == "group" for arg in self.args)

    @property
    def has_onnx_body(self) -> bool:
        """Other compilers have this op, too; plugins/onnx.py."""
        return (Path(__file__).parent / self.folder / "onnx.py").is_file()

    def schema(self) -> str:
        """The torch.library schema; mutated arguments carry an alias mark."""
        marks = iter("abcdefghijk")
        parts = [f"Tensor({next(marks)}!) {a.name}" if a.mutated else f"Tensor {a.name}" for a in self.args]
        parts += [f"{a.type.__name__} {a.name}" for a in self.attrs]
        parts += [f"Tensor? {a.name}=None" for a in self.options]
        result = ", ".join(["Tensor"] * len(self.results))
        return f"{self.name}({', '.join(parts)}) -> {f'({result})' if len(self.results) > 1 else result}"

    def register(self) -> "Op":
        """Define `torch.ops.hemiola.<name>`: the reference, and a shape-checking fake for export."""
        LIBRARY.define(self.schema())
        LIBRARY.impl(self.name, self.reference, "CPU")
        torch.library.register_fake(f"hemiola::{self.name}", self._fake, lib=LIBRARY)
        return self

    @property
    def torch_op(self) -> Any:
        return getattr(torch.ops.hemiola, self.name).default

    def choose(self, call: Call, device: str) -> FormChoice:
        """The first form for `device` that takes the call. Raises Unsupported with all reasons."""
        refused: dict[str, str] = {}
        option = ""
        for form in self.forms:
            if form.device != device:
                continue
            reason = form.reason(call)
            if not reason:
                return FormChoice(form, refused)
            refused[form.name] = str(reason)
            option = option or getattr(reason, "option", "")
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise Unsupported(f"{self.name} cannot run on {device} ({reasons or 'it has no form there'})", option)

    def bind(
        self, form: str, sizes: Sequence[int], layouts: Mapping[str, Layout] = MappingProxyType({})
    ) -> Callable[..., Any]:
        """The form's function with the op's arguments alone; `sizes` of the letters that it asks for,
        `layouts` of quantised weights by argument."""
        function, named = self.function(form), self.named(layouts)
        if not sizes and not named:
            return function
        num = len(self.args) + len(self.attrs)

        def run(*values: Any) -> Any:
            options = dict(zip((arg.name for arg in self.options), values[num:], strict=False))
            return function(*values[:num], *sizes, **named, **options)

        return run

    def function(self, form: str) -> Callable[..., Any]:
        return getattr(self.module(form), self.folder.split(".")[-1])

    def module(self, form: str) -> ModuleType:
        return import_module(f"hemiola.plugins.{self.folder}.{form}")

    def named(self, layouts: Mapping[str, Layout]) -> dict[str, Any]:
        """What a form's function gets by name: layouts of quantised weights, and the ending."""
        return named_layouts(layouts) | ({"ending": self.ending} if self.ending else {})

    def form(self, name: str) -> Form:
        return next(form for form in self.forms if form.name == name)

    def call(self, *values: object) -> Call:
        """What is constant about a call with these arguments, attributes included."""
        first, num = len(self.args), len(self.args) + len(self.attrs)
        attrs = {attr.name: value for attr, value in zip(self.attrs, values[first:num], strict=True)}
        sizes = {letter: size for letter, size in self.check(*values).items() if isinstance(size, int)}
        tensors = {arg.name: value for arg, value in self._tensors(values) if not _is_absent(arg, value)}
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        options = tuple(arg.name for arg in self.options if arg.name in tensors)
        return Call(dtypes, sizes, attrs, options=options)

    def arg_at(self, place: int) -> Arg | None:
        """The tensor that a call has at this place; None: an attribute stands there, or nothing."""
        first_option = len(self.args) + len(self.attrs)
        known = dict(enumerate(self.args)) | dict(enumerate(self.options, first_option))
        return known.get(place)

    def _tensors(self, values: Sequence[Any]) -> Iterator[tuple[Arg, torch.Tensor]]:
        """Arguments, then the options that are given."""
        for place, value in enumerate(values):
            arg = self.arg_at(place)
            if arg is not None and not (value is None and arg in self.options):
                assert isinstance(value, torch.Tensor)
                yield arg, value

    def _fake(self, *values: Any) -> Any:
        sizes = self.check(*values)
        made = []
        for result in self.results:
            shape = [sizes[letter] for letter in result.shape]
            if result.divisor > 1:
                shape[-1] //= result.divisor
            made.append(values[0].new_empty(shape, dtype=result.dtype or values[0].dtype))
        return tuple(made) if len(made) > 1 else made[0]

    def check(self, *values: object) -> dict[str, int]:
        """Sizes by letter. Raises ValueError where a rank, dtype or constant size contradicts the shapes."""
        sizes = {digit: int(digit) for digit in "128"}
        for attr, value in zip(self.attrs, values[len(self.args) :], strict=False):
            if attr.letter and isinstance(value, int):
                sizes[attr.letter] = value
        for arg, value in self._tensors(values):
            if value.dtype not in arg.dtypes:
                raise ValueError(f"{self.name}: {arg.name} is {value.dtype}, expected one of {arg.dtypes}")
            for letter, size in self._letters(arg, value):
                known = sizes.setdefault(letter, size)
                if isinstance(size, int) and isinstance(known, int) and size != known:
                    raise ValueError(f"{self.name}: {arg.name}'s {letter} is {size}, elsewhere {known}")
        return sizes

    def _letters(self, arg: Arg, value: torch.Tensor) -> Iterator[tuple[str, int]]:
        """Each dimension's letter and size; none where an optional argument is absent."""
        letters = arg.shape.rstrip("*")
        if _is_absent(arg, value):
            return
        if value.dim() != len(letters):
            raise ValueError(f"{self.name}: {arg.name} has {value.dim()} dimensions, expected [{letters}]")
        yield from zip(letters, value.shape, strict=True)


def named_layouts(layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """Layouts of quantised weights by argument, as a form's function takes them."""
    return {f"{name}_layout": layout for name, layout in layouts.items()}


def _is_absent(arg: Arg, value: torch.Tensor) -> bool:
    return arg.shape.endswith("*") and value.dim() == 1 and value.shape[0] == 0


def first_reason(*refusals: Callable[[Call], str]) -> Callable[[Call], str]:
    """Refuses what one of these does, with the reason of the first."""
    return lambda call: next(filter(None, (refuses(call) for refuses in refusals)), "")


def one_dtype(wide: Sequence[str] = ()) -> Callable[[Call], str]:
    """Refuses floats that are not all bf16, or all fp32; those of the arguments `wide` that are not fp32."""

    def refuses(call: Call) -> str:
        floats = {name: dtype for name, dtype in call.dtypes.items() if dtype.is_floating_point}
        own = next((dtype for name, dtype in floats.items() if name not in wide), torch.float32)
        own = own if own in ENGINES else torch.bfloat16
        for name, dtype in floats.items():
            expected = torch.float32 if name in wide else own
            if dtype is not expected:
                return f"{name} is {dtype}, not {expected}"
        return ""

    return refuses


def fp32_in_sixteens(
    letters: str, options: Mapping[str, str] = MappingProxyType({})
) -> Callable[[Call], str]:
    """Refuses what 16-lane kernels of fp32 do not take: other dtypes, and other sizes of `letters`."""

    def refuses(call: Call) -> str:
        for name, dtype in call.dtypes.items():
            if dtype.is_floating_point and dtype is not torch.float32:
                return f"{name} is {dtype}, not torch.float32"
        for letter in letters:
            if call.sizes[letter] % 16:
                reason = f"{letter} is {call.sizes[letter]}, no multiple of 16"
                return Reason(reason, options[letter]) if letter in options else reason
        return ""

    return refuses


def in_groups(many: str, few: str) -> Callable[[Call], str]:
    """Refuses heads that do not make whole groups: a kernel would look for a group that is not there."""

    def refuses(call: Call) -> str:
        heads, groups = call.sizes[many], call.sizes[few]
        return "" if groups and heads % groups == 0 else f"{many} is {heads}, no multiple of {few} {groups}"

    return refuses


def quantised(*names: str) -> Callable[[Call], str]:
    """Refuses calls in which one of these weights is plain."""

    def refuses(call: Call) -> str:
        plain = [name for name in names if name not in call.layouts]
        return f"{plain[0]} is not quantised" if plain else ""

    return refuses


def on_the_grid(letter: str) -> Callable[[Call], str]:
    """Refuses what the recurrences' CUDA kernels do not take: other chunks, and other sizes of the keys."""

    def refuses(call: Call) -> str:
        size, chunk_len = call.sizes[letter], call.attrs["chunk_len"]
        if chunk_len not in (16, 32):
            return Reason(f"chunk_len is {chunk_len}, not 16 or 32", "chunk_len")
        return f"{letter} is {size}, not a power of two from 16 up" if size < 16 or size & (size - 1) else ""

    return refuses
