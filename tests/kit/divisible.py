"""Tiny checkpoints that 2 and 4 ranks can share: heads, groups, widths and vocabularies are multiples of 4.

Keys and values have 2 heads, so that 4 ranks share them.
"""

from kit.checkpoints import (
    MOE,
    NEMOTRON_H_MOE,
    QWEN,
    VISION,
    VOCAB,
    Tensors,
    fused_experts,
    nemotron_mtp,
    qwen_mtp,
    saved,
)

SIZES = {
    "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "intermediate_size": 128, "shared_expert_intermediate_size": 64,
}  # fmt: skip


def nemotron_h_divisible() -> tuple[dict, Tensors]:
    """Mamba2, experts in a latent space, attention, an MLP."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    sizes = {
        "vocab_size": VOCAB + 8, "num_attention_heads": 8, "num_key_value_heads": 2, "mamba_num_heads": 8,
        "n_groups": 4,
    }  # fmt: skip
    made = NemotronHConfig(**NEMOTRON_H_MOE | sizes, hybrid_override_pattern="ME*-M")
    config, tensors = saved(NemotronHForCausalLM, made)
    del config["layers_block_type"], config["mtp_layers_block_type"]
    config |= {
        "hybrid_override_pattern": "ME*-M",
        "mtp_hybrid_override_pattern": "*E",
        "num_hidden_layers": 5,
    }
    return config, tensors | nemotron_mtp(tensors, "backbone.layers.2.", "backbone.layers.1.")


def qwen3_5_moe_divisible() -> tuple[dict, Tensors]:
    """Fused experts."""
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    made = Qwen3_5MoeConfig(text_config=QWEN | MOE | SIZES, vision_config=VISION)
    config, tensors = saved(Qwen3_5MoeForConditionalGeneration, made)
    config["text_config"] |= {"mtp_num_hidden_layers": 1}
    return config, fused_experts(tensors | qwen_mtp(tensors, "model.language_model.layers.2."))


def qwen3_5_divisible() -> tuple[dict, Tensors]:
    """Dense, the head tied to the embedding."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = QWEN | SIZES | {"tie_word_embeddings": True}
    whole = Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=True)
    config, tensors = saved(Qwen3_5ForConditionalGeneration, whole)
    config["text_config"] |= {"mtp_num_hidden_layers": 1}
    return config, tensors | qwen_mtp(tensors, "model.language_model.layers.2.")


def qwen3_next_divisible() -> tuple[dict, Tensors]:
    """Interleaved projections, one tensor for each expert, a dense layer among them."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    options = {"mlp_only_layers": [1], "layer_types": None, "full_attention_interval": 4}
    config, tensors = saved(Qwen3NextForCausalLM, Qwen3NextConfig(**QWEN | MOE | SIZES | options))
    del config["layer_types"]
    return config | {"full_attention_interval": 4}, tensors | qwen_mtp(tensors, "model.layers.3.")


DIVISIBLE = {
    maker.__name__: maker
    for maker in (nemotron_h_divisible, qwen3_5_moe_divisible, qwen3_5_divisible, qwen3_next_divisible)
}
