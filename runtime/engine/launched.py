"""A GPU's steps of fixed sizes: what is around the program, in a launch of a kernel for each part.

They compute the same numbers as feed.py and judge.py.
"""

import torch

from hemiola.plugins.gpu.ledger import cuda as kernels
from hemiola.runtime.device.head import Best
from hemiola.runtime.engine.bucket import ANY, Bucket, Fed
from hemiola.runtime.engine.decode import Decoder
from hemiola.runtime.engine.judge import best_of, logprobs_of
from hemiola.runtime.engine.step import Batch, Choices


class LaunchedDecoder(Decoder):
    """On a GPU."""

    def _change(self, changes: torch.Tensor) -> None:
        kernels.change(changes, self._table)

    def _join(self, fed: Fed[torch.Tensor], lines: torch.Tensor, choices: Choices) -> Batch:
        ledger = self.ledger
        found = kernels.fill(fed.rows, fed.slot, fed.row, fed.offset, self._table, ledger.lengths, ledger.ids)
        page_table, token_ids, positions = found
        return Batch(
            rows=fed.rows,
            logits_ids=lines,
            page_table=page_table,
            token_ids=token_ids,
            positions=positions,
            slots=fed.slot,
            final_len=fed.slot[:0],  # nobody asks: a row brings one token that is no draft
            choices=choices,
        )

    def _judge(
        self, bucket: Bucket, batch: Batch, scores: torch.Tensor | Best, answers: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ledger, choices = self.ledger, batch.choices
        best = best_of(batch, scores, ledger)
        kernels.accept(
            batch.rows, batch.slots, choices.num_drafts, best.token_id, best.logit, ledger.lengths,
            ledger.ids, answers, self.width(bucket), self.config.chunk_len,
        )  # fmt: skip
        return logprobs_of(choices, scores, best.token_id).get(0, ())

    def _tell(self, bucket: Bucket, slot: torch.Tensor, answers: torch.Tensor) -> None:
        most = self.config.num_drafts if bucket.rules == ANY else 0
        kernels.tell(slot, self.ledger.lengths, self.ledger.ids, answers, self.width(bucket), most)
