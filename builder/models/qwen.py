"""Qwen3-Next and Qwen3.5, dense and MoE: gated delta rule, gated attention, zero-centred norms."""

from typing import NamedTuple

import torch
from torch import nn

from hemiola.builder.checkpoint import MAX_EXPERTS, MAX_HEAD_DIM, MAX_LAYERS, Config
from hemiola.builder.lazy import Lazy, join
from hemiola.builder.models.layers import (
    Conv,
    Down,
    Embedding,
    Experts,
    Kit,
    Linear,
    Norm,
    Pages,
    Residual,
    Rope,
    Step,
    Sum,
    SwigluMlp,
    dense,
    expert_tensors,
    slot_states,
    zeros,
)
from hemiola.builder.models.segments import Draft, Mtp, Parts, Trunk
from hemiola.runtime.errors import shown
from hemiola.runtime.outline import Limits, State

IGNORABLE = r"model\.visual\.|.*rotary_emb\.inv_freq$"
WORDS = {"linear_attention": "delta", "full_attention": "attention"}


def refuse(cfg: Config) -> None:
    """Values that these layers do not compute."""
    cfg.require("hidden_act", "silu")
    cfg.require("attention_bias", False)
    cfg.require("attn_output_gate", True)
    cfg.require("output_gate_type", None, "swish", "silu")
    cfg.require("use_sliding_window", False)
    cfg.require("mamba_ssm_dtype", None, "float32")
    cfg.require("mtp_use_dedicated_embeddings", False)
    for key in ("rope_parameters", "rope_scaling"):
        if key in cfg:
            rope = cfg.section(key)
            for spelling in ("rope_type", "type"):
                rope.require(spelling, None, "default", "mrope")


class GatedAttention(nn.Module):
    """Normed and partially rotated heads; the output is gated per channel."""

    def __init__(self, kit: Kit, cfg: Config, rope: Rope, prefix: str, name: str) -> None:
        super().__init__()
        self.ops, self.table = kit.ops, rope.table
        heads, kv_heads = cfg.sizes("num_attention_heads", "num_key_value_heads")
        self.head_dim, hidden = head_dim(cfg), cfg.size("hidden_size")
        tensor, matrix, cut, size = kit.checkpoint.tensor, kit.checkpoint.matrix, kit.cut, self.head_dim
        self.kv_heads = cut.share_of_kv_heads(heads, kv_heads)
        self.heads = cut.share("num_attention_heads", heads)
        q_gate = matrix(f"{prefix}q_proj.weight", heads * 2 * size, hidden)
        q, gate = (
            q_gate.take(lambda rows, part=part: rows.view(heads, 2, size)[:, part].flatten())
            for part in (0, 1)
        )
        q, gate = (cut.rows(part, [heads * size]) for part in (q, gate))
        k, v = (
            cut.kv_rows(matrix(f"{prefix}{part}_proj.weight", kv_heads * size, hidden), kv_heads)
            for part in ("k", "v")
        )
        self.proj = dense(kit, [q, k, v, gate])
        self.widths = [(self.heads + self.kv_heads) * size, self.kv_heads * size, self.heads * size]

        norms = {"q_norm": self.heads, "k_norm": self.kv_heads}
        scales = [
            centred(tensor(f"{prefix}{part}.weight", size)).map(lambda w, n=n: w.repeat(n))
            for part, n in norms.items()
        ]
        self.norm = Norm(kit, join(scales), eps(cfg), group_len=size)
        self.pages = Pages(kit, prefix, name, self.kv_heads, size)
        self.out = Down(kit, matrix(f"{prefix}o_proj.weight", hidden, heads * size))

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        qk, v, gate = self.proj.split(x, self.widths)
        heads = self.norm(qk).view(-1, self.heads + self.kv_heads, self.head_dim)
        q, k = self.ops.rope(heads, step.positions, self.table).split([self.heads, self.kv_heads], dim=1)
        o = self.pages(q, k, v.view(-1, self.kv_heads, self.head_dim), step)
        return self.out(self.ops.gate(o.view(-1, self.heads * self.head_dim), gate, "sigmoid"))


class DeltaHeads(NamedTuple):
    """Of a layer before it is cut."""

    v: int
    k: int
    k_dim: int
    v_dim: int

    @property
    def qkv(self) -> list[int]:
        """Rows of queries, keys and values."""
        return [self.k * self.k_dim, self.k * self.k_dim, self.v * self.v_dim]


