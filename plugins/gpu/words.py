"""Quantised weights as kernels for GPUs read them: words of 16 bits, scales of the outputs beside them.

A word holds the codes of one output for inputs i, HALF + i, 2 HALF + i, ...: a tile of words lies in shared
memory and registers as a tile of bf16 weights does, and each of its parts is one for the tensor cores, with
inputs in their order. Words of 16 outputs lie side by side, block of inputs by block of inputs. A matrix is
one row of bytes: words, scales, zero points, factors of outputs.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hemiola.plugins.groups import CODES, Layout, WeightGroup, factors, numbers
from hemiola.plugins.inputs import WIDE_INPUTS

SLAB = 16  # outputs side by side
MOST_STEP = 128  # inputs that are summed from zero
LEAST_HALF = 16  # inputs of a product of the tensor cores
ALIGNMENT = 64  # bytes of a matrix and its sections
MIDDLE = {"int4": 8}  # what codes lie above when they are packed: 0 to 15


class Coding(NamedTuple):
    """How a kernel takes a layout; constants of plugins/gpu/codes.py."""

    kind: str
    half: int  # words of an output in a block
    step: int  # inputs that are summed from zero
    is_scaled: bool  # by step; else a row has a scale, and e2m1 codes have theirs
    has_zeros: bool
    divides: bool

    @property
    def bits(self) -> int:
        return 4 if self.kind in ("int4", "e2m1") else 8

    @property
    def block(self) -> int:
        """Inputs of a block."""
        return self.half * 16 // self.bits

    @property
    def spans(self) -> int:
        """Scales of a block of an output."""
        return self.block // self.step

    @property
    def scale_dtype(self) -> torch.dtype | None:
        """Of scales by span; four e2m1 spans have one int32 for all."""
        return torch.int32 if self.kind == "e2m1" else torch.float32 if self.is_scaled else None

    def constants(self) -> dict[str, int | str | bool]:
        return {"KIND": self.kind, "HALF": self.half, "STEP": self.step, "SCALED": self.is_scaled,
                "ZEROS": self.has_zeros, "DIVIDES": self.divides}  # fmt: skip


class Words(NamedTuple):
    """A packed weight's sections, [..., n]; what a kind has not is words again."""

    words: torch.Tensor  # int16
    scales: torch.Tensor  # fp32, or int32
    zeros: torch.Tensor  # int16: Triton takes a tile's inputs in another order where bytes are loaded
    factors: torch.Tensor  # fp32
    form: Coding


