"""Logits of one position -> a token.

Everything random is a function of (seed, position): no generator has a state, so a token does not depend on
the batch, on chunking or on a preemption. Arithmetic: argmax on the logits as they are (the lowest id wins an
exact tie); distributions and logprobs in fp64.
"""

from typing import NamedTuple

import numpy as np

from hemiola.runtime.request import Logprob, SamplingParams


class Draw(NamedTuple):
    """What decides a row's tokens besides the logits; position is that of the first of them."""

    params: SamplingParams
    seed: int
    position: int
    drafts: tuple[int, ...] = ()


def distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The probabilities [V] fp64 that a token is drawn from: temperature, then min_p, top_k and top_p.

    A filter sees the distribution that the filters before it left; of equals the lowest id is kept first.
    """
    wide = logits.astype(np.float64)
    probs = np.exp((wide - wide.max()) / params.temperature)  # the best is 1 until the end
    if params.min_p > 0:
        probs[probs < params.min_p] = 0.0
    if 0 < params.top_k < len(probs):
        _keep(probs, np.argsort(-probs, kind="stable")[: params.top_k])
    if params.top_p < 1:
        order = np.argsort(-probs, kind="stable")
        before = np.cumsum(probs[order]) - probs[order]  # mass ahead of a token: it stays while < top_p
        _keep(probs, order[before < params.top_p * probs.sum()])
    return probs / probs.sum()


def _keep(probs: np.ndarray, ids: np.ndarray) -> None:
    kept = probs[ids]
    probs[:] = 0.0
    probs[ids] = kept


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of a position: 53 bits of Philox4x64 with key seed and counter position."""
    return (np.random.Philox(key=seed, counter=position).random_raw() >> 11) * 2.0**-53


def choose(logits: np.ndarray, draw: Draw) -> int:
    """The token of a position: the best one, or a draw. Trunk and drafter choose with the same noise."""
    return int(logits.argmax()) if draw.params.temperature == 0 else sample(logits, draw)


def sample(logits: np.ndarray, draw: Draw) -> int:
    """A token by inverse distribution function, in the order of ids. logits [V] hold no NaN."""
    cumulative = np.cumsum(distribution(logits, draw.params))
    target = uniform(draw.seed, draw.position) * cumulative[-1]  # < the sum, even when rounded
    return int(np.searchsorted(cumulative, target, side="right"))


def logprob(logits: np.ndarray, token_id: int, num_top: int) -> Logprob:
    """Raw log-softmax of the chosen token and of the best num_top ones."""
    wide = logits.astype(np.float64)
    best = wide.max()
    logprobs = wide - (best + np.log(np.exp(wide - best).sum()))
    top = np.argsort(-logprobs, kind="stable")[:num_top]
    return Logprob(token_id, float(logprobs[token_id]), tuple((int(i), float(logprobs[i])) for i in top))
