"""The dumb generator: one request, one token at a time, references only. No batch, chunk, draft or reuse.

Whatever the runtime does, its greedy tokens must equal these.

    PYTHONPATH=. python tests/oracle.py CHECKPOINT "def "
"""

import sys
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from hemiola.builder import models
from hemiola.builder.checkpoint import Checkpoint
from hemiola.builder.models.layers import declared_states
from hemiola.plugins import references
from hemiola.runtime.outline import Limits


class Generated(NamedTuple):
    token_ids: list[int]
    logits: torch.Tensor  # [len(token_ids), V], what each token was chosen from


class Oracle:
    """A checkpoint, run token by token. Every token is a chunk of its own, so the state is always whole."""

    def __init__(
        self,
        checkpoint: Path,
        dtype: torch.dtype = torch.float32,
        max_len: int = 8192,
        kv_dtype: str = "auto",
    ) -> None:
        """kv_dtype: what pages hold, as for build-engine."""
        self.model = models.load(
            Checkpoint(checkpoint), references, chunk_len=1, max_len=max_len, kv_dtype=kv_dtype
        )
        self.weights = {
            name: lazy.read().to(dtype) for name, lazy in self.model.weights(self.model.trunk).items()
        }
        self.dtype = dtype

    def generate(self, prompt: list[int], max_tokens: int, stop_ids: tuple[int, ...] = ()) -> Generated:
        """Greedy. The stopping token is the last one of the result."""
        states = self._fresh_states(len(prompt) + max_tokens)
        logits = [self._feed(states, token, position) for position, token in enumerate(prompt)][-1:]
        tokens = [int(logits[-1].argmax())]
        while len(tokens) < max_tokens and tokens[-1] not in stop_ids:
            logits.append(self._feed(states, tokens[-1], len(prompt) + len(tokens) - 1))
            tokens.append(int(logits[-1].argmax()))
        return Generated(tokens, torch.stack(logits))

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[T, V]: at position i, what token i + 1 would be chosen from."""
        states = self._fresh_states(len(token_ids))
        return torch.stack([self._feed(states, token, position) for position, token in enumerate(token_ids)])

    def _fresh_states(self, length: int) -> dict[str, torch.Tensor]:
        """One page that holds the whole text, and one slot; both have number 1, 0 is for padding."""
        limits = Limits(
            max_len=length, max_rows=1, max_step_tokens=1, num_drafts=0, page_len=length, chunk_len=1
        )
        states = declared_states(self.model.trunk, limits)
        return {state.name: self._poison((2, *state.shape), state.dtype) for state in states}

    def _poison(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """NaN; for codes the bytes of it."""
        kind = self.dtype if dtype == "float32" else getattr(torch, dtype)
        return torch.full((prod(shape) * kind.itemsize,), 0xFF, dtype=torch.uint8).view(kind).view(shape)

    def _feed(self, states: dict[str, torch.Tensor], token: int, position: int) -> torch.Tensor:
        step = {
            "token_ids": [token],
            "positions": [position],
            "rows": [[0, 1, 0, 1, position, position, 0, 0]],
            "page_table": [[1]],
            "logits_ids": [0],
        }
        batch = {name: torch.tensor(value, dtype=torch.int32) for name, value in step.items()}
        with torch.no_grad():
            logits, _ = torch.func.functional_call(self.model.trunk, self.weights, (states, batch))
        return logits[0]


def main() -> None:
    from tokenizers import Tokenizer

    folder, prompt = Path(sys.argv[1]), sys.argv[2]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    result = Oracle(folder).generate(tokenizer.encode(prompt).ids, max_tokens=40)
    print(prompt + tokenizer.decode(result.token_ids))


if __name__ == "__main__":
    main()
