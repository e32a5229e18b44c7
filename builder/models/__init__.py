"""Architecture name -> model."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hemiola.builder.checkpoint import Checkpoint, Config, Lazy
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
        known = ", ".join(FAMILIES)
        raise Refused(
            f"{checkpoint.config.where}: architecture {architecture} is not supported; supported are {known}"
        )
    kit = Kit(checkpoint, ops, chunk_len, max_len, dtype, kv_dtype, tells_best)
    parts = FAMILIES[architecture].load(kit)
    if draft_vocab is not None and parts.draft is not None:
        parts.draft.choose_among(parts.trunk.head.lowest(kit, draft_vocab))
    return Model(architecture, parts.config, parts.layers, parts.trunk, parts.draft, kit.sources)
