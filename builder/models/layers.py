"""The modules that families share: parameters that know their place in a checkpoint, arithmetic from `ops`.

A module is made on the meta device, so that a model of any size costs nothing until its weights are written.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import nn

from hemiola.builder.checkpoint import Checkpoint
from hemiola.builder.cut import WHOLE, Cut
from hemiola.builder.formats.rounded import quantised
from hemiola.builder.lazy import Lazy, join, stacked
from hemiola.plugins.attention.pages import FORMATS, PageFormat
from hemiola.plugins.ranks import words_of
from hemiola.plugins.sum.reference import tree
from hemiola.runtime.arch import name_of
from hemiola.runtime.errors import Refused
from hemiola.runtime.outline import Limits, State

Tensors = dict[str, torch.Tensor]
WIDE_RECORDS = ("dt", "g", "beta")


class Kit:
    """What layers are made with; `ops` is torch.ops.hemiola or the references, with the same signatures."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        ops: Any,
        chunk_len: int,
        max_len: int,
        dtype: torch.dtype = torch.float32,
        pages: PageFormat = FORMATS["auto"],
        tells_best: bool = False,
        cut: Cut = WHOLE,
        num_segments: int = 1,
    ) -> None:
        self.checkpoint, self.ops, self.chunk_len, self.max_len = checkpoint, ops, chunk_len, max_len
        self.dtype = dtype  # of activations, and of what is not wide
        self.pages = pages
        self.tells_best = tells_best  # a segment's last outputs: the best logit and its token
        self.cut, self.segments = cut, cut.segments(num_segments)
        self.sources: dict[nn.Parameter, Lazy] = {}
        self.whole: dict[nn.Parameter, Lazy] = {}  # what a weight of which a rank has rows is cut from
        self.group = None if cut.size == 1 else self._group()
        # stands for a gate or a bias that a layer has not
        self.absent = self.weight(Lazy.of(torch.zeros(0)), wide=True)

    @property
    def dtype_name(self) -> str:
        return name_of(self.dtype)

    def page_scale(self, prefix: str, part: str) -> float:
        """Of the keys ("k") or values ("v") of a layer: what e4m3 pages hold them in units of."""
        spellings = (f"{prefix}{part}_proj.{part}_scale", f"{prefix}{part}_scale")
        known = {name: self.checkpoint.tensor(name) for name in spellings if name in self.checkpoint}
        if self.pages != FORMATS["fp8"]:
            return 1.0  # formats of TurboQuant have e4m3 keys without a scale
        for name, lazy in known.items():
            scale = float(lazy.read())
            if scale <= 0:
                message = f"{self.checkpoint.path}: {name} is {scale}, expected a positive number"
                way_out = "correct it, or leave --kv-dtype fp8 out"
                raise Refused("out_of_range", name, message=message, way_out=way_out)
            return scale
        return 1.0

    def _group(self) -> nn.Parameter:
        """What ops get that exchange with other ranks; it comes from the runtime (plugins/ranks.py)."""
        num = words_of(self.cut.size)
        group = nn.Parameter(torch.empty(num, dtype=torch.int64, device="meta"), requires_grad=False)
        self.sources[group] = Lazy.of(torch.zeros(num, dtype=torch.int64))
        return group

    def weight(self, source: Lazy, wide: bool = False) -> nn.Parameter:
        """A parameter whose content comes from `source` when the engine is written; a wide one is fp32."""
        empty = torch.empty(source.shape, dtype=torch.float32 if wide else self.dtype, device="meta")
        parameter = nn.Parameter(empty, requires_grad=False)
        self.sources[parameter] = source
        return parameter


class Step(NamedTuple):
    """What layers read of a step besides its tokens."""

    states: Tensors
    positions: torch.Tensor  # [T]
    rows: torch.Tensor  # [N, 8]
    page_table: torch.Tensor  # [N, W]


@runtime_checkable
class Stateful(Protocol):
    """A layer that keeps something between steps."""

    def states(self, limits: Limits) -> list[State]: ...


