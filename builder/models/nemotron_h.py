"""NemotronH: Mamba2, attention without positions, relu^2 MLPs and grouped experts, one mixer per layer."""

import math

import torch
from torch import nn

from hemiola.builder.checkpoint import Config
from hemiola.builder.models.layers import (
    Conv,
    Draft,
    Embedding,
    Experts,
    Kit,
    Linear,
    Mtp,
    Norm,
    Pages,
    Parts,
    Relu2Mlp,
    Residual,
    Step,
    Trunk,
    dense,
    expert_tensors,
    slot_states,
)
from hemiola.runtime.manifest import Limits, State

IGNORABLE = r"$."  # nothing
LETTERS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}
WORDS = {"M": "mamba2", "*": "attention", "-": "mlp", "E": "moe"}


def refuse(cfg: Config) -> None:
    """Values that these layers do not compute."""
    cfg.require("mamba_hidden_act", "silu")
    cfg.require("mlp_hidden_act", "relu2")
    cfg.require("use_conv_bias", True)
    cfg.require("tie_word_embeddings", False)
    cfg.require("sliding_window", None)
    cfg.require("mamba_ssm_cache_dtype", "float32")
    cfg.require("n_shared_experts", 1)
    for key in ("use_bias", "mlp_bias", "attention_bias", "mamba_proj_bias"):
        cfg.require(key, False)


def pattern(cfg: Config, prefix: str = "", default: str | None = None) -> str:
    """One letter per layer, from any of the spellings."""
    for key in (f"{prefix}layers_block_type", f"{prefix}layer_types"):
        if key in cfg:
            words = cfg.read(key, list[str])
            unknown = [word for word in words if word not in LETTERS]
            if unknown:
                raise cfg.refused(
                    f"{key} has {unknown[0]!r}, known are {', '.join(LETTERS)}; use another checkpoint"
                )
            return "".join(LETTERS[word] for word in words)
    key = f"{prefix}hybrid_override_pattern"
    if default is not None and key not in cfg:
        return default
    letters = cfg.read(key, str)
    unknown = [letter for letter in letters if letter not in WORDS]
    if unknown:
        raise cfg.refused(
            f"{key} has the letter {unknown[0]!r}, known are {''.join(WORDS)}; use another checkpoint"
        )
    return letters


def mixer(kit: Kit, cfg: Config, kind: str, prefix: str, name: str) -> nn.Module:
    match kind:
        case "M":
            return Mamba2(kit, cfg, prefix, name)
        case "*":
            return Attention(kit, cfg, prefix, name)
        case "-":
            return Relu2Mlp(kit, prefix, cfg.size("hidden_size"), cfg.size("intermediate_size"))
        case "E":
            return Moe(kit, cfg, prefix)
        case _:
            raise AssertionError(f"{name}: letter {kind!r} passed `pattern`")


