"""The modules that families share: parameters that know their place in a checkpoint, arithmetic from `ops`.

A module is made on the meta device, so that a model of any size costs nothing until its weights are written.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import nn

from hemiola.builder.checkpoint import Checkpoint, Config, Lazy, join, stacked
from hemiola.runtime.manifest import Limits, State

Tensors = dict[str, torch.Tensor]
ROWS = ("cu_tokens", "slot_id", "committed", "edge", "num_drafts", "snapshot_slot", "snapshot_edge")


class Kit:
    """What layers are made with; `ops` is torch.ops.hemiola or the references, with the same signatures."""

    def __init__(self, checkpoint: Checkpoint, ops: Any, exact: bool, chunk_len: int) -> None:
        self.checkpoint, self.ops, self.exact, self.chunk_len = checkpoint, ops, exact, chunk_len
        self.sources: dict[nn.Parameter, Lazy] = {}
        self.absent = self.weight(Lazy.of(torch.zeros(0)))  # stands for a gate or a bias that a layer has not

    def weight(self, source: Lazy) -> nn.Parameter:
        """A parameter whose content comes from `source` when the engine is written."""
        empty = torch.empty(source.shape, dtype=torch.float32, device="meta")
        parameter = nn.Parameter(empty, requires_grad=False)
        self.sources[parameter] = source
        return parameter


class Step(NamedTuple):
    """What layers read of a step besides its tokens."""

    states: Tensors
    positions: torch.Tensor  # [T]
    cu_tokens: torch.Tensor  # [N + 1]
    page_table: torch.Tensor  # [N, W]
    rows: tuple[torch.Tensor, ...]  # plugins.spec.ROWS, for recurrent layers
    rope: tuple[torch.Tensor, torch.Tensor] | None  # cos and sin, [T, 1, D]


@runtime_checkable
class Stateful(Protocol):
    """A layer that keeps something between steps."""

    def states(self, limits: Limits) -> list[State]: ...


class Linear(nn.Module):
    """x @ weight.T + bias, in the engine's numerics."""

    def __init__(self, kit: Kit, weight: Lazy, bias: Lazy | None = None) -> None:
        super().__init__()
        self.ops, self.exact, self.has_bias = kit.ops, kit.exact, bias is not None
        # a CPU multiplies few rows by a matrix [F, O] up to a third faster than by one [O, F]
        self.turned = not kit.exact
        self.weight = kit.weight(weight.map(_turn) if self.turned else weight)
        self.bias = kit.absent if bias is None else kit.weight(bias)

    @classmethod
    def sharing(cls, kit: Kit, weight: nn.Parameter) -> "Linear":
        """With a weight [O, F] that another module has already."""
        linear = cls(kit, kit.sources[weight])
        linear.weight, linear.turned = weight, False
        return linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.exact:
            return self.ops.linear(x, self.weight, self.bias)
        if not self.turned:
            return F.linear(x, self.weight, self.bias if self.has_bias else None)
        return torch.addmm(self.bias, x, self.weight) if self.has_bias else x.mm(self.weight)


def _turn(weight: torch.Tensor) -> torch.Tensor:
    return weight.mT.contiguous()


class Norm(nn.Module):
    """RMS norm over groups of `group_len` channels; silu(gate), if any, multiplies before or after it."""

    def __init__(
        self, kit: Kit, weight: Lazy, eps: float, group_len: int = 0, gate_first: bool = False
    ) -> None:
        super().__init__()
        self.ops, self.eps, self.gate_first = kit.ops, eps, gate_first
        self.group_len = group_len or weight.shape[0]
        self.weight, self.absent = kit.weight(weight), kit.absent

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        gate = self.absent if gate is None else gate
        return self.ops.norm(x, gate, self.weight, self.eps, self.group_len, self.gate_first)


class Gates:
    """sigmoid, silu and softplus in the engine's numerics.

    torch gives them other bits in its vector loop than for the elements that a thread's share leaves over.
    exp and log1p it does not, so exact numerics is made of those.
    """

    def __init__(self, kit: Kit) -> None:
        self.exact = kit.exact

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        return 1 / (1 + (-x).exp()) if self.exact else x.sigmoid()

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return x / (1 + (-x).exp()) if self.exact else F.silu(x)

    def softplus(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 20, x, x.exp().log1p()) if self.exact else F.softplus(x)


