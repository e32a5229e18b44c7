"""Drafters for tests, right, wrong, random or scripted: no output may depend on what they propose."""

import random
from collections.abc import Callable, Sequence

import torch

from hemiola.runtime.request import Request
from hemiola.runtime.scheduler import Plan


class Scripted:
    """Proposes what `script(request, room)` returns, cut to the room there is."""

    def __init__(self, script: Callable[[Request, int], Sequence[int]]) -> None:
        self.script = script

    def propose(self, plan: Plan, room: list[int], hidden: torch.Tensor) -> None:
        for request, most in zip(plan.rows, room, strict=True):
            assert not request.drafts, "drafts of an earlier step"
            if most > 0:
                request.drafts = list(self.script(request, most))[:most]

    def forget(self, request: Request) -> None:
        pass


def always_right(next_token: Callable[[Sequence[int]], int]) -> Scripted:
    """The oracle's own tokens."""

    def script(request: Request, room: int) -> list[int]:
        ids = request.ids[: request.total_len].tolist()
        for _ in range(room):
            ids.append(next_token(ids))
        return ids[request.total_len :]

    return Scripted(script)


def always_wrong(next_token: Callable[[Sequence[int]], int], vocab: int) -> Scripted:
    """Never the oracle's token."""
    right = always_right(next_token)
    return Scripted(lambda request, room: [(t + 1) % vocab for t in right.script(request, room)])


def shuffled(seed: int, next_token: Callable[[Sequence[int]], int], vocab: int) -> Scripted:
    """Windows of random length, right up to a random place and random behind it; a third of them empty."""
    rng = random.Random(seed)
    right = always_right(next_token)

    def script(request: Request, room: int) -> list[int]:
        length = rng.choice([0, rng.randint(1, room), room])
        good = rng.randint(0, length)
        return [*right.script(request, length)[:good], *(rng.randrange(vocab) for _ in range(length - good))]

    return Scripted(script)