class Mamba2(nn.Module):
    def __init__(self, kit: Kit, cfg: Config, prefix: str, name: str) -> None:
        super().__init__()
        self.ops, self.chunk_len, self.name = kit.ops, kit.chunk_len, name
        self.dtype_name = kit.dtype_name
        self.heads, self.groups = cfg.sizes("mamba_num_heads", "n_groups")
        self.head_dim, self.state_dim = cfg.size("mamba_head_dim"), cfg.size("ssm_state_size")
        self.inner, self.shared = self.heads * self.head_dim, self.groups * self.state_dim
        self.dt_min, self.dt_max = _time_step_limit(cfg)
        hidden, conv_len = cfg.size("hidden_size"), cfg.size("conv_kernel")
        columns = self.inner + 2 * self.shared
        rows = self.inner + columns + self.heads

        tensor, matrix = kit.checkpoint.tensor, kit.checkpoint.matrix
        self.in_proj = Linear(kit, matrix(f"{prefix}in_proj.weight", rows, hidden))
        self.dt_bias = kit.weight(tensor(f"{prefix}dt_bias", self.heads), wide=True)
        taps = tensor(f"{prefix}conv1d.weight", columns, 1, conv_len).map(lambda w: w.squeeze(1))
        self.conv = Conv(kit, name, taps, tensor(f"{prefix}conv1d.bias", columns))
        self.A = kit.weight(tensor(f"{prefix}A_log", self.heads).map(lambda w: -w.float().exp()), wide=True)
        self.D = kit.weight(tensor(f"{prefix}D", self.heads), wide=True)
        eps, group_len = cfg.read("layer_norm_epsilon", float, 1e-5), self.inner // self.groups
        self.norm = Norm(kit, tensor(f"{prefix}norm.weight", self.inner), eps, group_len, gate_first=True)
        self.out_proj = Linear(kit, matrix(f"{prefix}out_proj.weight", hidden, self.inner))

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        z, xbc, dt = self.in_proj(x).split([self.inner, self.inner + 2 * self.shared, self.heads], dim=1)
        x, b, c = self.conv(xbc, step).split([self.inner, self.shared, self.shared], dim=1)
        x = x.view(-1, self.heads, self.head_dim)
        b, c = (part.view(-1, self.groups, self.state_dim) for part in (b, c))
        names = ("state", "x_records", "B_records", "dt_records")
        states = (step.states[f"{self.name}.{what}"] for what in names)
        fixed = (self.dt_bias, self.A, self.D)
        y = self.ops.mamba2(x, b, c, dt, *fixed, *states, step.rows, self.chunk_len, self.dt_min, self.dt_max)
        return self.out_proj(self.norm(y.view(-1, self.inner), z))

    def states(self, limits: Limits) -> list[State]:
        inputs = (self.heads, self.head_dim)
        records = {"x": inputs, "B": (self.groups, self.state_dim), "dt": (self.heads,)}
        return slot_states(self.name, limits, (*inputs, self.state_dim), records, self.dtype_name)


class Attention(nn.Module):
    """No positions, no norms, no gate."""

    def __init__(self, kit: Kit, cfg: Config, prefix: str, name: str) -> None:
        super().__init__()
        self.heads, self.kv_heads = cfg.sizes("num_attention_heads", "num_key_value_heads")
        self.head_dim, hidden = cfg.size("head_dim"), cfg.size("hidden_size")
        widths = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
        matrix = kit.checkpoint.matrix
        self.qkv = dense(
            kit, [matrix(f"{prefix}{p}_proj.weight", n * self.head_dim, hidden) for p, n in widths.items()]
        )
        self.pages = Pages(kit, prefix, name, self.kv_heads, self.head_dim)
        self.out = Linear(kit, matrix(f"{prefix}o_proj.weight", hidden, self.heads * self.head_dim))

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        heads = self.qkv(x).view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        return self.out(self.pages(q, k, v, step).view(-1, self.heads * self.head_dim))


class Moe(nn.Module):
    """Routed experts, perhaps in a latent space, plus one shared expert."""

    def __init__(self, kit: Kit, cfg: Config, prefix: str) -> None:
        super().__init__()
        hidden, inner = cfg.size("hidden_size"), cfg.size("moe_intermediate_size")
        latent = cfg.read("moe_latent_size", int, 0)
        self.num_experts, self.top_k = cfg.size("n_routed_experts"), cfg.size("num_experts_per_tok")
        self.num_groups, self.top_groups = cfg.size("n_group", 1), cfg.size("topk_group", 1)
        self.renormalise = cfg.read("norm_topk_prob", bool, True)
        self.scale, self.ops = cfg.read("routed_scaling_factor", float, 1.0), kit.ops
        self._check(cfg)

        tensor, matrix = kit.checkpoint.tensor, kit.checkpoint.matrix
        self.router = Linear(kit, tensor(f"{prefix}gate.weight", self.num_experts, hidden))
        bias = tensor(f"{prefix}gate.e_score_correction_bias", self.num_experts)
        self.choice_bias = kit.weight(bias, wide=True)
        width, experts = latent or hidden, f"{prefix}experts."
        up = expert_tensors(kit, experts, ("up",), self.num_experts, inner, width)
        down = expert_tensors(kit, experts, ("down",), self.num_experts, width, inner)
        self.experts = Experts(kit, up, down, "relu2")
        shared = cfg.size("moe_shared_expert_intermediate_size")
        self.shared = Relu2Mlp(kit, f"{prefix}shared_experts.", hidden, shared)
        self.enter = self.leave = nn.Identity()
        if latent:
            self.enter = Linear(kit, matrix(f"{prefix}fc1_latent_proj.weight", latent, hidden))
            self.leave = Linear(kit, matrix(f"{prefix}fc2_latent_proj.weight", hidden, latent))

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        groups = (self.num_groups, self.top_groups, self.renormalise, self.scale)
        chosen = self.ops.route(self.router(x), self.choice_bias, "sigmoid", self.top_k, *groups)
        return self.leave(self.experts(self.enter(x), *chosen)) + self.shared(x, step)

    def _check(self, cfg: Config) -> None:
        per_group = self.num_experts // self.num_groups
        groups = f"n_group {self.num_groups} with topk_group {self.top_groups}"
        if self.num_experts % self.num_groups or self.top_groups > self.num_groups or per_group < 2:
            raise cfg.refused(
                f"{groups} does not fit n_routed_experts {self.num_experts}; correct one of them"
            )
        if self.top_k > self.top_groups * per_group:
            raise cfg.refused(
                f"num_experts_per_tok {self.top_k} is more than {groups} leaves; correct one of them"
            )