class Block(nn.Module):
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
        self.up = Linear(kit, kit.checkpoint.tensor(f"{prefix}up_proj.weight", inner, width))
        self.down = Linear(kit, kit.checkpoint.tensor(f"{prefix}down_proj.weight", width, inner))

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        return self.down(F.relu(self.up(x)).square())


class SwigluMlp(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, kit: Kit, prefix: str, width: int, inner: int) -> None:
        super().__init__()
        gate_up = [
            kit.checkpoint.tensor(f"{prefix}{part}_proj.weight", inner, width) for part in ("gate", "up")
        ]
        self.gate_up = Linear(kit, join(gate_up))
        self.down = Linear(kit, kit.checkpoint.tensor(f"{prefix}down_proj.weight", width, inner))
        self.gates = Gates(kit)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=1)
        return self.down(self.gates.silu(gate) * up)


class Experts(nn.Module):
    """The routed experts of one layer; `activation` is "relu2" or "swiglu"."""

    def __init__(self, kit: Kit, up: Lazy, down: Lazy, activation: str) -> None:
        super().__init__()
        self.ops, self.exact, self.activation = kit.ops, kit.exact, activation
        self.up, self.down = kit.weight(up), kit.weight(down)

    def forward(
        self, x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor
    ) -> torch.Tensor:
        ids = expert_ids.to(torch.int32)
        return self.ops.moe(x, ids, expert_weights, self.up, self.down, self.activation, self.exact)


def expert_tensors(
    kit: Kit, prefix: str, parts: tuple[str, ...], num_experts: int, out: int, width: int
) -> Lazy:
    """One tensor per expert on disk, [E, parts * out, width] here."""

    def one(expert: int) -> Lazy:
        names = [f"{prefix}{expert}.{part}_proj.weight" for part in parts]
        return join([kit.checkpoint.tensor(name, out, width) for name in names])

    return stacked(one(expert) for expert in range(num_experts))


class Pages(nn.Module):
    """Attention over the paged keys and values of the layer `name`."""

    def __init__(self, kit: Kit, name: str, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.ops, self.exact = kit.ops, kit.exact
        self.first = 1 if name.startswith("mtp.") else 0  # an MTP head has no pair at place 0
        self.k_name, self.v_name = f"{name}.k_pages", f"{name}.v_pages"
        self.kv_heads, self.head_dim = kv_heads, head_dim

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: Step) -> torch.Tensor:
        k_pages, v_pages = step.states[self.k_name], step.states[self.v_name]
        rows = (step.page_table, step.cu_tokens, step.positions)
        return self.ops.attention(
            q, k, v, k_pages, v_pages, *rows, self.head_dim**-0.5, self.exact, self.first
        )

    def states(self, limits: Limits) -> list[State]:
        shape = (limits.page_len, self.kv_heads, self.head_dim)
        return [
            State(name=name, kind="page", shape=shape, dtype="float32") for name in (self.k_name, self.v_name)
        ]


class Conv(nn.Module):
    """The causal depthwise convolution and silu in front of a recurrence."""

    def __init__(self, kit: Kit, name: str, weight: Lazy, bias: Lazy) -> None:
        super().__init__()
        self.ops, self.chunk_len, self.name = kit.ops, kit.chunk_len, f"{name}.conv"
        self.weight, self.bias = kit.weight(weight), kit.weight(bias)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        return self.ops.conv(x, self.weight, self.bias, step.states[self.name], *step.rows, self.chunk_len)

    def states(self, limits: Limits) -> list[State]:
        channels, width = self.weight.shape
        shape = (limits.chunk_len + limits.num_drafts + width - 1, channels)
        return [State(name=self.name, kind="slot", shape=shape, dtype="float32")]


def slot_states(
    name: str, limits: Limits, state: tuple[int, ...], records: dict[str, tuple[int, ...]]
) -> list[State]:
    """A recurrence's state and the record rings beside it."""
    ring = limits.chunk_len + limits.num_drafts
    shapes = {"state": state} | {f"{record}_records": (ring, *shape) for record, shape in records.items()}
    return [
        State(name=f"{name}.{what}", kind="slot", shape=shape, dtype="float32")
        for what, shape in shapes.items()
    ]


