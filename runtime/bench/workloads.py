"""What is asked of the engine: sessions of turns drawn from a seed, and when they arrive."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hemiola.runtime.bench.options import BenchOptions
from hemiola.runtime.errors import Refused

Source = Callable[[np.random.Generator, int], list[int]]  # so many ids for a prompt
ARRIVALS, PROMPTS, SYSTEMS = range(3)  # streams of a seed: drawing from one changes no other


class Turn(NamedTuple):
    """One request. Its prompt is all that its session has said, answers included, and then these ids."""

    ids: list[int]
    max_tokens: int
    think_time: float  # between the answer before it and its arrival
    origin: str  # for people: where it comes from


Turns = list[Turn]


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start; the last is at count / rate.

    Gaps are gamma-distributed with shape `burstiness`: 1 is a Poisson process, less is bursts, inf is even.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.ones(count)
    if math.isfinite(burstiness):
        gaps = np.random.default_rng([seed, ARRIVALS]).gamma(burstiness, size=count)
    times = np.cumsum(gaps + 1e-300)  # tiny shapes round every gap to 0
    return (times * (count / rate / times[-1])).tolist()


def random_ids(vocab_size: int) -> Source:
    """Any ids. No draft can guess what follows them."""
    return lambda rng, count: rng.integers(vocab_size, size=count).tolist()


def slices(ids: Sequence[int]) -> Source:
    """Pieces of a text, which goes round when it ends."""
    text = np.asarray(ids, np.int64)
    return lambda rng, count: text[(rng.integers(len(text)) + np.arange(count)) % len(text)].tolist()


def random_sessions(options: BenchOptions, count: int, source: Source) -> list[Turns]:
    """One request each; lengths are uniform within random_range_ratio of what was asked."""
    rng = np.random.default_rng([options.seed, PROMPTS])
    sessions = []
    for index in range(count):
        ids = source(rng, _length(rng, options.input_len, options.random_range_ratio))
        max_tokens = _length(rng, options.output_len, options.random_range_ratio)
        sessions.append([Turn(ids, max_tokens, 0.0, f"request {index}")])
    return sessions


def multi_turn_sessions(options: BenchOptions, count: int, source: Source) -> list[Turns]:
    """So many requests in sessions of `turns` (the last may be shorter). A group shares its system prompt."""
    rng = np.random.default_rng([options.seed, PROMPTS])
    systems = np.random.default_rng([options.seed, SYSTEMS])
    groups = [source(systems, options.system_len) for _ in range(options.num_groups)]
    sessions: list[Turns] = []
    for first in range(0, count, options.turns):
        session = []
        for turn in range(min(options.turns, count - first)):
            ids = source(rng, _length(rng, options.input_len, options.random_range_ratio))
            max_tokens = _length(rng, options.output_len, options.random_range_ratio)
            think_time = float(rng.exponential(options.think_time))
            origin = f"session {len(sessions)} turn {turn}"
            if turn == 0:
                ids, think_time = groups[len(sessions) % options.num_groups] + ids, 0.0
            session.append(Turn(ids, max_tokens, think_time, origin))
        sessions.append(session)
    return sessions


def refuse_too_long(sessions: Sequence[Turns], max_len: int) -> None:
    """For workloads whose lengths were chosen: one that does not fit is a mistake."""
    longest = max(sum(len(turn.ids) + turn.max_tokens for turn in session) for session in sessions)
    if longest > max_len:
        raise Refused(
            f"the longest session is {longest} tokens, the engine runs with max_len={max_len};"
            f" lower --input-len, --output-len, --system-len, --turns or rebuild with --max-len {longest}"
        )


def _length(rng: np.random.Generator, length: int, ratio: float) -> int:
    least = max(1, math.floor(length * (1 - ratio)))
    most = math.ceil(length * (1 + ratio))
    return int(rng.integers(least, most + 1))