def load(kit: Kit) -> Parts:
    """Everything is checked here: config values, names and shapes."""
    cfg = kit.checkpoint.config
    refuse(cfg)
    letters = pattern(cfg)
    vocab, hidden = cfg.size("vocab_size"), cfg.size("hidden_size")
    tensor = kit.checkpoint.tensor
    embed = Embedding(kit, tensor("backbone.embeddings.weight", vocab, hidden))
    layers = [_layer(kit, cfg, kind, "backbone.", "", i) for i, kind in enumerate(letters)]
    head = Linear(kit, kit.checkpoint.matrix("lm_head.weight", vocab, hidden))
    trunk = Trunk(kit, embed, layers, _norm(kit, cfg, "backbone.norm_f"), head)
    mtp = _mtp(kit, cfg) if kit.checkpoint.any("mtp.") else None
    kit.checkpoint.refuse_leftovers(IGNORABLE)
    words = tuple(WORDS[kind] for kind in letters)
    return Parts(cfg, words, trunk, None if mtp is None else Draft(trunk, mtp))


def _mtp(kit: Kit, cfg: Config) -> Mtp:
    cfg.require("num_nextn_predict_layers", 1)
    letters = pattern(cfg, "mtp_", "*E")
    if "M" in letters:
        raise cfg.refused(
            f"the MTP pattern {letters!r} has a recurrent layer (M), which is not supported; "
            "use another checkpoint"
        )
    hidden, last = cfg.size("hidden_size"), len(letters) - 1
    return Mtp(
        token_norm=_norm(kit, cfg, "mtp.layers.0.enorm"),
        hidden_norm=_norm(kit, cfg, "mtp.layers.0.hnorm"),
        enter=Linear(kit, kit.checkpoint.matrix("mtp.layers.0.eh_proj.weight", hidden, 2 * hidden)),
        layers=[_layer(kit, cfg, kind, "mtp.", "mtp.", i) for i, kind in enumerate(letters)],
        norm=_norm(kit, cfg, f"mtp.layers.{last}.final_layernorm"),
    )


def _layer(kit: Kit, cfg: Config, kind: str, source: str, target: str, index: int) -> Residual:
    """Layer `index` of the trunk or of the MTP head: where its tensors are, and the name of its states."""
    prefix, name = f"{source}layers.{index}.", f"{target}layers.{index}"
    return Residual(_norm(kit, cfg, f"{prefix}norm"), mixer(kit, cfg, kind, f"{prefix}mixer.", name))


def _norm(kit: Kit, cfg: Config, name: str) -> Norm:
    weight = kit.checkpoint.tensor(f"{name}.weight", cfg.size("hidden_size"))
    return Norm(kit, weight, cfg.read("layer_norm_epsilon", float, 1e-5))


def _time_step_limit(cfg: Config) -> tuple[float, float]:
    limit = cfg.read("time_step_limit", list[float], [0.0, math.inf])
    if len(limit) != 2 or not 0 <= limit[0] < limit[1]:
        raise cfg.refused(f"time_step_limit is {limit}, expected two rising numbers from 0 up; correct it")
    return limit[0], limit[1]
