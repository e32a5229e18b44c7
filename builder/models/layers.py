"""The modules that families share: parameters that know their place in a checkpoint, arithmetic from `ops`.

A module is made on the meta device, so that a model of any size costs nothing until its weights are written.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import nn

from hemiola.builder.checkpoint import Checkpoint, Config
from hemiola.builder.lazy import Lazy, join, stacked
from hemiola.plugins.spec import E4M3
from hemiola.runtime.arch import name_of
from hemiola.runtime.errors import Refused
from hemiola.runtime.manifest import Limits, State

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
        kv_dtype: torch.dtype | None = None,
        tells_best: bool = False,
    ) -> None:
        self.checkpoint, self.ops, self.chunk_len, self.max_len = checkpoint, ops, chunk_len, max_len
        self.dtype = dtype  # of activations, and of what is not wide
        self.kv_dtype = kv_dtype or dtype  # of pages
        self.tells_best = tells_best  # a segment's last outputs: the best logit and its token
        self.sources: dict[nn.Parameter, Lazy] = {}
        # stands for a gate or a bias that a layer has not
        self.absent = self.weight(Lazy.of(torch.zeros(0)), wide=True)

    @property
    def dtype_name(self) -> str:
        return name_of(self.dtype)

    def page_scale(self, prefix: str, part: str) -> float:
        """Of the keys ("k") or values ("v") of a layer: what e4m3 pages hold them in units of."""
        spellings = (f"{prefix}{part}_proj.{part}_scale", f"{prefix}{part}_scale")
        known = {name: self.checkpoint.tensor(name) for name in spellings if name in self.checkpoint}
        if self.kv_dtype is not E4M3:
            return 1.0
        for name, lazy in known.items():
            scale = float(lazy.read())
            if scale <= 0:
                raise Refused(
                    f"{self.checkpoint.path}: {name} is {scale}, expected a positive number; correct it, or"
                    " leave --kv-dtype fp8 out"
                )
            return scale
        return 1.0

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

    def lowest(self, kit: Kit, num: int) -> "Linear":
        """Its first outputs, with a copy of their weights."""
        biased = self.bias.numel() > 0
        parts = [kit.sources[part].take(lambda rows: rows[:num]) for part in (self.weight, self.bias)]
        return Linear(kit, parts[0], parts[1] if biased else None)

    @classmethod
    def sharing(cls, kit: Kit, weight: nn.Parameter) -> "Linear":
        """With a weight [O, F] that another module has already."""
        linear = cls(kit, kit.sources[weight])
        linear.weight = weight
        return linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(x, self.weight, self.bias)

    def best(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The highest output of each line, and which it is."""
        return self.ops.linear_argmax(x, self.weight, self.bias)


class SideBySide(nn.Module):
    """The outputs of several layers, one behind the other."""

    def __init__(self, layers: Sequence[Linear]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x) for layer in self.layers], dim=1)


def dense(kit: Kit, parts: Sequence[Lazy]) -> Linear | SideBySide:
    """One layer with the outputs of all parts; neighbours that are quantised alike are one weight."""
    wanted = [part for part in parts if part.shape[0]]
    layers = [Linear(kit, join([*run])) for _, run in groupby(wanted, lambda part: part.layout)]
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
        self.up = Linear(kit, kit.checkpoint.matrix(f"{prefix}up_proj.weight", inner, width))
        self.down = Linear(kit, kit.checkpoint.matrix(f"{prefix}down_proj.weight", width, inner))

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        hidden = F.relu(self.up(x))
        return self.down(hidden * hidden)


class SwigluMlp(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, kit: Kit, prefix: str, width: int, inner: int) -> None:
        super().__init__()
        gate_up = [
            kit.checkpoint.matrix(f"{prefix}{part}_proj.weight", inner, width) for part in ("gate", "up")
        ]
        self.gate_up = dense(kit, gate_up)
        self.down = Linear(kit, kit.checkpoint.matrix(f"{prefix}down_proj.weight", width, inner))
        self.ops = kit.ops

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=1)
        return self.down(self.ops.gate(up, gate, "silu"))


class Experts(nn.Module):
    """The routed experts of one layer; `activation` is "relu2" or "swiglu"."""

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
    """One tensor per expert on disk, [E, parts * out, width] here."""

    matrix, experts = kit.checkpoint.matrix, range(num_experts)
    found = [[matrix(f"{prefix}{e}.{part}_proj.weight", out, width) for part in parts] for e in experts]
    kinds = {str(each.layout or "not quantised") for expert in found for each in expert}
    if len(kinds) > 1:
        raise Refused(
            f"{kit.checkpoint.path}: the experts of {prefix} are {' and '.join(sorted(kinds))}; those of a"
            " layer must be alike; use another checkpoint"
        )
    return stacked(join(expert) for expert in found)


