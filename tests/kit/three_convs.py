"""A family for tests only: three convs and one delta state with a decay per channel, as KDA has.

Qwen3.5's frame, attention, MLPs and MTP head around another recurrence. Importing this registers it.
"""

import sys

import torch
from torch import nn

from hemiola.builder import models
from hemiola.builder.checkpoint import Config
from hemiola.builder.lazy import join
from hemiola.builder.models import qwen
from hemiola.builder.models.layers import (
    Conv,
    Embedding,
    Kit,
    Linear,
    Norm,
    Residual,
    Rope,
    Step,
    SwigluMlp,
    slot_states,
    zeros,
)
from hemiola.builder.models.segments import Draft, Parts, Trunk
from hemiola.runtime.outline import Limits, State

ARCHITECTURE = "ThreeConvsForCausalLM"
HEADS, DIM = 3, 16
WIDTHS = {"q": 4, "k": 3, "v": 2}  # of the convs


class ThreeConvs(nn.Module):
    """q, k and v each behind a conv of its own width; the decay is one number per channel."""

    def __init__(self, kit: Kit, cfg: Config, prefix: str, name: str) -> None:
        super().__init__()
        self.ops, self.chunk_len, self.name = kit.ops, kit.chunk_len, name
        self.dtype_name = kit.dtype_name
        self.heads, self.dim, hidden = HEADS, DIM, cfg.size("hidden_size")
        inner, tensor = self.heads * self.dim, kit.checkpoint.tensor
        rows = [tensor(f"{prefix}{part}_proj.weight", inner, hidden) for part in (*WIDTHS, "g")]
        rows += [tensor(f"{prefix}b_proj.weight", self.heads, hidden)]
        self.in_proj, self.widths = Linear(kit, join(rows)), [inner] * 4 + [self.heads]
        self.convs = nn.ModuleList(
            Conv(kit, f"{name}.{part}", tensor(f"{prefix}{part}_conv.weight", inner, width), zeros(inner))
            for part, width in WIDTHS.items()
        )
        self.unit = Norm(kit, tensor(f"{prefix}unit.weight", 2 * inner), 1e-6, group_len=self.dim)
        self.dt_bias = kit.weight(tensor(f"{prefix}dt_bias", self.heads, self.dim), wide=True)
        self.A = kit.weight(tensor(f"{prefix}A_log", self.heads).map(lambda w: -w.float().exp()), wide=True)
        self.norm = Norm(kit, tensor(f"{prefix}norm.weight", inner), qwen.eps(cfg), group_len=self.dim)
        self.out_proj = Linear(kit, tensor(f"{prefix}o_proj.weight", hidden, inner))

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        *qkv, g, b = self.in_proj(x).split(self.widths, dim=1)
        q, k, v = (conv(part, step) for conv, part in zip(self.convs, qkv, strict=True))
        qk = self.unit(torch.cat((q, k), dim=1)).view(-1, 2 * self.heads, self.dim)
        q, k = qk.split(self.heads, dim=1)
        shape = (-1, self.heads, self.dim)
        names = ("state", "k_records", "v_records", "g_records", "beta_records")
        states = (step.states[f"{self.name}.{what}"] for what in names)
        gates = (g.view(shape), b, self.dt_bias, self.A)
        o = self.ops.delta(q, k, v.view(shape), *gates, *states, step.rows, self.chunk_len)
        return self.out_proj(self.norm(o.view(-1, self.heads * self.dim)))

    def states(self, limits: Limits) -> list[State]:
        records = {part: (self.heads, self.dim) for part in ("k", "v", "g")} | {"beta": (self.heads,)}
        return slot_states(self.name, limits, (self.heads, self.dim, self.dim), records, self.dtype_name)


class Layer(nn.Module):
    """A token mixer, then an MLP."""

    def __init__(self, kit: Kit, cfg: Config, rope: Rope, kind: str, index: int) -> None:
        super().__init__()
        prefix, name = f"model.layers.{index}.", f"layers.{index}"
        if kind == "full_attention":
            mixer = qwen.GatedAttention(kit, cfg, rope, f"{prefix}self_attn.", name)
        else:
            mixer = ThreeConvs(kit, cfg, f"{prefix}linear_attn.", name)
        mlp = SwigluMlp(kit, f"{prefix}mlp.", cfg.size("hidden_size"), cfg.size("intermediate_size"))
        self.mixer = Residual(qwen.norm(kit, cfg, f"{prefix}input_layernorm"), mixer)
        self.mlp = Residual(qwen.norm(kit, cfg, f"{prefix}post_attention_layernorm"), mlp)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        return self.mlp(self.mixer(x, step), step)


def load(kit: Kit) -> Parts:
    cfg, tensor = kit.checkpoint.config, kit.checkpoint.tensor
    kinds = qwen.layer_kinds(cfg)
    vocab, hidden = cfg.size("vocab_size"), cfg.size("hidden_size")
    rope = Rope(kit, qwen.rope_theta(cfg), qwen.rotary_dim(cfg))
    embed = Embedding(kit, tensor("model.embed_tokens.weight", vocab, hidden))
    layers = [Layer(kit, cfg, rope, kind, index) for index, kind in enumerate(kinds)]
    head = Linear(kit, tensor("lm_head.weight", vocab, hidden))
    trunk = Trunk(kit, embed, layers, qwen.norm(kit, cfg, "model.norm"), head)
    mtp = qwen._mtp(kit, cfg, rope)
    kit.checkpoint.refuse_leftovers(qwen.IGNORABLE)
    return Parts(cfg, tuple(kinds), trunk, Draft(trunk, mtp))


models.FAMILIES[ARCHITECTURE] = sys.modules[__name__]
models.MODEL_TYPES[ARCHITECTURE] = ("qwen3_5_text", None)
