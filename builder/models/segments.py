"""What layers are put into: the trunk, and an MTP head that drafts."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from hemiola.builder.checkpoint import Config
from hemiola.builder.models.layers import Embedding, Kit, Linear, Norm, Step, Tensors


class Trunk(nn.Module):
    """Tokens to logits."""

    def __init__(
        self,
        kit: Kit,
        embed: Embedding,
        layers: Sequence[nn.Module],
        norm: Norm,
        head: Linear,
    ) -> None:
        super().__init__()
        self.embed, self.absent, self.group = embed, kit.absent, kit.group
        self.layers, self.norm, self.head = nn.ModuleList(layers), norm, head
        self.tells_best = kit.tells_best

    def forward(self, states: Tensors, batch: Tensors) -> tuple[torch.Tensor, ...]:
        """See outputs."""
        hidden = self.norm(run(self.layers, self.embed(batch["token_ids"]), states, batch))
        lines = hidden.index_select(0, batch["logits_ids"])
        return outputs(self.head, lines, hidden, self.tells_best)


class Mtp(nn.Module):
    """The part of an MTP head that it does not share with the trunk."""

    def __init__(
        self, token_norm: Norm, hidden_norm: Norm, enter: Linear, layers: Sequence[nn.Module], norm: Norm
    ) -> None:
        super().__init__()
        self.token_norm, self.hidden_norm, self.enter = token_norm, hidden_norm, enter
        self.layers, self.norm = nn.ModuleList(layers), norm


class Draft(nn.Module):
    """x_p and h_{p-1} at place p to logits of x_{p+1} (all, or those of the lowest ids), and to the h of the
    next draft."""

    def __init__(self, trunk: Trunk, mtp: Mtp) -> None:
        super().__init__()
        self.embed, self.absent, self.group = trunk.embed, trunk.absent, trunk.group
        self.head: Linear | None = trunk.head
        self.own_head: Linear | None = None  # in the place of `head`
        self.mtp, self.tells_best = mtp, trunk.tells_best

    def choose_by(self, head: Linear) -> None:
        """Draft only tokens that this head has, and by its logits."""
        self.head, self.own_head = None, head

    def forward(self, states: Tensors, batch: Tensors) -> tuple[torch.Tensor, ...]:
        """See outputs; hidden states are those of the lines, [L, F]."""
        mtp = self.mtp
        token = mtp.token_norm(self.embed(batch["token_ids"]))
        x = mtp.enter(torch.cat((token, mtp.hidden_norm(batch["hidden"])), dim=1))
        hidden = mtp.norm(run(mtp.layers, x, states, batch))
        head = self.own_head or self.head
        assert head is not None
        lines = hidden.index_select(0, batch["logits_ids"])
        return outputs(head, lines, lines, self.tells_best)


class Parts(NamedTuple):
    """What a family makes of a checkpoint."""

    config: Config  # of the text model
    layers: tuple[str, ...]  # one word each
    trunk: Trunk
    draft: Draft | None


def outputs(
    head: Linear, lines: torch.Tensor, hidden: torch.Tensor, tells_best: bool
) -> tuple[torch.Tensor, ...]:
    """Logits [L, V], fp32 whatever the head computes in, and hidden states; then the best logit of each line
    [L] fp32 and its token [L] int64, if it tells that."""
    logits = head(lines)
    wide = logits if logits.dtype.itemsize >= 4 else logits.float()
    return (wide, hidden, *head.best(lines)) if tells_best else (wide, hidden)


def run(layers: nn.ModuleList, x: torch.Tensor, states: Tensors, batch: Tensors) -> torch.Tensor:
    step = Step(states, batch["positions"], batch["rows"], batch["page_table"])
    for layer in layers:
        x = layer(x, step)
    return x