def form_of(layout: Layout) -> Coding:
    is_e2m1, divides = layout.kind == "e2m1", "divisor" in layout.others
    parts = 4 if layout.kind in ("int4", "e2m1") else 2
    step = 4 * layout.span if is_e2m1 else math.gcd(layout.span, MOST_STEP)
    half, is_scaled = max(LEAST_HALF, step // parts), layout.span > 0 and not is_e2m1
    return Coding(layout.kind, half, step, is_scaled, "zeros" in layout.others, is_e2m1 and divides)


def refuses_layout(layout: Layout) -> str:
    """Of what `pack_words` takes apart."""
    if layout.inputs:
        return WIDE_INPUTS
    if layout.kind == "e2m1" and (layout.span != 16 or "zeros" in layout.others):
        return "e2m1 codes have scales for 16 inputs and no zero points"
    if layout.kind == "e4m3" and "zeros" in layout.others:
        return "e4m3 codes have no zero points"
    return f"a scale for {layout.span} inputs, no multiple of 16" if layout.span % 16 else ""


def _sections(form: Coding, num_outputs: int, num_inputs: int) -> dict[str, tuple[int, int, torch.dtype]]:
    """Where each begins and ends, bytes of a matrix."""
    slabs, blocks, at = -(-num_outputs // SLAB), -(-num_inputs // form.block), 0
    rows, spans = slabs * SLAB, slabs * SLAB * blocks * form.spans
    counts: dict[str, tuple[int, torch.dtype]] = {"words": (rows * blocks * form.half, torch.int16)}
    if form.scale_dtype is not None:
        counts["scales"] = spans, form.scale_dtype
    if form.has_zeros:
        counts["zeros"] = spans if form.is_scaled else rows, torch.int16
    if not form.is_scaled:
        counts["factors"] = rows, torch.float32
    found = {}
    for name, (count, dtype) in counts.items():
        found[name] = at, at + count * dtype.itemsize, dtype
        at += -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return found


def num_bytes(form: Coding, num_outputs: int, num_inputs: int) -> int:
    """Of a matrix."""
    end = max(end for _, end, _ in _sections(form, num_outputs, num_inputs).values())
    return -(-end // ALIGNMENT) * ALIGNMENT


def sections(packed: torch.Tensor, layout: Layout, num_outputs: int, num_inputs: int) -> Words:
    """Views of a packed weight. Raises ValueError where this is not packed from [.., O, F]."""
    form = form_of(layout)
    expected = num_bytes(form, num_outputs, num_inputs)
    if packed.dtype is not torch.uint8 or packed.shape[-1] != expected:
        raise ValueError(
            f"linear: {packed.dtype} {list(packed.shape)} is not packed from {num_outputs} outputs of"
            f" {num_inputs} inputs in {layout}, which take {expected} bytes"
        )
    views = {
        name: packed[..., first:end].view(dtype)
        for name, (first, end, dtype) in _sections(form, num_outputs, num_inputs).items()
    }
    words = views["words"]
    return Words(
        words, views.get("scales", words), views.get("zeros", words), views.get("factors", words), form
    )


def pack_words(group: WeightGroup) -> torch.Tensor:
    """A weight [..., O, F] as [..., bytes], uint8."""
    layout, form = group.layout, form_of(group.layout)
    *outer, num_outputs, num_inputs = group.shape
    whole = -(-num_inputs // form.block) * form.block
    places = torch.arange(0, num_inputs, form.step) // (layout.span or num_inputs)
    parts = {"words": _words(group.tensors["codes"], form, whole)}
    if form.kind == "e2m1":
        parts["scales"] = _blocks(_five_bits(group.tensors["scales"]), whole // 16, 4)
    elif form.is_scaled:
        parts["scales"] = _blocks(_spans(factors(group), places), whole // form.step, 1)
    if form.has_zeros:
        zeros = group.tensors["zeros"]
        if form.is_scaled:
            zeros = _spans(zeros, places)
        parts["zeros"] = _blocks(zeros, whole // form.step if form.is_scaled else 1, 1)
    if not form.is_scaled:
        parts["factors"] = _blocks(_row_factors(group), 1, 1)
    made = torch.zeros(
        *outer,
        num_bytes(form, num_outputs, num_inputs),
        dtype=torch.uint8,
        device=group.tensors["codes"].device,
    )
    for name, (first, end, _) in _sections(form, num_outputs, num_inputs).items():
        made[..., first:end] = parts[name].view(torch.uint8)
    return made


def pack_words_in_parts(
    read: Callable[[int, int], WeightGroup], layout: Layout, shape: Sequence[int], most_rows: int
) -> torch.Tensor:
    """pack_words of a matrix [O, F] whose rows begin .. end are read, so many at a time or a slab of them."""
    form, (num_outputs, num_inputs) = form_of(layout), shape
    made = torch.zeros(num_bytes(form, num_outputs, num_inputs), dtype=torch.uint8)
    step = max(SLAB, most_rows // SLAB * SLAB)
    for first in range(0, num_outputs, step):
        last = min(first + step, num_outputs)
        part, own = pack_words(read(first, last)), _sections(form, last - first, num_inputs)
        for name, (place, _, _) in _sections(form, num_outputs, num_inputs).items():
            begin, end, _ = own[name]
            place += first * (end - begin) // (-(-(last - first) // SLAB) * SLAB)
            made[place : place + end - begin] = part[begin:end]
    return made


def random_words(layout: Layout, shape: Sequence[int], std: float, rng: torch.Generator) -> torch.Tensor:
    """A packed weight [..., O, F] of random codes whose numbers have this standard deviation."""
    *outer, num_outputs, num_inputs = shape
    form, size = form_of(layout), (*outer, num_bytes(form_of(layout), num_outputs, num_inputs) // 4)
    ints = torch.randint(-(2**31), 2**31, size, generator=rng, device=rng.device, dtype=torch.int32)
    made, narrow = ints.view(torch.uint8), 0xBF if layout.kind == "e4m3" else 0xFF  # below 2, and no NaN
    every = torch.arange(256 if form.bits == 8 else 16, dtype=torch.uint8) & narrow
    codes = every.view(CODES[layout.kind]) if form.bits == 8 else every
    if layout.kind == "int4":
        codes = codes.to(torch.int8) - MIDDLE["int4"]
    scale = std / numbers(WeightGroup(layout, {"codes": codes})).square().mean().sqrt().item()
    found = sections(made, layout, num_outputs, num_inputs)
    found.words.bitwise_and_(narrow * 0x101 - (narrow // 128 << 16))
    if form.is_scaled:
        found.scales.fill_(scale)
    elif form.kind == "e2m1":
        found.scales.fill_(-0x7F7F7F80)  # 1 four times
    if form.has_zeros:
        found.zeros.zero_()
    if not form.is_scaled:
        found.factors.fill_(1 / scale if form.divides else scale)
    return made


def _spans(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return values.index_select(-1, places.to(values.device))


def _row_factors(group: WeightGroup) -> torch.Tensor:
    """What a row's sum is multiplied with, or divided by, [..., O, 1] fp32."""
    if group.layout.kind != "e2m1":
        return factors(group)
    tensors = group.tensors
    given = tensors.get("factor", tensors.get("divisor"))
    return torch.ones_like(tensors["scales"][..., :1].float()) if given is None else given


def _words(codes: torch.Tensor, form: Coding, whole: int) -> torch.Tensor:
    """[..., O, F] as [..., bytes]: slabs, blocks, outputs, words."""
    codes = codes.view(torch.uint8).to(torch.int32)
    if form.kind in MIDDLE:
        codes = (codes + MIDDLE[form.kind]) & 15
    *outer, num_outputs, num_inputs = codes.shape
    codes = torch.nn.functional.pad(codes, (0, whole - num_inputs, 0, -num_outputs % SLAB))
    parts = codes.view(*outer, -1, SLAB, whole // form.block, form.block // form.half, form.half)
    if form.kind == "e2m1":
        parts = spread(parts)
    else:
        parts = parts << torch.arange(0, 16, form.bits, dtype=torch.int32, device=codes.device)[:, None]
    words = parts.sum(-2, dtype=torch.int32).to(torch.int16)
    return words.transpose(-2, -3).contiguous().flatten(-4).view(torch.uint8)


def spread(parts: torch.Tensor) -> torch.Tensor:
    """Codes of e2m1 [..., 4, HALF] where a word has them: sign and size of the first three as far apart as in
    bf16, so that a move brings both to their places; the last one has the bits between."""
    sign, size = parts >> 3, parts & 7
    moved = [sign[..., n, :] << (15 - 3 * n) | size[..., n, :] << (6 - 3 * n) for n in range(3)]
    last = sign[..., 3, :] << 14 | (size[..., 3, :] & 1) << 13 | (size[..., 3, :] >> 1) << 10
    return torch.stack([*moved, last], -2)


def _blocks(values: torch.Tensor, width: int, each: int) -> torch.Tensor:
    """[..., O, n] as [..., slabs * width / each * SLAB * each]: `each` of an output side by side."""
    *outer, num_outputs, num = values.shape
    padded = torch.nn.functional.pad(values, (0, width - num, 0, -num_outputs % SLAB))
    return padded.view(*outer, -1, SLAB, width // each, each).transpose(-2, -3).contiguous().flatten(-4)


def _five_bits(scales: torch.Tensor) -> torch.Tensor:
    """Positive e4m3 numbers with five bits of exponent (bias 16), so that none is subnormal; uint8."""
    fraction, exponent = torch.frexp(scales.float())  # of 0.5 to 1
    eighths = (fraction * 16 - 8).to(torch.int32)
    return ((exponent - 1 + 16) * 8 + eighths).clamp(0, 255).to(torch.uint8)
