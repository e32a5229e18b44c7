"""What is asked of the engine: sessions of turns drawn from a seed, and when they arrive."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hemiola.runtime.bench.options import MULTI_TURN, BenchOptions
from hemiola.runtime.config import rebuilt_for
from hemiola.runtime.errors import Refused

Source = Callable[[np.random.Generator, int], list[int]]  # so many ids for a prompt
ARRIVALS, PROMPTS, SYSTEMS, LENGTHS = range(4)  # streams of a seed: drawing from one changes no other


class Turn(NamedTuple):
    """One request. Its prompt is all that its session has said, answers included, and then these ids."""

    ids: list[int]
    max_tokens: int
    think_time: float  # between the answer before it and its arrival
    origin: str  # for people: where it comes from


Turns = list[Turn]


class Lengths(NamedTuple):
    """Of a turn, without a system prompt."""

    input_len: int
    output_len: int


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


def lengths(options: BenchOptions, count: int, turns: int) -> list[list[Lengths]]:
    """Of so many requests in sessions of `turns` (the last may be shorter): uniform within random_range_ratio
    of what was asked."""
    rng = np.random.default_rng([options.seed, LENGTHS])
    asked, ratio = (options.input_len, options.output_len), options.random_range_ratio
    drawn = [Lengths(*[_length(rng, length, ratio) for length in asked]) for _ in range(count)]
    return [drawn[first : first + turns] for first in range(0, count, turns)]


def random_sessions(options: BenchOptions, count: int, source: Source) -> list[Turns]:
    """One request each."""
    rng = np.random.default_rng([options.seed, PROMPTS])
    return [
        [Turn(source(rng, turn.input_len), turn.output_len, 0.0, f"request {index}")]
        for index, (turn,) in enumerate(lengths(options, count, 1))
    ]


def multi_turn_sessions(options: BenchOptions, count: int, source: Source) -> list[Turns]:
    """A group of sessions shares its system prompt."""
    rng = np.random.default_rng([options.seed, PROMPTS])
    systems = np.random.default_rng([options.seed, SYSTEMS])
    groups = [source(systems, options.system_len) for _ in range(options.num_groups)]
    sessions: list[Turns] = []
    for of_session in lengths(options, count, options.turns):
        session = []
        for turn, (input_len, output_len) in enumerate(of_session):
            ids = source(rng, input_len)
            think_time = float(rng.exponential(options.think_time))
            origin = f"session {len(sessions)} turn {turn}"
            if turn == 0:
                ids, think_time = groups[len(sessions) % options.num_groups] + ids, 0.0
            session.append(Turn(ids, output_len, think_time, origin))
        sessions.append(session)
    return sessions


def refuse_too_long(options: BenchOptions, count: int, max_len: int) -> None:
    """For workloads whose lengths were chosen: one that does not fit is a mistake."""
    turns, shared = (options.turns, options.system_len) if options.workload == MULTI_TURN else (1, 0)
    longest = shared + max(sum(map(sum, session)) for session in lengths(options, count, turns))
    if longest > max_len:
        message = f"the longest session is {longest} tokens, the engine runs with max_len={max_len}"
        way_out = f"lower --input-len, --output-len, --system-len, --turns or {rebuilt_for(longest)}"
        raise Refused("too_long", message=message, way_out=way_out)


def _length(rng: np.random.Generator, length: int, ratio: float) -> int:
    least = max(1, math.floor(length * (1 - ratio)))
    longest = math.ceil(length * (1 + ratio))
    return int(rng.integers(least, longest + 1))