class Pages(nn.Module):
    """Attention over the paged keys and values of the layer `name`, whose projections begin with `prefix`."""

    def __init__(self, kit: Kit, prefix: str, name: str, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.ops, self.dtype_name = kit.ops, name_of(kit.kv_dtype)
        self.scales = [kit.page_scale(prefix, part) for part in "kv"]
        self.first = 1 if name.startswith("mtp.") else 0  # an MTP head has no pair at place 0
        self.k_name, self.v_name = f"{name}.k_pages", f"{name}.v_pages"
        self.kv_heads, self.head_dim = kv_heads, head_dim

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: Step) -> torch.Tensor:
        k_pages, v_pages = step.states[self.k_name], step.states[self.v_name]
        where = (step.page_table, step.rows, step.positions)
        numbers = (self.head_dim**-0.5, self.first, *self.scales)
        return self.ops.attention(q, k, v, k_pages, v_pages, *where, *numbers)

    def states(self, limits: Limits) -> list[State]:
        shape = (limits.page_len, self.kv_heads, self.head_dim)
        return [
            State(name=name, kind="page", shape=shape, dtype=self.dtype_name)
            for name in (self.k_name, self.v_name)
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


class Trunk(nn.Module):
    """Tokens to logits."""

    def __init__(
        self,
        kit: Kit,
        embed: Embedding,
        layers: Sequence[nn.Module],
        norm: Norm,
        head: Linear,
    ) -> None:
        super().__init__()
        self.embed, self.absent = embed, kit.absent
        self.layers, self.norm, self.head = nn.ModuleList(layers), norm, head
        self.tells_best = kit.tells_best

    def forward(self, states: Tensors, batch: Tensors) -> tuple[torch.Tensor, ...]:
        """See outputs."""
        hidden = self.norm(run(self.layers, self.embed(batch["token_ids"]), states, batch))
        return outputs(self.head, hidden, batch, self.tells_best)


class Mtp(nn.Module):
    """The part of an MTP head that it does not share with the trunk."""

    def __init__(
        self, token_norm: Norm, hidden_norm: Norm, enter: Linear, layers: Sequence[nn.Module], norm: Norm
    ) -> None:
        super().__init__()
        self.token_norm, self.hidden_norm, self.enter = token_norm, hidden_norm, enter
        self.layers, self.norm = nn.ModuleList(layers), norm


class Draft(nn.Module):
    """x_p and h_{p-1} at place p to logits of x_{p+1} (all, or those of the lowest ids), and to the h of the
    next draft."""

    def __init__(self, trunk: Trunk, mtp: Mtp) -> None:
        super().__init__()
        self.embed, self.absent = trunk.embed, trunk.absent
        self.head: Linear | None = trunk.head
        self.lowest: Linear | None = None  # in the place of `head`: its first rows
        self.mtp, self.tells_best = mtp, trunk.tells_best

    def choose_among(self, lowest: Linear) -> None:
        """Draft only tokens that these rows of the head stand for."""
        self.head, self.lowest = None, lowest

    def forward(self, states: Tensors, batch: Tensors) -> tuple[torch.Tensor, ...]:
        """See outputs."""
        mtp = self.mtp
        token = mtp.token_norm(self.embed(batch["token_ids"]))
        x = mtp.enter(torch.cat((token, mtp.hidden_norm(batch["hidden"])), dim=1))
        hidden = mtp.norm(run(mtp.layers, x, states, batch))
        head = self.lowest or self.head
        assert head is not None
        return outputs(head, hidden, batch, self.tells_best)


class Parts(NamedTuple):
    """What a family makes of a checkpoint."""

    config: Config  # of the text model
    layers: tuple[str, ...]  # one word each
    trunk: Trunk
    draft: Draft | None


def outputs(head: Linear, hidden: torch.Tensor, batch: Tensors, tells_best: bool) -> tuple[torch.Tensor, ...]:
    """Logits [L, V], fp32 whatever the head computes in, and hidden [T, F]; then the best logit of each line
    [L] fp32 and its token [L] int64, if it tells that."""
    lines = hidden.index_select(0, batch["logits_ids"])
    logits = head(lines)
    wide = logits if logits.dtype.itemsize >= 4 else logits.float()
    return (wide, hidden, *head.best(lines)) if tells_best else (wide, hidden)


def run(layers: nn.ModuleList, x: torch.Tensor, states: Tensors, batch: Tensors) -> torch.Tensor:
    step = Step(states, batch["positions"], batch["rows"], batch["page_table"])
    for layer in layers:
        x = layer(x, step)
    return x


def declared_states(module: nn.Module, limits: Limits) -> list[State]:
    """What the layers of a segment declare, in their order."""
    return [state for part in module.modules() if isinstance(part, Stateful) for state in part.states(limits)]


def zeros(*shape: int) -> Lazy:
    return Lazy.of(torch.zeros(shape, dtype=torch.bfloat16))