class Linear(nn.Module):
    """x @ weight.T + bias; the weight may be quantised."""

    def __init__(self, kit: Kit, weight: Lazy, bias: Lazy | None = None) -> None:
        super().__init__()
        self.ops = kit.ops
        self.weight = kit.weight(weight)
        self.bias = kit.absent if bias is None else kit.weight(bias)

    def smaller(self, kit: Kit, num: int | None, codes: str | None) -> "Linear":
        """A copy of its first `num` outputs, if not of all; in codes (formats/rounded.py), if any."""
        known = kit.sources | kit.whole
        weight, bias = known[self.weight], known[self.bias]
        if num is not None:
            weight, bias = (part.take(lambda rows: rows[:num]) for part in (weight, bias))
        if codes is not None and weight.layout is None:
            weight = quantised(weight, codes)
        if self.bias.numel() > 0:
            return Linear(kit, weight, bias)
        return Linear.head(kit, weight, "vocab_size" if num is None else "--draft-vocab")

    @classmethod
    def head(cls, kit: Kit, weight: Lazy, what: str = "vocab_size") -> "Linear":
        """Rows of tokens, of which a rank has its part."""
        kit.cut.share(what, weight.shape[0])
        linear = cls(kit, kit.cut.rows(weight, [weight.shape[0]]))
        kit.whole[linear.weight] = weight
        return linear

    @classmethod
    def sharing(cls, kit: Kit, weight: nn.Parameter) -> "Linear":
        """With a weight [O, F] that another module has already, unless it is cut here."""
        if kit.group is not None:
            return cls.head(kit, kit.sources[weight])
        linear = cls(kit, kit.sources[weight])
        linear.weight = weight
        return linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(x, self.weight, self.bias)

    def split(self, x: torch.Tensor, widths: Sequence[int]) -> Sequence[torch.Tensor]:
        """The outputs in parts."""
        return self(x).split(widths, dim=1)

    def best(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The highest output of each line, and which it is."""
        return self.ops.linear_argmax(x, self.weight, self.bias)


class Down(Linear):
    """A dense layer whose inputs are cut between ranks; from its whole weight."""

    def __init__(self, kit: Kit, weight: Lazy) -> None:
        first, *rest = (cut.columns(weight) for cut in kit.segments)
        super().__init__(kit, first)
        self.rest, self.sum = nn.ModuleList(Linear(kit, part) for part in rest), Sum(kit)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sum(self.parts(x))

    def parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Of this rank alone, by segment."""
        if not len(self.rest):
            return [super().forward(x)]
        first, *others = x.chunk(1 + len(self.rest), dim=1)
        rest = (layer(other) for layer, other in zip(self.rest, others, strict=True))
        return [super().forward(first), *rest]


class Sum(nn.Module):
    """Of all segments of all ranks, in one tree; of one segment of one rank it is that."""

    def __init__(self, kit: Kit) -> None:
        super().__init__()
        self.ops, self.group, self.num_segments = kit.ops, kit.group, len(kit.segments)

    @property
    def is_one(self) -> bool:
        return self.group is None and self.num_segments == 1

    def forward(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        dtype = parts[0].dtype
        if self.num_segments > 1 and dtype is torch.bfloat16:  # whoever adds, it is rounded at the end
            parts = [part.to(torch.float32) for part in parts]
        rank_sum = tree(parts)
        whole = rank_sum if self.group is None else self.ops.sum(rank_sum, self.group)
        return whole if whole.dtype is dtype else whole.to(dtype)


class SideBySide(nn.Module):
    """The outputs of several layers, one behind the other."""

    def __init__(self, layers: Sequence[Linear]) -> None:
        super().__init__()
        self.layers, self.sizes = nn.ModuleList(layers), [len(layer.weight) for layer in layers]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x) for layer in self.layers], dim=1)

    def split(self, x: torch.Tensor, widths: Sequence[int]) -> Sequence[torch.Tensor]:
        """The outputs in parts; none is copied if each is one layer's. The narrowest layer comes first: a GPU
        begins the next one meanwhile."""
        left, each = list(widths), []
        for num_outputs in self.sizes:
            taken: list[int] = []
            while left and sum(taken) + left[0] <= num_outputs:
                taken.append(left.pop(0))
            if sum(taken) < num_outputs:
                return self(x).split(widths, dim=1)
            each.append(taken)
        order = sorted(range(len(each)), key=lambda n: sum(each[n]))
        outputs = {n: self.layers[n](x).split(each[n], dim=1) for n in order}
        return [part for n in range(len(each)) for part in outputs[n]]


def dense(kit: Kit, parts: Sequence[Lazy]) -> Linear | SideBySide:
    """One layer with the outputs of all parts; neighbours that are quantised alike are one weight."""
    wanted = [part for part in parts if part.shape[0]]
    layers = [Linear(kit, join([*run])) for _, run in groupby(wanted, lambda part: part.kind)]
    return layers[0] if len(layers) == 1 else SideBySide(layers)