class GatedDelta(nn.Module):
    """The gated delta rule behind a short convolution."""

    def __init__(self, kit: Kit, cfg: Config, prefix: str, name: str) -> None:
        super().__init__()
        self.ops, self.chunk_len, self.name = kit.ops, kit.chunk_len, name
        self.dtype_name = kit.dtype_name
        self.k_dim, self.v_dim = (
            cfg.size(f"linear_{part}_head_dim", limit=MAX_HEAD_DIM) for part in ("key", "value")
        )
        hidden, conv_len = cfg.size("hidden_size"), cfg.size("linear_conv_kernel_dim")
        heads = DeltaHeads(
            *cfg.sizes("linear_num_value_heads", "linear_num_key_heads"), self.k_dim, self.v_dim
        )

        tensor, checkpoint, cut = kit.checkpoint.tensor, kit.checkpoint, kit.cut
        self.k_heads = cut.share("linear_num_key_heads", heads.k)
        self.v_heads = cut.share("linear_num_value_heads", heads.v)
        self.qk_width, self.v_width = 2 * self.k_heads * self.k_dim, self.v_heads * self.v_dim
        fused = f"{prefix}in_proj_qkvz.weight" in checkpoint or checkpoint.any(f"{prefix}in_proj_qkvz.")
        *rows, b, a = (interleaved if fused else separate)(kit, heads, prefix, hidden)
        gap = zeros(-self.v_heads % 8, hidden)  # what a kernel reads starts at 16 bytes
        self.in_proj = dense(kit, [*rows, b, gap, a, gap])
        self.widths = [self.qk_width + self.v_width, self.v_width, *[self.v_heads, gap.shape[0]] * 2]
        columns = sum(heads.qkv)
        taps = tensor(f"{prefix}conv1d.weight", columns, 1, conv_len).map(lambda w: w.squeeze(1))
        self.conv = Conv(kit, name, cut.rows(taps, heads.qkv), zeros(self.qk_width + self.v_width))
        self.qk_norm = self._unit_norm(kit)
        dt_bias, a_log = (cut.rows(tensor(f"{prefix}{n}", heads.v), [heads.v]) for n in ("dt_bias", "A_log"))
        self.dt_bias = kit.weight(dt_bias.map(lambda w: w.unsqueeze(1)), wide=True)
        self.A = kit.weight(a_log.map(lambda w: -w.float().exp()), wide=True)
        scale = tensor(f"{prefix}norm.weight", self.v_dim).map(lambda w: w.repeat(self.v_heads))
        self.norm = Norm(kit, scale, eps(cfg), group_len=self.v_dim)
        out = checkpoint.matrix(f"{prefix}out_proj.weight", hidden, heads.v * self.v_dim)
        self.out_proj = Down(kit, out)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        qkv, z, b, _, a, _ = self.in_proj.split(x, self.widths)
        qk, v = self.conv(qkv, step).split([self.qk_width, self.v_width], dim=1)
        q, k = self.qk_norm(qk).view(-1, 2 * self.k_heads, self.k_dim).split(self.k_heads, dim=1)
        v = v.view(-1, self.v_heads, self.v_dim)
        names = ("state", "k_records", "v_records", "g_records", "beta_records")
        states = (step.states[f"{self.name}.{what}"] for what in names)
        gates = (a.unsqueeze(2), b, self.dt_bias, self.A)
        o = self.ops.delta(q, k, v, *gates, *states, step.rows, self.chunk_len)
        return self.out_proj(self.norm(o.view(-1, self.v_width), z))

    def states(self, limits: Limits) -> list[State]:
        records = {
            "k": (self.k_heads, self.k_dim),
            "v": (self.v_heads, self.v_dim),
            "g": (self.v_heads, 1),
            "beta": (self.v_heads,),
        }
        state = (self.v_heads, self.k_dim, self.v_dim)
        return slot_states(self.name, limits, state, records, self.dtype_name)

    def _unit_norm(self, kit: Kit) -> Norm:
        """L2 norm of q and k as an RMS norm: x / sqrt(sum x^2 + 1e-6), and q times k_dim^-0.5."""
        width = self.k_heads * self.k_dim
        scale = torch.cat((torch.full((width,), self.k_dim**-1.0), torch.full((width,), self.k_dim**-0.5)))
        return Norm(kit, Lazy.of(scale), 1e-6 / self.k_dim, group_len=self.k_dim)


def separate(kit: Kit, heads: DeltaHeads, prefix: str, hidden: int) -> list[Lazy]:
    """Qwen3.5: rows of q k v, z, b and a."""
    parts = {"qkv": heads.qkv, "z": heads.qkv[2:], "b": [heads.v], "a": [heads.v]}
    return [
        kit.cut.rows(kit.checkpoint.matrix(f"{prefix}in_proj_{part}.weight", sum(rows), hidden), rows)
        for part, rows in parts.items()
    ]


