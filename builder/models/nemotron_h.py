"""NemotronH: Mamba2, attention without positions, relu^2 MLPs and grouped experts, one mixer per layer."""

import math

import torch
from torch import nn

from hemiola.builder.checkpoint import MAX_EXPERTS, MAX_HEAD_DIM, MAX_LAYERS, Config
from hemiola.builder.lazy import Lazy
from hemiola.builder.models.layers import (
    Conv,
    Down,
    Embedding,
    Experts,
    Kit,
    Linear,
    Norm,
    Pages,
    Relu2Mlp,
    Residual,
    Step,
    Sum,
    dense,
    expert_tensors,
    slot_states,
)
from hemiola.builder.models.segments import Draft, Mtp, Parts, Trunk
from hemiola.runtime.errors import shown
from hemiola.runtime.outline import Limits, State

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
    by_letter = f"{prefix}hybrid_override_pattern"
    key = next((k for k in (f"{prefix}layers_block_type", f"{prefix}layer_types") if k in cfg), by_letter)
    if default is not None and key not in cfg:
        return default
    kinds = cfg.read(key, str) if key == by_letter else cfg.read(key, list[str])
    known = WORDS if key == by_letter else LETTERS
    unknown = [kind for kind in kinds if kind not in known]
    if unknown:
        reason = f"{key} has {shown(unknown[0])}, known are {', '.join(known)}"
        raise cfg.refused("unsupported", key, reason, "use another checkpoint")
    if not 0 < len(kinds) <= MAX_LAYERS:
        reason = f"{key} names {len(kinds)} layers, 1 to {MAX_LAYERS} are read"
        raise cfg.refused("out_of_range", key, reason, "correct it")
    return kinds if isinstance(kinds, str) else "".join(LETTERS[kind] for kind in kinds)


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
        heads, groups = cfg.sizes("mamba_num_heads", "n_groups")
        self.head_dim, self.state_dim = (
            cfg.size(name, limit=MAX_HEAD_DIM) for name in ("mamba_head_dim", "ssm_state_size")
        )
        self.dt_min, self.dt_max = _time_step_limit(cfg)
        hidden, conv_len = cfg.size("hidden_size"), cfg.size("conv_kernel")
        inner, shared = heads * self.head_dim, groups * self.state_dim
        columns = [inner, shared, shared]

        tensor, matrix, cut = kit.checkpoint.tensor, kit.checkpoint.matrix, kit.cut
        self.groups, self.heads = cut.share("n_groups", groups), cut.share("mamba_num_heads", heads)
        self.inner, self.shared = self.heads * self.head_dim, self.groups * self.state_dim

        def of_heads(part: str) -> Lazy:
            return cut.rows(tensor(f"{prefix}{part}", heads), [heads])

        rows = [inner, *columns, heads]
        self.in_proj = Linear(kit, cut.rows(matrix(f"{prefix}in_proj.weight", sum(rows), hidden), rows))
        self.dt_bias = kit.weight(of_heads("dt_bias"), wide=True)
        taps = tensor(f"{prefix}conv1d.weight", sum(columns), 1, conv_len).map(lambda w: w.squeeze(1))
        bias = tensor(f"{prefix}conv1d.bias", sum(columns))
        self.conv = Conv(kit, name, cut.rows(taps, columns), cut.rows(bias, columns))
        self.A = kit.weight(of_heads("A_log").map(lambda w: -w.float().exp()), wide=True)
        self.D = kit.weight(of_heads("D"), wide=True)
        eps, scale = cfg.positive("layer_norm_epsilon", 1e-5), tensor(f"{prefix}norm.weight", inner)
        self.norm = Norm(kit, cut.rows(scale, [inner]), eps, inner // groups, gate_first=True)
        self.out_proj = Down(kit, matrix(f"{prefix}out_proj.weight", hidden, inner))

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
        heads, kv_heads = cfg.sizes("num_attention_heads", "num_key_value_heads")
        self.head_dim, hidden = cfg.size("head_dim", limit=MAX_HEAD_DIM), cfg.size("hidden_size")
        matrix, cut, size = kit.checkpoint.matrix, kit.cut, self.head_dim
        self.kv_heads = cut.share_of_kv_heads(heads, kv_heads)
        self.heads = cut.share("num_attention_heads", heads)
        q = cut.rows(matrix(f"{prefix}q_proj.weight", heads * size, hidden), [heads * size])
        k, v = (matrix(f"{prefix}{part}_proj.weight", kv_heads * size, hidden) for part in ("k", "v"))
        self.qkv = dense(kit, [q, cut.kv_rows(k, kv_heads), cut.kv_rows(v, kv_heads)])
        self.pages = Pages(kit, prefix, name, self.kv_heads, size)
        self.out = Down(kit, matrix(f"{prefix}o_proj.weight", hidden, heads * size))

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
        self.num_experts = cfg.size("n_routed_experts", limit=MAX_EXPERTS // len(pattern(cfg)))
        self.top_k = cfg.size("num_experts_per_tok")
        self.num_groups, self.top_groups = cfg.size("n_group", 1), cfg.size("topk_group", 1)
        self.renormalise = cfg.read("norm_topk_prob", bool, True)
        self.scale, self.ops = cfg.positive("routed_scaling_factor", 1.0), kit.ops
        self._check(cfg)

        tensor, matrix = kit.checkpoint.tensor, kit.checkpoint.matrix
        self.router = Linear(kit, tensor(f"{prefix}gate.weight", self.num_experts, hidden))
        bias = tensor(f"{prefix}gate.e_score_correction_bias", self.num_experts)
        self.choice_bias = kit.weight(bias, wide=True)
        width, experts = latent or hidden, f"{prefix}experts."
        if kit.checkpoint.any(f"{experts}up_proj"):
            up = matrix(f"{experts}up_proj", self.num_experts, inner, width)
            down = matrix(f"{experts}down_proj", self.num_experts, width, inner)
        else:
            up = expert_tensors(kit, experts, ("up",), self.num_experts, inner, width)
            down = expert_tensors(kit, experts, ("down",), self.num_experts, width, inner)
        self.experts = Experts(kit, up, down, "relu2")
        shared = cfg.size("moe_shared_expert_intermediate_size")
        self.shared = Relu2Mlp(kit, f"{prefix}shared_experts.", hidden, shared)
        self.enter = self.leave = nn.Identity()
        if latent:
            self.enter = Linear(kit, matrix(f"{prefix}fc1_latent_proj.weight", latent, hidden))
            self.leave = Linear(kit, matrix(f"{prefix}fc2_latent_proj.weight", hidden, latent))
        self.sum, self.widths = Sum(kit), [width, hidden]

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        groups = (self.num_groups, self.top_groups, self.renormalise, self.scale)
        chosen = self.ops.route(self.router(x), self.choice_bias, "sigmoid", self.top_k, *groups)
        pairs = [*zip(self.experts.parts(self.enter(x), *chosen), self.shared.parts(x), strict=True)]
        if isinstance(self.leave, Linear) and not self.sum.is_one:  # one message of both
            whole = self.sum([torch.cat(pair, dim=1) for pair in pairs])
            routed, shared = whole.split(self.widths, dim=1)
            return self.leave(routed) + shared
        return self.sum([self.leave(routed) + shared for routed, shared in pairs])

    def _check(self, cfg: Config) -> None:
        per_group = self.num_experts // self.num_groups
        groups = f"n_group {self.num_groups} with topk_group {self.top_groups}"
        if self.num_experts % self.num_groups or self.top_groups > self.num_groups or per_group < 2:
            reason = f"{groups} does not fit n_routed_experts {self.num_experts}"
            raise cfg.refused("conflict", "n_group", reason, "correct one of them")
        if self.top_k > self.top_groups * per_group:
            reason = f"num_experts_per_tok {self.top_k} is more than {groups} leaves"
            raise cfg.refused("conflict", "num_experts_per_tok", reason, "correct one of them")


def load(kit: Kit) -> Parts:
    """Everything is checked here: config values, names and shapes."""
    cfg = kit.checkpoint.config
    refuse(cfg)
    letters = pattern(cfg)
    vocab, hidden = cfg.size("vocab_size"), cfg.size("hidden_size")
    tensor = kit.checkpoint.tensor
    embed = Embedding(kit, tensor("backbone.embeddings.weight", vocab, hidden))
    layers = [_layer(kit, cfg, kind, "backbone.", "", i) for i, kind in enumerate(letters)]
    head = Linear.head(kit, kit.checkpoint.matrix("lm_head.weight", vocab, hidden))
    trunk = Trunk(kit, embed, layers, _norm(kit, cfg, "backbone.norm_f"), head)
    mtp = _mtp(kit, cfg) if kit.checkpoint.any("mtp.") else None
    kit.checkpoint.refuse_leftovers(IGNORABLE)
    words = tuple(WORDS[kind] for kind in letters)
    return Parts(cfg, words, trunk, None if mtp is None else Draft(trunk, mtp))


def _mtp(kit: Kit, cfg: Config) -> Mtp:
    cfg.require("num_nextn_predict_layers", 1)
    letters = pattern(cfg, "mtp_", "*E")
    if "M" in letters:
        reason = f"the MTP pattern {shown(letters)} has a recurrent layer (M), which is not supported"
        raise cfg.refused("unsupported", "mtp_hybrid_override_pattern", reason, "use another checkpoint")
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
    return Norm(kit, weight, cfg.positive("layer_norm_epsilon", 1e-5))


def _time_step_limit(cfg: Config) -> tuple[float, float]:
    limit = cfg.read("time_step_limit", list[float], [0.0, math.inf])
    if len(limit) != 2 or not 0 <= limit[0] < limit[1]:
        reason = f"time_step_limit is {shown(limit)}, expected two rising numbers from 0 up"
        raise cfg.refused("out_of_range", "time_step_limit", reason, "correct it")
    return limit[0], limit[1]