class Embedding(nn.Module):
    """A line of the weight for each token."""

    def __init__(self, kit: Kit, weight: Lazy) -> None:
        super().__init__()
        self.ops, self.weight = kit.ops, kit.weight(weight)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.ops.embed(self.weight, token_ids)


class Norm(nn.Module):
    """RMS norm over groups of `group_len` channels; silu(gate), if any, multiplies before or after it."""

    def __init__(
        self, kit: Kit, weight: Lazy, eps: float, group_len: int = 0, gate_first: bool = False
    ) -> None:
        super().__init__()
        self.ops, self.eps, self.gate_first = kit.ops, eps, gate_first
        self.group_len = group_len or weight.shape[0]
        self.weight, self.absent = kit.weight(weight, wide=True), kit.absent

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        gate = self.absent if gate is None else gate
        return self.ops.norm(x, gate, self.weight, self.eps, self.group_len, self.gate_first)


class Residual(nn.Module):
    """x + body(norm(x))."""

    def __init__(self, norm: Norm, body: nn.Module) -> None:
        super().__init__()
        self.norm, self.body = norm, body

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        return x + self.body(self.norm(x), step)


class Relu2Mlp(nn.Module):
    """down(relu(up(x))^2)"""

    def __init__(self, kit: Kit, prefix: str, width: int, inner: int) -> None:
        super().__init__()
        kit.cut.share(f"the width of {prefix}up_proj", inner)
        up = kit.checkpoint.matrix(f"{prefix}up_proj.weight", inner, width)
        self.up = Linear(kit, kit.cut.rows(up, [inner]))
        self.down = Down(kit, kit.checkpoint.matrix(f"{prefix}down_proj.weight", width, inner))

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        return self.down(self._hidden(x))

    def parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        """See Down."""
        return self.down.parts(self._hidden(x))

    def _hidden(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.up(x))
        return hidden * hidden


class SwigluMlp(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, kit: Kit, prefix: str, width: int, inner: int) -> None:
        super().__init__()
        kit.cut.share(f"the width of {prefix}up_proj", inner)
        matrix = kit.checkpoint.matrix
        gate_up = [matrix(f"{prefix}{part}_proj.weight", inner, width) for part in ("gate", "up")]
        self.gate_up = dense(kit, [kit.cut.rows(part, [inner]) for part in gate_up])
        self.down = Down(kit, matrix(f"{prefix}down_proj.weight", width, inner))
        self.ops = kit.ops

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        return self.down(self._hidden(x))

    def parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        """See Down."""
        return self.down.parts(self._hidden(x))

    def _hidden(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=1)
        return self.ops.gate(up, gate, "silu")