def interleaved(kit: Kit, heads: DeltaHeads, prefix: str, hidden: int) -> list[Lazy]:
    """Qwen3-Next: per key head its q, k, values and gates, then per key head its b and a."""
    ratio = heads.v // heads.k
    groups = {
        "qkvz": [heads.k_dim, heads.k_dim, ratio * heads.v_dim, ratio * heads.v_dim],
        "ba": [ratio, ratio],
    }
    rows = []
    for part, widths in groups.items():
        whole = kit.checkpoint.matrix(f"{prefix}in_proj_{part}.weight", heads.k * sum(widths), hidden)
        rank_rows = kit.cut.rows(whole, [whole.shape[0]])  # whole key heads
        for i in range(len(widths)):
            rows.append(rank_rows.take(_deinterleave(heads.k // kit.cut.size, widths, i)))
    return rows


class SwigluMoe(nn.Module):
    """Routed experts plus one shared expert behind a sigmoid gate."""

    def __init__(self, kit: Kit, cfg: Config, prefix: str) -> None:
        super().__init__()
        hidden, inner = cfg.size("hidden_size"), cfg.size("moe_intermediate_size")
        num_layers = cfg.size("num_hidden_layers", limit=MAX_LAYERS)
        self.num_experts = cfg.size("num_experts", limit=MAX_EXPERTS // num_layers)
        self.top_k = cfg.size("num_experts_per_tok")
        if self.top_k > self.num_experts:
            reason = f"num_experts_per_tok {self.top_k} is more than num_experts {self.num_experts}"
            raise cfg.refused("conflict", "num_experts_per_tok", reason, "correct one of them")
        self.renormalise = cfg.read("norm_topk_prob", bool, True)
        self.ops, self.absent = kit.ops, kit.absent
        tensor, matrix = kit.checkpoint.tensor, kit.checkpoint.matrix
        router = tensor(f"{prefix}gate.weight", self.num_experts, hidden)
        gap = zeros(-(self.num_experts + 1) % 8, hidden)  # see GatedDelta
        gate = tensor(f"{prefix}shared_expert_gate.weight", 1, hidden)
        self.router, self.widths = Linear(kit, join([router, gate, gap])), [self.num_experts, 1, gap.shape[0]]
        experts = f"{prefix}experts."
        if kit.checkpoint.any(f"{experts}gate_up_proj"):
            up = matrix(f"{experts}gate_up_proj", self.num_experts, 2 * inner, hidden)
            down = matrix(f"{experts}down_proj", self.num_experts, hidden, inner)
        else:
            up = expert_tensors(kit, experts, ("gate", "up"), self.num_experts, inner, hidden)
            down = expert_tensors(kit, experts, ("down",), self.num_experts, hidden, inner)
        self.experts, self.sum = Experts(kit, up, down, "swiglu"), Sum(kit)
        self.shared = SwigluMlp(
            kit, f"{prefix}shared_expert.", hidden, cfg.size("shared_expert_intermediate_size")
        )

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        scores, shared_gate, _ = self.router.split(x, self.widths)
        chosen = self.ops.route(scores, self.absent, "softmax", self.top_k, 1, 1, self.renormalise, 1.0)
        pairs = zip(self.experts.parts(x, *chosen), self.shared.parts(x), strict=True)
        return self.sum([routed + self.ops.gate(shared, shared_gate, "sigmoid") for routed, shared in pairs])


class Layer(nn.Module):
    """A token mixer, then an MLP or experts."""

    def __init__(
        self, kit: Kit, cfg: Config, rope: Rope, kind: str, index: int, source: str, target: str
    ) -> None:
        super().__init__()
        prefix, name = f"{source}layers.{index}.", f"{target}layers.{index}"
        match kind:
            case "linear_attention":
                mixer = GatedDelta(kit, cfg, f"{prefix}linear_attn.", name)
            case "full_attention":
                mixer = GatedAttention(kit, cfg, rope, f"{prefix}self_attn.", name)
            case _:
                reason = f"layer_types has {shown(kind)}, known are {', '.join(WORDS)}"
                raise cfg.refused("unsupported", "layer_types", reason, "use another checkpoint")
        self.mixer = Residual(norm(kit, cfg, f"{prefix}input_layernorm"), mixer)
        # no config says whether an MTP layer is sparse
        sparse = f"{prefix}mlp.gate.weight" in kit.checkpoint if target else is_sparse(cfg, index)
        if sparse:
            mlp = SwigluMoe(kit, cfg, f"{prefix}mlp.")
        else:
            mlp = SwigluMlp(kit, f"{prefix}mlp.", cfg.size("hidden_size"), cfg.size("intermediate_size"))
        self.mlp = Residual(norm(kit, cfg, f"{prefix}post_attention_layernorm"), mlp)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        return self.mlp(self.mixer(x, step), step)


def load(kit: Kit) -> Parts:
    """Everything is checked here: config values, names and shapes."""
    whole, checkpoint = kit.checkpoint.config, kit.checkpoint
    cfg = checkpoint.text_config
    refuse(cfg)
    if checkpoint.architecture != "Qwen3NextForCausalLM":
        cfg.require("norm_topk_prob", True, None)  # transformers' Qwen3.5 always normalises
    kinds = layer_kinds(cfg)
    vocab, hidden = cfg.size("vocab_size"), cfg.size("hidden_size")
    prefix = "model.language_model." if checkpoint.any("model.language_model.") else "model."
    rope = Rope(kit, rope_theta(cfg), rotary_dim(cfg))
    embed = Embedding(kit, checkpoint.tensor(f"{prefix}embed_tokens.weight", vocab, hidden))
    layers = [Layer(kit, cfg, rope, kind, i, prefix, "") for i, kind in enumerate(kinds)]
    tied = whole.read("tie_word_embeddings", bool, cfg.read("tie_word_embeddings", bool, False))
    if tied:
        head = Linear.sharing(kit, embed.weight)
    else:
        head = Linear.head(kit, checkpoint.matrix("lm_head.weight", vocab, hidden))
    trunk = Trunk(kit, embed, layers, norm(kit, cfg, f"{prefix}norm"), head)
    mtp = _mtp(kit, cfg, rope) if checkpoint.any("mtp.") else None
    checkpoint.refuse_leftovers(rf"{IGNORABLE}|lm_head\.weight$" if tied else IGNORABLE)
    words = tuple(WORDS[kind] for kind in kinds)
    return Parts(cfg, words, trunk, None if mtp is None else Draft(trunk, mtp))


def _mtp(kit: Kit, cfg: Config, rope: Rope) -> Mtp:
    cfg.require("mtp_num_hidden_layers", 1)
    hidden = cfg.size("hidden_size")
    return Mtp(
        token_norm=norm(kit, cfg, "mtp.pre_fc_norm_embedding"),
        hidden_norm=norm(kit, cfg, "mtp.pre_fc_norm_hidden"),
        enter=Linear(kit, kit.checkpoint.matrix("mtp.fc.weight", hidden, 2 * hidden)),
        layers=[Layer(kit, cfg, rope, "full_attention", 0, "mtp.", "mtp.")],
        norm=norm(kit, cfg, "mtp.norm"),
    )


def layer_kinds(cfg: Config) -> list[str]:
    count = cfg.size("num_hidden_layers", limit=MAX_LAYERS)
    interval = cfg.size("full_attention_interval", 4)
    default = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)]
    kinds = cfg.read("layer_types", list[str], default)
    if len(kinds) != count:
        reason = f"layer_types has {len(kinds)} entries, num_hidden_layers is {count}"
        raise cfg.refused("conflict", "layer_types", reason, "correct one of them")
    return kinds


def is_sparse(cfg: Config, index: int) -> bool:
    if cfg.read("num_experts", int, 0) == 0 or index in cfg.read("mlp_only_layers", list[int], []):
        return False
    return (index + 1) % cfg.size("decoder_sparse_step", 1) == 0


def head_dim(cfg: Config) -> int:
    default = cfg.size("hidden_size") // cfg.size("num_attention_heads")
    return cfg.size("head_dim", default, limit=MAX_HEAD_DIM)


def rotary_dim(cfg: Config) -> int:
    fraction = _rope(cfg).read("partial_rotary_factor", float, cfg.read("partial_rotary_factor", float, 0.25))
    dim = int(head_dim(cfg) * fraction) if 0 < fraction <= 1 else 0
    if dim % 2 or not 0 < dim <= head_dim(cfg):
        reason = f"partial_rotary_factor {fraction} turns {dim} of {head_dim(cfg)} channels"
        way_out = "correct it to turn an even number"
        raise cfg.refused("unsupported", "partial_rotary_factor", reason, way_out)
    return dim


def rope_theta(cfg: Config) -> float:
    return _rope(cfg).positive("rope_theta", cfg.positive("rope_theta", 10000.0))


def eps(cfg: Config) -> float:
    return cfg.positive("rms_norm_eps", 1e-6)


def norm(kit: Kit, cfg: Config, name: str) -> Norm:
    return Norm(kit, centred(kit.checkpoint.tensor(f"{name}.weight", cfg.size("hidden_size"))), eps(cfg))


def centred(weight: Lazy) -> Lazy:
    """A zero-centred norm weight as the factor that it stands for."""
    return weight.map(lambda w: 1 + w.float())


def _rope(cfg: Config) -> Config:
    return cfg.section("rope_parameters") if "rope_parameters" in cfg else Config({}, cfg.where)


def _deinterleave(heads: int, widths: list[int], part: int):
    def pick(rows: torch.Tensor) -> torch.Tensor:
        return rows.view(heads, sum(widths)).split(widths, dim=1)[part].flatten()

    return pick
