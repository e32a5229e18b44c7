"""What a manifest lists for the ops: segments and their calls, kernels, weights that are drawn."""

import math
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from hemiola.plugins.gpu import lines
from hemiola.plugins.gpu.binaries import Binary
from hemiola.plugins.gpu.words import form_of, num_bytes, refuses_layout
from hemiola.plugins.groups import Layout
from hemiola.runtime.outline import ITEM_BYTES, MOST_LINES, Count, Dtype, FileName, Frozen, Size, Word

PARTS = "parts"  # the folder of compiled parts
NEXT = ".next"  # behind a state's name: what it is after the step
GROUP = "group"  # the weight that stands in no file: who the ranks are (plugins/ranks.py)
HIDDEN = "mtp.hidden"  # the state in which an MTP head finds the trunk's hidden states
PTX = "ptx"  # the form of an op whose kernels TensorRT has in its own engine


def _layout(text: str) -> str:
    Layout.parse(text)
    return text


def _printable(text: str) -> str:
    """Terminals obey some characters."""
    if not text.isprintable():
        raise ValueError("it should be a line of printable characters")
    return text


# What a stranger's manifest can say of a file, a size and a number.
Line = Annotated[str, AfterValidator(_printable)]
RepoName = Annotated[str, Field(pattern=r"^([\w.-]+/[\w.-]+)?$", max_length=200)]
Shape = Annotated[tuple[Size, ...], Field(max_length=8)]
Names = Annotated[tuple[Word, ...], Field(max_length=MOST_LINES)]


class Drawn(Frozen):
    """A weight of normal numbers around 0 that is made when the engine is opened, to measure it."""

    shape: Shape
    dtype: Dtype
    std: float = Field(ge=0, allow_inf_nan=False)
    ranked: bool = False  # each rank draws numbers of its own
    layout: Word = ""  # of a quantised weight for a GPU, which has this shape unpacked

    @field_validator("layout")
    @classmethod
    def _is_layout(cls, text: str, info: ValidationInfo) -> str:
        if text and len(info.data.get("shape", ())) < 2:
            raise ValueError("a quantised weight has outputs and inputs")
        if text:
            layout = Layout.parse(text)
            if reason := lines.refuses_wide(layout) if layout.inputs else refuses_layout(layout):
                raise ValueError(f"{text!r}: {reason}")
        return text

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        if not self.layout:
            return math.prod(self.shape) * ITEM_BYTES[self.dtype]
        *outer, outputs, inputs = self.shape
        layout = Layout.parse(self.layout)
        if layout.inputs:
            return math.prod(outer) * lines.num_bytes(layout, outputs, inputs)
        return math.prod(outer) * num_bytes(form_of(layout), outputs, inputs)


class OpNode(Frozen):
    """One call of an op of ours, in the order of the program."""

    op: Word
    form: Word
    refused: dict[Word, Line]  # by better form, why it is not that
    sizes: tuple[Count, ...]  # that the form gets behind the op's arguments

    @property
    def is_callback(self) -> bool:
        """TensorRT calls it in Python; why it cannot launch it by itself, stands in `refused`."""
        return PTX in self.refused


class HeadCall(OpNode):
    """A call that computes logits, or the best of them, of lines of hidden states."""

    weights: tuple[Word, ...]  # behind the lines


class SegmentPiece(Frozen):
    """One step of a segment that was cut. Values are named; each is computed once."""

    kind: Literal["part", "view", "op"]
    name: Line  # of the file in parts/, of torch's view, or of the op; its node is the segment's next
    inputs: tuple[Line, ...]
    outputs: tuple[Line, ...]
    constants: tuple[int | float | Line | bool, ...] = ()  # sizes of a view, attributes of an op


class Profile(Frozen):
    """Sizes that compiled parts take: by name the least, the usual and the most."""

    name: Word
    sizes: dict[Line, tuple[Count, Count, Count]]


class Segment(Frozen):
    """One exported program. It is called with its weights, states and inputs, in this order, flat."""

    name: Literal["trunk", "draft"]
    file: FileName  # "" where it is in pieces
    lines_file: FileName = ""  # the trunk for steps that draft nothing: hidden states where there are logits
    weights: Names
    states: Names
    inputs: Names
    nodes: tuple[OpNode, ...] = Field(max_length=MOST_LINES)
    # What a program that ends with lines of hidden states leaves to who asks: logits, and the best of them.
    head: tuple[HeadCall, ...] = ()
    # Logits of any line of hidden states: a call of the program or of the head.
    scores: HeadCall | None = None
    # Of quantised weights, by name (plugins/groups.py).
    layouts: dict[Word, Annotated[Word, AfterValidator(_layout)]] = Field(default_factory=dict)
    pieces: tuple[SegmentPiece, ...] = ()  # in the order in which they run
    outputs: tuple[Line, ...] = ()  # logits and hidden among the values of the pieces
    compiler: Word = ""  # of the parts: the target and its version
    profiles: tuple[Profile, ...] = ()  # of the parts, the one for the fewest tokens first
    work_bytes: int = Field(
        default=0, ge=0, lt=2**63
    )  # that its largest step takes on a GPU, beside weights, pages and slots

    @property
    def files(self) -> list[str]:
        """What the segment consists of, inside the engine directory; segments may share parts."""
        parts = dict.fromkeys(f"{PARTS}/{piece.name}" for piece in self.pieces if piece.kind == "part")
        return [*parts] or [self.file, *([self.lines_file] if self.lines_file else [])]

    @property
    def calls(self) -> tuple[OpNode, ...]:
        """Of ops of ours."""
        return (*self.nodes, *self.head)


class KernelFile(Frozen):
    """One compiled kernel."""

    file: FileName
    binary: Binary


class Kernels(Frozen):
    """All kernels that an engine can come to launch on GPUs of one architecture."""

    arch: Word
    cuda: str = Field(
        pattern=r"^\d{1,4}(\.\d{1,4})*$"
    )  # version of the assembler: a driver must know its major
    sources: Line  # plugins/gpu/binaries.py
    binaries: tuple[KernelFile, ...]
