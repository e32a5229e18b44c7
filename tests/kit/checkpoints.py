"""Tiny random checkpoints of every supported family, in the layout of the real ones, MTP tensors included.

    PYTHONPATH=.:tests python tests/kit/checkpoints.py qwen3_5 /tmp/qwen

transformers makes the trunk; what it would not write (MTP heads, fused experts) is added here.
"""

import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

VOCAB = 320
EOS = "<|endoftext|>"
SPECIALS = (EOS, "<|im_start|>", "<|im_end|>")
WORDS = (
    " the", "def ", "return ", "self", "import ", "class ", "for ", " in ", "if ", "else:", "None", "True",
    "    ", "()", "):\n", "print(", "len(", "range(", "not ", "with ",
)  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ZERO_CENTRED = (
    "bias", "input_layernorm.weight", "post_attention_layernorm.weight", "q_norm.weight", "k_norm.weight",
    "model.norm.weight", "mtp.norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight",
)  # fmt: skip
Tensors = dict[str, torch.Tensor]

# ---- configurations: small, but with every head ratio, spelling and option that the families have, and of
# sizes that compiled kernels take (plugins/*/spec.py); what need not be a multiple of 16 or even is not

NEMOTRON_H = {
    "vocab_size": VOCAB + 13, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16,
    "conv_kernel": 4, "intermediate_size": 96, "max_position_embeddings": 1024, "eos_token_id": 0,
    "bos_token_id": 0, "pad_token_id": 0, "num_nextn_predict_layers": 1,
}  # fmt: skip
NEMOTRON_H_MOE = NEMOTRON_H | {
    "num_attention_heads": 8, "num_key_value_heads": 1, "mamba_num_heads": 5,
    "n_groups": 1, "n_routed_experts": 9, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 40, "moe_latent_size": 32, "routed_scaling_factor": 2.5,
}  # fmt: skip
QWEN = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 16, "linear_num_key_heads": 3, "linear_num_value_heads": 3,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 1024, "eos_token_id": 0, "bos_token_id": None, "pad_token_id": None,
    "num_hidden_layers": 4, "tie_word_embeddings": False,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
MOE = {
    "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64,
    "num_position_embeddings": 16, "patch_size": 4,
}  # fmt: skip


def nemotron_h_dense() -> tuple[dict, Tensors]:
    """Mamba2, MLP and attention by pattern letters; a dense MTP block."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config, tensors = saved(
        NemotronHForCausalLM, NemotronHConfig(**NEMOTRON_H, hybrid_override_pattern="M-M*-M")
    )
    del config["layers_block_type"], config["mtp_layers_block_type"]
    config |= {
        "hybrid_override_pattern": "M-M*-M",
        "mtp_hybrid_override_pattern": "*-",
        "num_hidden_layers": 6,
    }
    config["time_step_limit"] = [0.0, math.inf]
    return config, tensors | nemotron_mtp(tensors, "backbone.layers.3.", "backbone.layers.1.")


def nemotron_h_moe() -> tuple[dict, Tensors]:
    """Experts in a latent space, routed by groups; list spellings, no num_hidden_layers."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config, tensors = saved(
        NemotronHForCausalLM, NemotronHConfig(**NEMOTRON_H_MOE, hybrid_override_pattern="ME*MEM")
    )
    config |= {
        "layers_block_type": ["mamba", "moe", "attention", "mamba", "moe", "mamba"],
        "num_hidden_layers": None,
    }
    config |= {
        "mtp_layers_block_type": ["attention", "moe"],
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
    }
    return config, tensors | nemotron_mtp(tensors, "backbone.layers.2.", "backbone.layers.1.")


def attention_only() -> tuple[dict, Tensors]:
    """The control: a NemotronH without a recurrence."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config, tensors = saved(
        NemotronHForCausalLM, NemotronHConfig(**NEMOTRON_H, hybrid_override_pattern="*-*-")
    )
    del config["layers_block_type"], config["mtp_layers_block_type"]
    config |= {"hybrid_override_pattern": "*-*-", "mtp_hybrid_override_pattern": "*-", "num_hidden_layers": 4}
    return config, tensors | nemotron_mtp(tensors, "backbone.layers.0.", "backbone.layers.1.")


def qwen3_next() -> tuple[dict, Tensors]:
    """Interleaved qkvz and ba projections, experts, one dense layer among them."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    sizes = {"vocab_size": VOCAB + 1, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
    sizes |= {"linear_num_key_heads": 1, "linear_value_head_dim": 32}
    options = {
        "mlp_only_layers": [1],
        "num_hidden_layers": 5,
        "layer_types": None,
        "full_attention_interval": 4,
    }
    config, tensors = saved(Qwen3NextForCausalLM, Qwen3NextConfig(**QWEN | MOE | sizes | options))
    del config["layer_types"]
    config |= {"full_attention_interval": 4}
    return config, tensors | qwen_mtp(tensors, "model.layers.3.")


