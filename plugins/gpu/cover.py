"""All calls that an op can come to make: its launcher is run on tensors without memory, and looked at."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from hemiola.plugins.gpu.compile import call_of
from hemiola.plugins.gpu.device import Gpu, built_for
from hemiola.plugins.gpu.launch import Call, Kernel, Values, launches
from hemiola.plugins.gpu.sizes import Size, ends
from hemiola.plugins.groups import Layout
from hemiola.plugins.spec import Op

Arguments = Callable[[Size], list[Any]]  # of a node in a step of this size, its tensors on the device meta


def calls_of(
    op: Op,
    arguments: Arguments,
    largest: Size,
    gpu: Gpu,
    form: str = "cuda",
    layouts: Mapping[str, Layout] = MappingProxyType({}),
) -> set[Call]:
    """What must be compiled for a node of steps up to `largest`. Its arguments are the op's, the sizes that
    its form gets, and options; `layouts` of quantised weights by argument.

    Plans and tiles are chosen by the numbers of tokens and rows. A launcher whose choices depend on them has
    `variants` beside it, with the sizes and options that reach each; others run at the ends.
    """
    function, named = op.function(form), op.named(layouts)
    variants = getattr(op.module(form), "variants", ends)
    num = len(op.args) + len(op.attrs) + len(op.form(form).sizes)

    def launcher(*values: Any, **chosen: Any) -> None:
        options = dict(zip((arg.name for arg in op.options), values[num:], strict=False))
        function(*values[:num], **named, **options, **chosen)

    ending = {"ending": op.ending} if op.ending else {}
    calls: set[Call] = set()
    with built_for(gpu):
        for size, chosen in variants(largest, *arguments(largest), **ending):
            for given in _as_seen(arguments(size)):
                calls |= calls_at(launcher, gpu, *given, **chosen)
    return calls


def _as_seen(values: Sequence[Any]) -> Iterable[Sequence[Any]]:
    """Of one token, a view of a projection may say that the next token lies next to it, or a projection on:
    kernels are told what strides are multiples of, so both are compiled, for each argument alone."""
    ways = []
    for value in values:
        ways.append([value])
        if isinstance(value, torch.Tensor) and value.dim() > 1 and len(value) == 1:
            strides = value.numel(), *value.stride()[1:]
            if strides != value.stride():
                ways[-1].append(value.as_strided(value.shape, strides, value.storage_offset()))
    return itertools.product(*ways)


def calls_at(launcher: Callable[..., Any], gpu: Gpu, *arguments: Any, **options: Any) -> set[Call]:
    """What one call of a launcher launches."""
    calls: set[Call] = set()

    def look(kernel: Kernel, grid: tuple[int, ...], values: Values, constants: Mapping[str, Any]) -> None:
        calls.add(call_of(kernel, values, constants))

    with built_for(gpu), launches(look), torch.inference_mode():
        launcher(*arguments, **options)
    return calls
