"""Tiny checkpoints with what those of checkpoints.FAMILIES leave at its default, or have in one size alone.

A number that a family's code had instead of reading it would fit those; each of these differs in all fields
that its family reads: epsilons, factors, widths, counts of experts, sizes of vocabularies.
"""

from kit.checkpoints import (
    MOE,
    NEMOTRON_H,
    QWEN,
    VISION,
    VOCAB,
    Tensors,
    nemotron_mtp,
    qwen_mtp,
    saved,
)

EPS = 1e-2
LONGEST = 8192
WIDE_VOCAB = 2**17 + 3
QWEN_SIZES = {
    "max_position_embeddings": LONGEST, "rms_norm_eps": EPS, "hidden_size": 48, "intermediate_size": 80,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 48, "linear_conv_kernel_dim": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
}  # fmt: skip


def nemotron_h_varied() -> tuple[dict, Tensors]:
    """More than 128 experts in one group, whose weights add up to anything; no latent space."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    sizes = {
        "vocab_size": VOCAB + 30, "max_position_embeddings": LONGEST, "layer_norm_epsilon": EPS,
        "hidden_size": 48, "head_dim": 32, "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 4,
        "ssm_state_size": 48, "conv_kernel": 3, "intermediate_size": 80,
        "n_routed_experts": 130, "num_experts_per_tok": 7, "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 24, "norm_topk_prob": False, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 0.5,
    }  # fmt: skip
    made = NemotronHConfig(**NEMOTRON_H | sizes, hybrid_override_pattern="ME*-EM")
    config, tensors = saved(NemotronHForCausalLM, made)
    del config["layers_block_type"], config["mtp_layers_block_type"]
    config |= {
        "hybrid_override_pattern": "ME*-EM",
        "mtp_hybrid_override_pattern": "*E",
        "num_hidden_layers": 6,
    }
    return config, tensors | nemotron_mtp(tensors, "backbone.layers.2.", "backbone.layers.1.")


def qwen3_next_varied() -> tuple[dict, Tensors]:
    """Every second layer has more than 128 experts, whose weights do not add up to 1."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    sizes = {
        "vocab_size": VOCAB + 9,
        "num_experts": 131,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 16,
    }
    sizes |= {"shared_expert_intermediate_size": 80, "norm_topk_prob": False, "decoder_sparse_step": 2}
    sizes |= {"num_hidden_layers": 4, "layer_types": None, "full_attention_interval": 2}
    config, tensors = saved(Qwen3NextForCausalLM, Qwen3NextConfig(**QWEN | MOE | QWEN_SIZES | sizes))
    del config["layer_types"]
    return config | {"full_attention_interval": 2}, tensors | qwen_mtp(tensors, "model.layers.3.")


def qwen3_5_varied() -> tuple[dict, Tensors]:
    """A vocabulary beyond 2^17, tied to the head by a word in the nested config alone."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = QWEN | QWEN_SIZES | {"vocab_size": WIDE_VOCAB, "hidden_size": 32, "tie_word_embeddings": True}
    vision = VISION | {"out_hidden_size": 32}
    whole = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True)
    config, tensors = saved(Qwen3_5ForConditionalGeneration, whole)
    del config["tie_word_embeddings"]
    config["text_config"] |= {"mtp_num_hidden_layers": 1}
    return config, tensors | qwen_mtp(tensors, "model.language_model.layers.2.")


VARIED = {maker.__name__: maker for maker in (nemotron_h_varied, qwen3_next_varied, qwen3_5_varied)}
