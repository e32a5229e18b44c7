"""Architecture name -> model."""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from hemiola.builder.checkpoint import Checkpoint, Config
from hemiola.builder.cut import WHOLE, Cut
from hemiola.builder.lazy import Lazy
from hemiola.builder.models import nemotron_h, qwen
from hemiola.builder.models.layers import Kit
from hemiola.builder.models.segments import Draft, Parts, Trunk
from hemiola.plugins.attention.pages import FORMATS
from hemiola.runtime.errors import Refused, shown

LONGEST_NAME = 80  # of an architecture; a longer one is cut
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
    kv_dtype: str = "auto",
    draft_vocab: int | None = None,
    draft_head: str | None = None,
    quantize_head: str | None = None,
    tells_best: bool = False,
    cut: Cut = WHOLE,
    num_segments: int = 1,
) -> Model:
    """Refuses what it cannot compute before any weight is read. `max_len`: tokens of the longest request;
    `kv_dtype`: of pages, a name of plugins/attention/pages.py; `draft_vocab`: rows of the output
    head that an MTP head chooses from, if not all; `draft_head`: the codes in which it reads them, if any;
    `quantize_head`: the codes of the output head, if any; `tells_best`: segments compute the best token
    of a line, too, which takes no logits; `cut`: whose part of the weights, where several ranks run the
    model; `num_segments`: cut.py."""
    refuse_unknown(checkpoint)
    architecture = checkpoint.architecture
    pages = FORMATS[kv_dtype]
    kit = Kit(checkpoint, ops, chunk_len, max_len, dtype, pages, tells_best, cut, num_segments)
    parts = FAMILIES[architecture].load(kit)
    if quantize_head is not None:
        _round_head(kit, parts, quantize_head)
    if parts.draft is not None and (draft_vocab is not None or draft_head is not None):
        parts.draft.choose_by(parts.trunk.head.smaller(kit, draft_vocab, draft_head))
    return Model(architecture, parts.config, parts.layers, parts.trunk, parts.draft, kit.sources)


def _round_head(kit: Kit, parts: Parts, codes: str) -> None:
    """Embeddings that are tied to it stay as they are."""
    layout = kit.sources[parts.trunk.head.weight].layout
    if layout is not None:
        message = f"--quantize-head {codes}: the checkpoint's output head is quantised already ({layout})"
        raise Refused("conflict", "quantize_head", message=message, way_out="leave it out")
    parts.trunk.head = parts.trunk.head.smaller(kit, None, codes)
    if parts.draft is not None:
        parts.draft.head = parts.trunk.head


def refuse_unknown(checkpoint: Checkpoint) -> None:
    """What config.json says alone, without a tensor."""
    architecture = checkpoint.architecture
    if architecture not in FAMILIES:
        name = architecture if len(architecture) <= LONGEST_NAME else shown(architecture)
        nearest = _nearest(architecture, FAMILIES)
        message = f"{checkpoint.config.where}: architecture {name} is not supported{nearest}"
        raise Refused("unsupported", message=message, way_out=f"supported are {', '.join(FAMILIES)}")
    _check_types(checkpoint, architecture)


def _check_types(checkpoint: Checkpoint, architecture: str) -> None:
    """Where model_type is another model's, its layers may be, too. A config may leave it out."""
    whole, text = MODEL_TYPES[architecture]
    configs = [(checkpoint.config, whole)]
    if "text_config" in checkpoint.config:
        configs.append((checkpoint.text_config, text or whole))
    known = dict.fromkeys(name for pair in MODEL_TYPES.values() for name in pair if name)
    for config, wanted in configs:
        given = config.read("model_type", str, wanted)
        if given == wanted:
            continue
        wrong = "is another architecture's" if given in known else f"is not supported{_nearest(given, known)}"
        reason = f"model_type {shown(given)} {wrong}; {architecture} has {wanted}"
        raise config.refused("conflict", "model_type", reason, "correct it, or use another one")


def _nearest(name: str, known: Iterable[str]) -> str:
    """Behind a name that is not known."""
    close = get_close_matches(name, list(known), 1, 0.5)
    return f", the nearest that is: {close[0]}" if close else ""
