"""Comparisons of tensors whose outcome the host learns all at once: a GPU is waited for once."""

from collections.abc import Callable

import torch

from hemiola.runtime.device.transfer import fence, fetch


class Demands:
    """Asked one by one, then `settle` raises for the first that does not hold."""

    def __init__(self, bits: bool) -> None:
        """bits: else parts round by the number of rows; a state, or a token, of another place is far off."""
        self.bits = bits
        self._asked: list[tuple[torch.Tensor, str]] = []

    def same(self, held: torch.Tensor, wanted: torch.Tensor, where: str) -> None:
        assert held.shape == wanted.shape and held.dtype == wanted.dtype, where
        equal = held == wanted if self.bits else torch.isclose(held, wanted, rtol=1e-4, atol=1e-4)
        self.true(equal.all(), where)

    def true(self, outcome: torch.Tensor, where: str) -> None:
        self._asked.append((outcome, where))

    def settle(self) -> None:
        asked, self._asked = self._asked, []
        if asked:
            device = asked[0][0].device
            outcomes = torch.stack([outcome.to(device) for outcome, _ in asked]).tolist()
            assert all(outcomes), asked[outcomes.index(False)][1]


def here(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """On the host, after one wait. Not to be written."""
    return later(*tensors)()


def later(*tensors: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
    """What they hold now, on the host; who asks behind the step does not wait."""
    fetched, passed = fetch(tensors), fence(tensors[0].device)
    if tensors[0].device.type == "cpu":
        fetched = [tensor.clone() for tensor in fetched]

    def found() -> list[torch.Tensor]:
        passed()
        return fetched

    return found