def qwen3_5() -> tuple[dict, Tensors]:
    """Dense, text-only layout, untied head."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config, tensors = saved(Qwen3_5ForCausalLM, Qwen3_5TextConfig(**QWEN))
    return config | {"mtp_num_hidden_layers": 1}, tensors | qwen_mtp(tensors, "model.layers.2.")


def qwen3_5_tied() -> tuple[dict, Tensors]:
    """Dense, multimodal layout, tied head, four value heads to one key head."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = QWEN | {
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
    whole = Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=True)
    config, tensors = saved(Qwen3_5ForConditionalGeneration, whole)
    config["text_config"] |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    return config, tensors | qwen_mtp(tensors, "model.language_model.layers.2.")


def qwen3_5_moe() -> tuple[dict, Tensors]:
    """Experts, multimodal layout, fused 3-D expert tensors as the official checkpoints have them."""
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    text = QWEN | MOE | {"linear_num_value_heads": 6}
    config, tensors = saved(
        Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeConfig(text_config=text, vision_config=VISION)
    )
    config["text_config"] |= {"mtp_num_hidden_layers": 1}
    return config, fused_experts(tensors | qwen_mtp(tensors, "model.language_model.layers.2."))


def qwen3_5_moe_experts() -> tuple[dict, Tensors]:
    """Experts, text-only layout, one tensor per expert as transformers saves them."""
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    config, tensors = saved(Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig(**QWEN | MOE))
    return config | {"mtp_num_hidden_layers": 1}, tensors | qwen_mtp(tensors, "model.layers.2.")


def three_convs() -> tuple[dict, Tensors]:
    """Qwen3.5 with another recurrence (three_convs.py), which transformers does not know."""
    from kit import three_convs as family

    config, tensors = qwen3_5()
    kept = {name: tensor for name, tensor in tensors.items() if ".linear_attn." not in name}
    prefixes = {name.split("linear_attn.")[0] for name in tensors if ".linear_attn." in name}
    hidden, inner = config["hidden_size"], family.HEADS * family.DIM
    shapes: dict[str, tuple[int, ...]] = {"b_proj.weight": (family.HEADS, hidden), "A_log": (family.HEADS,)}
    shapes |= {f"{part}_proj.weight": (inner, hidden) for part in (*family.WIDTHS, "g")}
    shapes |= {f"{part}_conv.weight": (inner, width) for part, width in family.WIDTHS.items()}
    shapes |= {
        "dt_bias": (family.HEADS, family.DIM),
        "norm.weight": (inner,),
        "o_proj.weight": (hidden, inner),
    }
    unit = torch.tensor([1 / family.DIM, family.DIM**-0.5]).repeat_interleave(inner)
    for prefix in sorted(prefixes):
        made = {name: _random(name, torch.Size(shape)) for name, shape in shapes.items()}
        made["unit.weight"] = unit.clone()
        kept |= {f"{prefix}linear_attn.{name}": tensor for name, tensor in made.items()}
    return config | {"architectures": [family.ARCHITECTURE]}, kept


FAMILIES: dict[str, Callable[[], tuple[dict, Tensors]]] = {
    maker.__name__: maker
    for maker in (
        nemotron_h_dense, nemotron_h_moe, attention_only, qwen3_next, qwen3_5, qwen3_5_tied, qwen3_5_moe,
        qwen3_5_moe_experts,
    )
}  # fmt: skip
TEST_FAMILIES = {"three_convs": three_convs}
IN_BF16 = {"nemotron_h_moe", "qwen3_next", "qwen3_5_tied", "qwen3_5_moe_experts", "three_convs"}


def make(
    family: str, folder: Path, *, seed: int = 0, dtype: torch.dtype | None = None, shards: int = 1
) -> Path:
    """Write a complete checkpoint folder; returns it. dtype: bf16 for half of the families, if not given."""
    _quiet()
    dtype = dtype or (torch.bfloat16 if family in IN_BF16 else torch.float32)
    torch.manual_seed(seed)
    from kit.divisible import DIVISIBLE  # which are made of what is here
    from kit.varied import VARIED

    config, tensors = (FAMILIES | TEST_FAMILIES | VARIED | DIVISIBLE)[family]()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    stored = {name: tensor.to(_stored_dtype(name, dtype)).contiguous() for name, tensor in tensors.items()}
    write_tensors(folder, stored, shards)
    write_tokenizer(folder)
    return folder


