"""Architecture name -> model."""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from hemiola.builder.checkpoint import Checkpoint, Config
from hemiola.builder.lazy import Lazy
from hemiola.builder.models import nemotron_h, qwen
from hemiola.builder.models.layers import Draft, Kit, Trunk
from hemiola.runtime.errors import Refused

FAMILIES = {
    "NemotronHForCausalLM": nemotron_h,
    "Qwen3NextForCausalLM": qwen,
    "Qwen3_5ForCausalLM": qwen,
    "Qwen3_5ForConditionalGeneration": qwen,
    "Qwen3_5MoeForCausalLM": qwen,
    "Qwen3_5MoeForConditionalGeneration": qwen,
}
# What config.json calls them, and its text_config where it has one.
MODEL_TYPES = {
    "NemotronHForCausalLM": ("nemotron_h", None),
    "Qwen3NextForCausalLM": ("qwen3_next", None),
    "Qwen3_5ForCausalLM": ("qwen3_5_text", None),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", "qwen3_5_text"),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text", None),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", "qwen3_5_moe_text"),
}


@dataclass(frozen=True)
class Model:
    """A checkpoint's graph on the meta device, and where each weight comes from."""

    architecture: str
    config: Config  # of the text model
    layers: tuple[str, ...]
    trunk: Trunk
    draft: Draft | None
    sources: dict[nn.Parameter, Lazy]

    @property
    def dtype(self) -> torch.dtype:
        return self.trunk.embed.weight.dtype

    @property
    def vocab_size(self) -> int:
        return self.trunk.embed.weight.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.trunk.embed.weight.shape[1]

    def weights(self, module: nn.Module) -> dict[str, Lazy]:
        """Names of a segment's weights, each once, in the order of its layers."""
        return {name: self.sources[parameter] for name, parameter in module.named_parameters()}


def load(
    checkpoint: Checkpoint,
    ops: Any,
    *,
    chunk_len: int,
    max_len: int,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    draft_vocab: int | None = None,
    tells_best: bool = False,
) -> Model:
    """Refuses what it cannot compute before any weight is read. `max_len`: tokens of the longest request;
    `kv_dtype`: of pages, if not that of activations; `draft_vocab`: rows of the output head that an MTP head
    chooses from, if not all; `tells_best`: segments compute the best token of a line, too, which takes no
    logits."""
    architecture = checkpoint.architecture
    if architecture not in FAMILIES:
        said = (
            f"{checkpoint.config.where}: architecture {architecture} is not"
            f" supported{_nearest(architecture, FAMILIES)}"
        )
        raise Refused("unsupported", said=said, way_out=f"supported are {', '.join(FAMILIES)}")
    _check_types(checkpoint, architecture)
    kit = Kit(checkpoint, ops, chunk_len, max_len, dtype, kv_dtype, tells_best)
    parts = FAMILIES[architecture].load(kit)
    if draft_vocab is not None and parts.draft is not None:
        parts.draft.choose_among(parts.trunk.head.lowest(kit, draft_vocab))
    return Model(architecture, parts.config, parts.layers, parts.trunk, parts.draft, kit.sources)


def _check_types(checkpoint: Checkpoint, architecture: str) -> None:
    """Where model_type is another model's, its layers may be, too. A config may leave it out."""
    whole, text = MODEL_TYPES[architecture]
    configs = [(checkpoint.config, whole)]
    if "text_config" in checkpoint.config:
        configs.append((checkpoint.text_config, text or whole))
    known = dict.fromkeys(name for pair in MODEL_TYPES.values() for name in pair if name)
    for config, wanted in configs:
        found = config.read("model_type", str, wanted)
        if found == wanted:
            continue
        wrong = "is another architecture's" if found in known else f"is not supported{_nearest(found, known)}"
        raise config.refused(
            f"model_type {found!r} {wrong}; {architecture} has {wanted}; correct it, or use another one"
        )


def _nearest(name: str, known: Iterable[str]) -> str:
    """Behind a name that is not known."""
    found = get_close_matches(name, list(known), 1, 0.5)
    return f", the nearest that is: {found[0]}" if found else ""
