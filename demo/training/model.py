"""The two demo architectures: configs, draft (MTP) heads built from transformers' own layers, files on disk.

The trunks are transformers' own classes, so the checkpoints are compatible by construction.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, NemotronHConfig, NemotronHForCausalLM, PreTrainedModel
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

FAMILIES = ("nemotron-h", "qwen3.5")
DEMO = Path(__file__).resolve().parents[1]  # has the chat template of each family, written by hand
PATTERN, MTP_PATTERN = "MEM*-MEM*-", "*E"
MAX_LEN = 4096
END_ID, IM_END_ID = 0, 2
LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def make_config(family: str) -> NemotronHConfig | Qwen3_5TextConfig:
    shared = {
        "vocab_size": 4096,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": MAX_LEN,
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "pad_token_id": END_ID,
    }
    if family == "nemotron-h":
        return NemotronHConfig(
            **shared,
            layers_block_type=[LETTERS[c] for c in PATTERN],
            mtp_layers_block_type=[LETTERS[c] for c in MTP_PATTERN],
            num_nextn_predict_layers=1,
            intermediate_size=768,
            mamba_num_heads=8,
            mamba_head_dim=64,
            ssm_state_size=64,
            n_groups=2,
            chunk_size=64,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=96,
            moe_shared_expert_intermediate_size=256,
            routed_scaling_factor=2.5,
        )
    return Qwen3_5TextConfig(
        **shared,
        intermediate_size=512,
        num_hidden_layers=8,
        tie_word_embeddings=True,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 100000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
        },
    )


def make_model(family: str) -> PreTrainedModel:
    config = make_config(family)
    model = NemotronHForCausalLM(config) if family == "nemotron-h" else qwen.Qwen3_5ForCausalLM(config)
    for module in model.modules():
        if isinstance(module, nn.Conv1d):
            # transformers draws these at 0.02 as if they were linear layers; four taps need the usual scale
            nn.init.uniform_(module.weight, -0.5, 0.5)
        if isinstance(module, qwen.Qwen3_5GatedDeltaNet):
            # decay per token near 1, as the Mamba and FLA initialisations have it (transformers: ones)
            step = torch.exp(torch.empty_like(module.dt_bias).uniform_(math.log(0.001), math.log(0.1)))
            module.dt_bias.data.copy_(step + torch.log(-torch.expm1(-step)))
    remove_step_floor(model)
    # transformers clamps dt at time_step_min in its chunk path but not in decode; after initialisation the
    # field has no other use, so the saved config makes that clamp a no-op
    if family == "nemotron-h":
        model.config.time_step_min = 1e-9
    return model


def remove_step_floor(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nemotron.NemotronHMamba2Mixer):
            module.time_step_limit = (0.0, float("inf"))


class NemotronMtp(nn.Module):
    """Pattern `*E`. Fuse, attention, MoE; the output of final_layernorm feeds lm_head and the next step."""

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_epsilon
        attention, moe = nn.Module(), nn.Module()
        attention.enorm = nemotron.NemotronHRMSNorm(width, eps=eps)
        attention.hnorm = nemotron.NemotronHRMSNorm(width, eps=eps)
        attention.eh_proj = nn.Linear(2 * width, width, bias=False)
        attention.norm = nemotron.NemotronHRMSNorm(width, eps=eps)
        attention.mixer = nemotron.NemotronHAttention(config, layer_idx=PATTERN.index("*"))
        moe.norm = nemotron.NemotronHRMSNorm(width, eps=eps)
        moe.mixer = nemotron.NemotronHMoE(config)
        moe.final_layernorm = nemotron.NemotronHRMSNorm(width, eps=eps)
        self.layers = nn.ModuleList([attention, moe])
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.head_dim = config.head_dim

    def fuse(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        layer = self.layers[0]
        return layer.eh_proj(torch.cat([layer.enorm(embedded), layer.hnorm(hidden)], dim=-1))

    def project(self, x: Tensor, offset: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        layer = self.layers[0]
        x = layer.norm(x)
        shape = (*x.shape[:-1], -1, self.head_dim)
        mixer = layer.mixer
        query, key, value = (
            p(x).view(shape).transpose(1, 2) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
        )
        return query, key, value, x.new_empty(0)

    def finish(self, x: Tensor, context: Tensor, gate: Tensor) -> Tensor:
        x = x + self.layers[0].mixer.o_proj(context)
        moe = self.layers[1]
        return moe.final_layernorm(x + moe.mixer(moe.norm(x)))


class QwenMtp(nn.Module):
    """Fuse, one full-attention decoder layer, norm; the normed output feeds lm_head and the next step."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding = qwen.Qwen3_5RMSNorm(width, eps=eps)
        self.pre_fc_norm_hidden = qwen.Qwen3_5RMSNorm(width, eps=eps)
        self.layers = nn.ModuleList(
            [qwen.Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention"))]
        )
        self.norm = qwen.Qwen3_5RMSNorm(width, eps=eps)
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.head_dim = config.head_dim
        rope = config.rope_parameters
        rotary_dim = int(config.head_dim * rope["partial_rotary_factor"])
        frequency = rope["rope_theta"] ** -(torch.arange(0, rotary_dim, 2).float() / rotary_dim)
        angle = torch.arange(MAX_LEN).float()[:, None] * frequency
        self.register_buffer(
            "angle", torch.cat([angle, angle], dim=-1)[None], persistent=False
        )  # [1, MAX_LEN, rot]

    def fuse(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        parts = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        return self.fc(torch.cat(parts, dim=-1))

    def project(self, x: Tensor, offset: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        layer = self.layers[0]
        x = layer.input_layernorm(x)
        attention = layer.self_attn
        shape = (*x.shape[:-1], -1, self.head_dim)
        query, gate = attention.q_proj(x).view(*x.shape[:-1], -1, 2 * self.head_dim).chunk(2, dim=-1)
        query = attention.q_norm(query).transpose(1, 2)
        key = attention.k_norm(attention.k_proj(x).view(shape)).transpose(1, 2)
        value = attention.v_proj(x).view(shape).transpose(1, 2)
        angle = self.angle[:, offset : offset + x.shape[1]]
        query, key = qwen.apply_rotary_pos_emb(query, key, angle.cos(), angle.sin())
        return query, key, value, gate.reshape(*x.shape[:-1], -1)

    def finish(self, x: Tensor, context: Tensor, gate: Tensor) -> Tensor:
        layer = self.layers[0]
        x = x + layer.self_attn.o_proj(context * torch.sigmoid(gate))
        return self.norm(x + layer.mlp(layer.post_attention_layernorm(x)))


Mtp = NemotronMtp | QwenMtp


def make_mtp(model: PreTrainedModel) -> Mtp:
    is_nemotron = isinstance(model, NemotronHForCausalLM)
    mtp = NemotronMtp(model.config) if is_nemotron else QwenMtp(model.config)
    for weight in mtp.parameters():
        if weight.ndim >= 2:
            nn.init.normal_(weight, std=0.02)
    return mtp


def draft_attention(query: Tensor, keys: list[Tensor], values: list[Tensor], groups: int) -> Tensor:
    """What serving step j sees, for all starts i at once: slots 0..i of the first pass, then its own j-1."""
    keys = [k.repeat_interleave(groups, dim=1) for k in keys]
    values = [v.repeat_interleave(groups, dim=1) for v in values]
    scale, length = query.shape[-1] ** -0.5, query.shape[2]
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ keys[0].transpose(2, 3)).float().mul(scale).masked_fill(future, float("-inf"))
    own = [(query.float() * k.float()).sum(-1, keepdim=True) * scale for k in keys[1:]]
    total = scores.logsumexp(-1, keepdim=True)
    for score in own:
        total = torch.logaddexp(total, score)
    context = (scores - total).exp().to(values[0].dtype) @ values[0]
    for score, value in zip(own, values[1:], strict=True):
        context = context + ((score - total).exp() * value).to(context.dtype)
    return context.transpose(1, 2).flatten(2)


def draft_step(
    mtp: NemotronMtp | QwenMtp, embedded: Tensor, hidden: Tensor, past: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """Draft step len(past) + 1 for every start position; appends its own keys and values to `past`."""
    x = mtp.fuse(embedded, hidden)
    query, key, value, gate = mtp.project(x, offset=len(past))
    past.append((key, value))
    context = draft_attention(query, [k for k, _ in past], [v for _, v in past], mtp.groups)
    return mtp.finish(x, context, gate)


def run_layer(layer: nn.Module, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    return layer(x) if rotary is None else layer(x, position_embeddings=rotary)


def trunk_hidden(model: PreTrainedModel, token_ids: Tensor, layer_fn=run_layer) -> Tensor:
    """Hidden states after the final norm, without transformers' cache and mask plumbing."""
    body = model.model
    x = model.get_input_embeddings()(token_ids)
    if isinstance(model, NemotronHForCausalLM):
        rotary, final_norm = None, body.norm_f
    else:
        positions = torch.arange(token_ids.shape[1], device=token_ids.device).expand(3, 1, -1)
        rotary, final_norm = body.rotary_emb(x.float(), positions), body.norm
    for layer in body.layers:
        x = layer_fn(layer, x, rotary)
    return final_norm(x)


def stored_tensors(model: PreTrainedModel, mtp: nn.Module) -> dict[str, Tensor]:
    """Names and dtypes on disk: one tensor per expert, bf16 except what real checkpoints keep in fp32."""
    tensors: dict[str, Tensor] = {}
    tied = model.config.tie_word_embeddings
    trunk = {k.replace("model.", "backbone.", 1) if not tied else k: v for k, v in model.state_dict().items()}
    for name, value in (trunk | {f"mtp.{k}": v for k, v in mtp.state_dict().items()}).items():
        if tied and name == "lm_head.weight":
            continue
        keep = name.endswith(("A_log", ".D", "e_score_correction_bias", "linear_attn.norm.weight"))
        value = value.detach().cpu().to(torch.float32 if keep else torch.bfloat16).contiguous()
        if name.endswith(("experts.up_proj", "experts.down_proj")):
            stem, projection = name.rsplit(".", 1)
            tensors |= {f"{stem}.{i}.{projection}.weight": expert.clone() for i, expert in enumerate(value)}
        else:
            tensors[name] = value
    return tensors


def save_checkpoint(model: PreTrainedModel, mtp: nn.Module, folder: Path, tokenizer_folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored_tensors(model, mtp), str(folder / "model.safetensors"), metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "bfloat16"
    if isinstance(model, NemotronHForCausalLM):
        # transformers writes only the lists; other readers want the pattern strings and the count
        config |= {"hybrid_override_pattern": PATTERN, "mtp_hybrid_override_pattern": MTP_PATTERN}
        config["num_hidden_layers"] = len(PATTERN)
    else:
        config |= {"full_attention_interval": 4, "attn_output_gate": True, "mamba_ssm_dtype": "float32"}
        config |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    generation = {"do_sample": False, "eos_token_id": [END_ID, IM_END_ID], "pad_token_id": END_ID}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    family = "nemotron-h" if isinstance(model, NemotronHForCausalLM) else "qwen3.5"
    for source in (
        tokenizer_folder / "tokenizer.json",
        tokenizer_folder / "tokenizer_config.json",
        DEMO / f"{family}-code/chat_template.jinja",
    ):
        if source.parent.resolve() != folder.resolve():
            shutil.copyfile(source, folder / source.name)


def load_checkpoint(folder: Path, device: str) -> tuple[PreTrainedModel, Mtp]:
    """The saved weights in fp32, trunk through AutoModelForCausalLM."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    remove_step_floor(model)
    mtp = make_mtp(model)
    stored = {
        k: v.float() for k, v in load_file(folder / "model.safetensors").items() if k.startswith("mtp.")
    }
    state: dict[str, Tensor] = {}
    for name in mtp.state_dict():
        if name.endswith(("experts.up_proj", "experts.down_proj")):
            stem, projection = name.rsplit(".", 1)
            count = mtp.state_dict()[name].shape[0]
            state[name] = torch.stack([stored[f"mtp.{stem}.{i}.{projection}.weight"] for i in range(count)])
        else:
            state[name] = stored[f"mtp.{name}"]
    mtp.load_state_dict(state)
    return model, mtp.to(device).eval()