class Rope(nn.Module):
    """cos and sin for heads whose second half turns with their first; see `spread`."""

    def __init__(self, kit: Kit, theta: float, rotary_dim: int, head_dim: int) -> None:
        super().__init__()
        frequencies = 1.0 / (theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim))
        kept = (head_dim - rotary_dim) // 2  # a frequency of 0 leaves a channel as it is
        half = F.pad(frequencies, (0, kept))
        self.frequencies = kit.weight(Lazy.of(torch.cat((-half, half))))

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.outer(positions.to(self.frequencies.dtype), self.frequencies).unsqueeze(1)
        return angles.cos(), angles.sin()


def spread(rotary_dim: int, head_dim: int) -> list[int]:
    """Order of a head's channels that makes rotating its first `rotary_dim` a rotation of it all by half."""
    turned, kept = rotary_dim // 2, (head_dim - rotary_dim) // 2
    first = [*range(turned), *range(rotary_dim, rotary_dim + kept)]
    return [*first, *range(turned, rotary_dim), *range(rotary_dim + kept, head_dim)]


def rotate(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = rope
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


class Trunk(nn.Module):
    """Tokens to logits."""

    def __init__(
        self,
        kit: Kit,
        embed: nn.Parameter,
        layers: Sequence[nn.Module],
        norm: Norm,
        head: Linear,
        rope: Rope | None,
    ) -> None:
        super().__init__()
        self.embed, self.absent = embed, kit.absent
        self.layers, self.norm, self.head, self.rope = nn.ModuleList(layers), norm, head, rope

    def forward(self, states: Tensors, batch: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [L, V] and hidden [T, F]."""
        x = F.embedding(batch["token_ids"], self.embed)
        rows = tuple(batch[name] for name in ROWS)
        hidden = self.norm(run(self.layers, x, states, batch, rows, self.rope))
        return self.head(hidden.index_select(0, batch["logits_ids"])), hidden


class Mtp(nn.Module):
    """The part of an MTP head that it does not share with the trunk."""

    def __init__(
        self, token_norm: Norm, hidden_norm: Norm, enter: Linear, layers: Sequence[nn.Module], norm: Norm
    ) -> None:
        super().__init__()
        self.token_norm, self.hidden_norm, self.enter = token_norm, hidden_norm, enter
        self.layers, self.norm = nn.ModuleList(layers), norm


class Draft(nn.Module):
    """x_p and h_{p-1} at place p to logits of x_{p+1}, and to the h of the next draft."""

    def __init__(self, trunk: Trunk, mtp: Mtp) -> None:
        super().__init__()
        self.embed, self.absent, self.head, self.rope = trunk.embed, trunk.absent, trunk.head, trunk.rope
        self.mtp = mtp

    def forward(self, states: Tensors, batch: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [L, V] and hidden [T, F]."""
        mtp = self.mtp
        token = mtp.token_norm(F.embedding(batch["token_ids"], self.embed))
        x = mtp.enter(torch.cat((token, mtp.hidden_norm(batch["hidden"])), dim=1))
        hidden = mtp.norm(run(mtp.layers, x, states, batch, (), self.rope))
        return self.head(hidden.index_select(0, batch["logits_ids"])), hidden


class Parts(NamedTuple):
    """What a family makes of a checkpoint."""

    config: Config  # of the text model
    layers: tuple[str, ...]  # one word each
    trunk: Trunk
    draft: Draft | None


Rows = tuple[torch.Tensor, ...]


def run(
    layers: nn.ModuleList, x: torch.Tensor, states: Tensors, batch: Tensors, rows: Rows, rope: Rope | None
) -> torch.Tensor:
    positions = batch["positions"]
    turns = None if rope is None else rope(positions)
    step = Step(states, positions, batch["cu_tokens"], batch["page_table"], rows, turns)
    for layer in layers:
        x = layer(x, step)
    return x


def declared_states(module: nn.Module, limits: Limits) -> list[State]:
    """What the layers of a segment declare, in their order."""
    return [state for part in module.modules() if isinstance(part, Stateful) for state in part.states(limits)]


def zeros(*shape: int) -> Lazy:
    return Lazy.of(torch.zeros(shape, dtype=torch.bfloat16))