class Experts(nn.Module):
    """The routed experts of one layer, cut within each; from whole weights. `activation` is "relu2" or
    "swiglu"."""

    def __init__(self, kit: Kit, up: Lazy, down: Lazy, activation: str) -> None:
        super().__init__()
        inner = down.shape[-1]
        kit.cut.share("the width of experts", inner)
        rows = [inner] * (up.shape[1] // inner)  # gate and up are cut apart
        first, *rest = ((cut.rows(up, rows, dim=1), cut.columns(down)) for cut in kit.segments)
        self.ops, self.activation = kit.ops, activation
        self.up, self.down = map(kit.weight, first)
        self.rest = nn.ModuleList(_ExpertSegment(kit, *pair, activation) for pair in rest)

    def parts(
        self, x: torch.Tensor, expert_weights: torch.Tensor, expert_ids: torch.Tensor
    ) -> list[torch.Tensor]:
        """Of this rank alone, by segment."""
        output = self.ops.moe(x, expert_ids, expert_weights, self.up, self.down, self.activation)
        return [output, *(segment(x, expert_weights, expert_ids) for segment in self.rest)]


class _ExpertSegment(nn.Module):
    """The same, of another segment."""

    def __init__(self, kit: Kit, up: Lazy, down: Lazy, activation: str) -> None:
        super().__init__()
        self.ops, self.activation = kit.ops, activation
        self.up, self.down = kit.weight(up), kit.weight(down)

    def forward(
        self, x: torch.Tensor, expert_weights: torch.Tensor, expert_ids: torch.Tensor
    ) -> torch.Tensor:
        return self.ops.moe(x, expert_ids, expert_weights, self.up, self.down, self.activation)


def expert_tensors(
    kit: Kit, prefix: str, parts: tuple[str, ...], num_experts: int, out: int, width: int
) -> Lazy:
    """One tensor per expert on disk, [E, parts * out, width] here, whole."""

    matrix, experts = kit.checkpoint.matrix, range(num_experts)
    matrices = [[matrix(f"{prefix}{e}.{part}_proj.weight", out, width) for part in parts] for e in experts]
    kinds = {str(each.layout or "not quantised") for expert in matrices for each in expert}
    if len(kinds) > 1:
        message = (
            f"{kit.checkpoint.path}: the experts of {prefix} are {' and '.join(sorted(kinds))}; those of a"
            " layer must be alike"
        )
        raise Refused("unsupported", message=message, way_out="use another checkpoint")
    for e, expert in enumerate(matrices):
        if len({each.kind for each in expert}) > 1:
            message = (
                f"{kit.checkpoint.path}: {' and '.join(parts)} of {prefix}{e} have inputs of unlike scales"
            )
            raise Refused("unsupported", message=message, way_out="leave --act-dtype out")
    return stacked(join(expert) for expert in matrices)


class Pages(nn.Module):
    """Attention over the paged keys and values of the layer `name`, whose projections begin with `prefix`."""

    def __init__(self, kit: Kit, prefix: str, name: str, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.ops = kit.ops
        self.scales = [kit.page_scale(prefix, part) for part in "kv"]
        self.first = 1 if name.startswith("mtp.") else 0  # an MTP head has no pair at place 0
        self.k_name, self.v_name = f"{name}.k_pages", f"{name}.v_pages"
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.dtypes, self.widths = kit.pages.dtypes(kit.dtype), kit.pages.widths(head_dim)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: Step) -> torch.Tensor:
        k_pages, v_pages = step.states[self.k_name], step.states[self.v_name]
        where = (step.page_table, step.rows, step.positions)
        numbers = (self.head_dim**-0.5, self.first, *self.scales)
        return self.ops.attention(q, k, v, k_pages, v_pages, *where, *numbers)

    def states(self, limits: Limits) -> list[State]:
        kinds = zip((self.k_name, self.v_name), self.widths, self.dtypes, strict=True)
        return [
            State(name=name, kind="page", shape=(limits.page_len, self.kv_heads, width), dtype=name_of(dtype))
            for name, width, dtype in kinds
        ]


class Conv(nn.Module):
    """The causal depthwise convolution and silu in front of a recurrence."""

    def __init__(self, kit: Kit, name: str, weight: Lazy, bias: Lazy) -> None:
        super().__init__()
        self.ops, self.chunk_len, self.name = kit.ops, kit.chunk_len, f"{name}.conv"
        self.dtype_name = kit.dtype_name
        self.weight, self.bias = kit.weight(weight), kit.weight(bias)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        return self.ops.conv(x, self.weight, self.bias, step.states[self.name], step.rows, self.chunk_len)

    def states(self, limits: Limits) -> list[State]:
        channels, width = self.weight.shape
        shape = (limits.chunk_len + limits.num_drafts + width - 1, channels)
        return [State(name=self.name, kind="slot", shape=shape, dtype=self.dtype_name)]


def slot_states(
    name: str, limits: Limits, state: tuple[int, ...], records: dict[str, tuple[int, ...]], dtype_name: str
) -> list[State]:
    """A recurrence's state and the record rings beside it; state, time steps and gates are fp32."""
    ring = limits.chunk_len + limits.num_drafts
    states = [State(name=f"{name}.state", kind="slot", shape=state, dtype="float32")]
    for record, shape in records.items():
        dtype = "float32" if record in WIDE_RECORDS else dtype_name
        states.append(State(name=f"{name}.{record}_records", kind="slot", shape=(ring, *shape), dtype=dtype))
    return states


class Rope:
    """The table of a model's rotary positions, [max_len, 2, R]: cos and sin of place * theta^(-2 i / 2 R).

    Angles are rounded to fp32 like transformers' are; their cos and sin are computed in fp64.
    """

    def __init__(self, kit: Kit, theta: float, rotary_dim: int) -> None:
        self.ops = kit.ops
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        angles = torch.outer(torch.arange(kit.max_len).float(), 1.0 / theta**exponents).double()
        self.table = kit.weight(Lazy.of(torch.stack((angles.cos(), angles.sin()), dim=1).float()), wide=True)


def declared_states(module: nn.Module, limits: Limits) -> list[State]:
    """What the layers of a segment declare, in their order."""
    return [state for part in module.modules() if isinstance(part, Stateful) for state in part.states(limits)]


def zeros(*shape: int) -> Lazy:
    return Lazy.of(torch.zeros(shape, dtype=torch.bfloat16))
