"""Engines for a GPU on a CPU, with references in place of kernels: what the runtime does with bf16 states.

Here bf16 changes no greedy token of these short texts; where it does, another text will do.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from oracle import Oracle
from torch.fx import GraphModule

from hemiola.plugins.spec import Op
from hemiola.runtime import llm
from hemiola.runtime.api import SamplingParams
from hemiola.runtime.device import lower, session
from hemiola.runtime.manifest import Segment

PROMPTS = [list(range(3, 40)), [7, 8, 9] * 5]
NUM_TOKENS = 12


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "find_device", lambda engine_dir, arch: torch.device("cpu"))
    monkeypatch.setattr(Op, "bind", lambda op, form, sizes: op.reference)

    def as_it_is(
        program: GraphModule, segment: Segment, bound: list[torch.Tensor], poisoned: bool
    ) -> partial:
        session.bind_forms(program, segment)
        return partial(program, *bound)

    monkeypatch.setattr(lower, "Lowered", as_it_is)


@pytest.mark.parametrize("family", ["nemotron_h_moe", "qwen3_5"])
def test_greedy_tokens_are_the_oracles(
    family: str, on_cpu: None, tiny_checkpoint: Callable[..., Path], tiny_engine: Callable[..., Path]
) -> None:
    oracle = Oracle(tiny_checkpoint(family))
    wanted = [oracle.generate(prompt, NUM_TOKENS).token_ids for prompt in PROMPTS]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    for drafts in ("none", "mtp", "ngram"):
        with llm.LLM(tiny_engine(family, arch="sm_90"), drafts=drafts, num_pages=64) as engine:
            assert engine.config.pipeline_depth == 1
            again = engine.generate(PROMPTS + PROMPTS[:1], params)
        assert [output.token_ids for output in again] == [*wanted, wanted[0]]
