"""What an error keeps of those who were told it."""

import gc
import weakref
from collections.abc import Callable

from hemiola.runtime.errors import Failed, Refused


class Prompt:
    """Something that a caller has."""


def kept_by(call: Callable[[], object], num_calls: int = 3) -> int:
    """Of so many callers, each of whom is refused, how many still have something in memory afterwards."""
    prompts: list[weakref.ref[Prompt]] = []

    def ask() -> None:
        own = Prompt()
        prompts.append(weakref.ref(own))
        try:
            call()
        except (Refused, Failed):
            return
        raise AssertionError("nothing was refused")

    for _ in range(num_calls):
        ask()
    gc.collect()
    return sum(prompt() is not None for prompt in prompts)