def write_tensors(folder: Path, tensors: Tensors, shards: int = 1) -> None:
    """One `model.safetensors`, or shards with an index."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, weight_map = sorted(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer with a few merges: a token may be part of a character."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    for left, right in _merges():
        if len(tokens) < VOCAB and left + right not in tokens:
            tokens.append(left + right)
            merges.append((left, right))
    assert len(tokens) == VOCAB
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "model_max_length": 1024}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def reference(folder: Path) -> torch.nn.Module:
    """The checkpoint in transformers: fp32, eager, without its clamp of Mamba2's dt (models.md, B1)."""
    import transformers

    _quiet()
    config = transformers.AutoConfig.from_pretrained(folder)
    text = config.get_text_config()
    config.tie_word_embeddings |= text.tie_word_embeddings  # transformers reads the outer word alone
    config._attn_implementation = text._attn_implementation = "eager"
    config._experts_implementation = text._experts_implementation = "eager"
    cls = getattr(transformers, config.architectures[0])
    model = cls.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, math.inf)
    return model


# ---- how it is made


def _quiet() -> None:
    """No progress bars and no hints about kernels."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def saved(cls: type, config: object) -> tuple[dict, Tensors]:
    """What transformers writes for this configuration, with values that a trained model could have."""
    model = cls(config)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(_random(name, tensor.shape))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        content = json.loads((Path(folder) / "config.json").read_text())
        return content, load_file(Path(folder) / "model.safetensors")


def _random(name: str, shape: torch.Size) -> torch.Tensor:
    last = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if last == "A_log":
        return torch.empty(shape).uniform_(1, 16).log()
    if last == "dt_bias":  # softplus(dt_bias) spread over 0.001..0.1, as trained models start
        dt = torch.exp(torch.empty(shape).uniform_(math.log(0.001), math.log(0.1)))
        return dt + torch.log(-torch.expm1(-dt))
    if last == "e_score_correction_bias":
        return torch.randn(shape) * 0.1
    if last == "D":
        return 1 + torch.randn(shape) * 0.1
    if len(shape) == 1:
        return (0.0 if name.endswith(ZERO_CENTRED) else 1.0) + torch.randn(shape) * 0.1
    fan_in = 4 if "embed" in name else shape[-1]
    return torch.randn(shape) * fan_in**-0.5


def _copied(tensors: Tensors, source: str, target: str) -> Tensors:
    """New random tensors named and shaped like the layer `source`."""
    layer = {name.removeprefix(source): tensor for name, tensor in tensors.items() if name.startswith(source)}
    return {target + name: _random(target + name, tensor.shape) for name, tensor in layer.items()}


def nemotron_mtp(tensors: Tensors, attention: str, second: str) -> Tensors:
    hidden = tensors["backbone.norm_f.weight"].shape[0]
    norms = ("mtp.layers.0.enorm.weight", "mtp.layers.0.hnorm.weight", "mtp.layers.1.final_layernorm.weight")
    head = {name: 1 + torch.randn(hidden) * 0.1 for name in norms}
    head["mtp.layers.0.eh_proj.weight"] = _random("eh_proj", torch.Size((hidden, 2 * hidden)))
    return head | _copied(tensors, attention, "mtp.layers.0.") | _copied(tensors, second, "mtp.layers.1.")


def qwen_mtp(tensors: Tensors, attention: str) -> Tensors:
    hidden = tensors[attention + "input_layernorm.weight"].shape[0]
    names = ("mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight")
    head = {name: _random(name, torch.Size((hidden,))) for name in names}
    head["mtp.fc.weight"] = _random("fc", torch.Size((hidden, 2 * hidden)))
    return head | _copied(tensors, attention, "mtp.layers.0.")


def fused_experts(tensors: Tensors) -> Tensors:
    """Per-expert tensors become `experts.gate_up_proj` [E, 2I, F] and `experts.down_proj` [E, F, I]."""
    fused = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    prefixes = {name.split("experts.")[0] + "experts." for name in tensors if ".mlp.experts." in name}
    for prefix in sorted(prefixes):
        experts = range(MOE["num_experts"])
        gate, up, down = (
            torch.stack([tensors[f"{prefix}{e}.{part}_proj.weight"] for e in experts])
            for part in ("gate", "up", "down")
        )
        fused |= {f"{prefix}gate_up_proj": torch.cat((gate, up), dim=1), f"{prefix}down_proj": down}
    return fused


def _stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Real bf16 checkpoints keep these in fp32."""
    keep = ("A_log", "linear_attn.norm.weight", "e_score_correction_bias")
    return torch.float32 if name.endswith(keep) else dtype


def _merges() -> Iterable[tuple[str, str]]:
    for word in WORDS:
        letters = word.replace(" ", "Ġ").replace("\n", "Ċ")
        for i in range(1, len(letters)):
            yield letters[:i], letters[i]


if __name__ == "__main__":
    target = Path(sys.argv[2])
    shutil.rmtree(target, ignore_errors=True)
    print(make(sys.argv[1], target))
