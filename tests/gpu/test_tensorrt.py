"""Engines of TensorRT and TensorRT-RTX on a GPU.

Nobody has run these tests yet: the machines at hand lack one or the other, and each test says which.
"""

from collections.abc import Callable

import pytest
import torch
from kit.gpu_engines import FAMILIES, MARKS
from kit.harness import Harness

from hemiola.builder import targets
from hemiola.runtime.api import SamplingParams
from hemiola.runtime.errors import Refused
from hemiola.runtime.llm import LLM

pytestmark = MARKS
TOLERANCE = 0.05  # of the largest logit: bf16 keeps 8 bits, and dense layers sum in another order


@pytest.fixture(params=["tensorrt", "tensorrt-rtx"])
def target(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param.replace("-", "_"), reason=f"needs {request.param}")
    major, minor = torch.cuda.get_device_capability(0)
    try:
        targets.pick(request.param, f"sm_{major}{minor}")
    except Refused as error:
        pytest.skip(str(error))
    return request.param


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_a_torch_engine_but_for_rounding(
    family: str, target: str, engine: Callable, story: Callable
) -> None:
    """A prompt in pieces, and a token at a time."""
    text = story(family)[:150]
    whole, other = Harness(engine(family)), Harness(engine(family, target=target))
    for cuts in ((), (16, 1, 1, 1, 60)):
        expected = whole.run(text, *cuts)
        assert (other.run(text, *cuts) - expected).abs().max() < TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_it_answers_with_drafts_and_hits(family: str, target: str, engine: Callable, story: Callable) -> None:
    prompts = [story(family)[:length] for length in (5, 70, 130)]
    with LLM(engine(family, target=target)) as llm:
        for _ in range(2):
            outs = llm.generate(prompts, SamplingParams(max_tokens=30, ignore_eos=True))
    assert all(len(out.token_ids) == 30 for out in outs)
    assert outs[-1].metrics.cached_tokens >= 64
