"""transformers' own layers put together as an MTP head (models.md, section 2), since it has none here."""

import copy
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

Tensors = dict[str, torch.Tensor]


@torch.no_grad()
def mtp(
    folder: Path, model: nn.Module, token_ids: list[int], num_drafts: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Position i sees x_{i+1} and h_i: logits [T - 2 + num_drafts, V] and the head's own hidden, [..., F].

    Behind the text come its own best tokens, each with the hidden state that it was chosen from.
    """
    stored = load_file(folder / "model.safetensors")
    tensors = {n.removeprefix("mtp."): t.float() for n, t in stored.items() if n.startswith("mtp.")}
    base = getattr(model.model, "language_model", model.model)
    compose = _nemotron_h if "layers.0.enorm.weight" in tensors else _qwen
    ids = torch.tensor([token_ids])
    hidden = base(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    while True:
        token = base.get_input_embeddings()(ids[:, 1:])
        length = token.shape[1]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        out = compose(base, tensors, token, hidden, mask, torch.arange(length)[None])
        logits = model.lm_head(out)[0]
        if length == len(token_ids) - 2 + num_drafts:
            return logits, out[0]
        ids = torch.cat((ids, logits[-1:].argmax(1, keepdim=True)), dim=1)
        hidden = torch.cat((hidden, out[:, -1:]), dim=1)


def _nemotron_h(base: nn.Module, tensors: Tensors, token, hidden, mask, positions) -> torch.Tensor:
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock, NemotronHRMSNorm

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        module = NemotronHRMSNorm(x.shape[-1], eps=base.config.layer_norm_epsilon)
        module.load_state_dict({"weight": tensors[f"{name}.weight"]})
        return module(x)

    config = copy.deepcopy(base.config)
    config.layers_block_type = kinds = config.mtp_layers_block_type
    x = (
        torch.cat((norm("layers.0.enorm", token), norm("layers.0.hnorm", hidden)), dim=-1)
        @ tensors["layers.0.eh_proj.weight"].T
    )
    for i in range(len(kinds)):
        block = NemotronHBlock(config, i).eval()
        prefix = f"layers.{i}."
        own = {
            n.removeprefix(prefix): t
            for n, t in tensors.items()
            if n.startswith((f"{prefix}mixer.", f"{prefix}norm."))
        }
        block.load_state_dict(_stacked(own, {"up_proj": ["up_proj"], "down_proj": ["down_proj"]}))
        x = block(x, attention_mask=mask if kinds[i] == "full_attention" else None, position_ids=positions)
    return norm(f"layers.{len(kinds) - 1}.final_layernorm", x)


def _qwen(base: nn.Module, tensors: Tensors, token, hidden, mask, positions) -> torch.Tensor:
    index = base.config.layer_types.index("full_attention")
    layer = copy.deepcopy(base.layers[index])  # its class and sizes; every weight is replaced
    norm_class = type(base.norm)

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        module = norm_class(x.shape[-1], eps=base.config.rms_norm_eps)
        module.load_state_dict({"weight": tensors[f"{name}.weight"]})
        return module(x)

    own = {n.removeprefix("layers.0."): t for n, t in tensors.items() if n.startswith("layers.0.")}
    layer.load_state_dict(
        _stacked(own, {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]})
    )
    x = (
        torch.cat((norm("pre_fc_norm_embedding", token), norm("pre_fc_norm_hidden", hidden)), dim=-1)
        @ tensors["fc.weight"].T
    )
    return norm("norm", layer(x, position_embeddings=base.rotary_emb(x, positions), attention_mask=mask))


def _stacked(own: Tensors, parts: dict[str, list[str]]) -> Tensors:
    """One tensor per expert, as on disk, becomes what transformers holds in memory."""
    at = next((name.split("experts.")[0] + "experts." for name in own if ".experts.0." in name), None)
    if at is None:
        return own
    rest = {name: tensor for name, tensor in own.items() if ".experts." not in name}
    num_experts = len({name.removeprefix(at).split(".")[0] for name in own if name.startswith(at)})
    for whole, names in parts.items():
        experts = [torch.cat([own[f"{at}{e}.{name}.weight"] for name in names]) for e in range(num_experts)]
        rest[at + whole] = torch.stack(experts)
    return rest
