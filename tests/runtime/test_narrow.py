"""Engines for a GPU on a CPU, with references in place of kernels: what the runtime does with bf16
states, and that whatever it launches was compiled.

Here bf16 changes no greedy token of these short texts; where it does, another text will do.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import Oracle

from hemiola.plugins.gpu.launch import Instead, Kernel, Values, kind_of, launches
from hemiola.plugins.spec import Op
from hemiola.plugins.step import forms
from hemiola.runtime import llm, manifest
from hemiola.runtime.api import SamplingParams
from hemiola.runtime.device import session
from hemiola.runtime.step import steps

CUDA, REFERENCE = forms("cuda"), forms("reference")
PROMPTS = [list(range(3, 40)), [7, 8, 9] * 5]
NUM_TOKENS = 12


@pytest.fixture(params=["nemotron_h_moe", "qwen3_5"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def engine_dir(family: str, tiny_engine: Callable[..., Path]) -> Path:
    return tiny_engine(family, arch="sm_90")


@pytest.fixture
def look(engine_dir: Path) -> Instead:
    """Looks a launch up among the engine's calls."""
    compiled = {entry.binary.call for entry in manifest.load(engine_dir).kernels[0].binaries}

    def look(kernel: Kernel, grid: tuple[int, ...], values: Values, constants: Mapping[str, Any]) -> None:
        mine = [call for call in compiled if call.kernel == kernel.name]
        assert any(call.fits(values, constants) for call in mine), [kernel, *map(kind_of, values), constants]

    return look


@pytest.fixture
def on_cpu(look: Instead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch is looked up, then computed by the reference."""

    def bind(
        op: Op, form: str, sizes: Sequence[int], layouts: Mapping[str, object] | None = None
    ) -> Callable[..., Any]:
        launcher = partial(op.function(form), **op.named({}))

        def run(*values: Any) -> Any:
            with launches(look):
                launcher(*values)
            return op.reference(*values)

        return run

    program: Any = session.LoadedSegment

    def as_on_a_gpu(*arguments: Any) -> session.LoadedSegment:
        *others, storage, every_line, _ = arguments
        narrow: Any = SimpleNamespace(device=torch.device("cuda"), tensors=storage.tensors)
        return program(*others, narrow, every_line)

    mapped = session.load_weights  # on a GPU every weight has memory of its own

    def load_weights(*arguments: Any) -> dict[str, torch.Tensor]:
        return {name: weight.clone() for name, weight in mapped(*arguments).items()}

    monkeypatch.setattr(session, "load_weights", load_weights)
    monkeypatch.setattr(llm, "find_device", lambda engine_dir, arch, num_ranks: torch.device("cpu"))
    monkeypatch.setattr(Op, "bind", bind)
    monkeypatch.setattr(session, "LoadedSegment", as_on_a_gpu)
    monkeypatch.setattr(steps, "forms", lambda name: REFERENCE)  # a CPU's own are for fp32


@pytest.mark.usefixtures("on_cpu")
def test_greedy_tokens_are_the_oracles(
    family: str, engine_dir: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    oracle = Oracle(tiny_checkpoint(family))
    wanted = [oracle.generate(prompt, NUM_TOKENS).token_ids for prompt in PROMPTS]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    for drafts in ("none", "mtp", "ngram"):
        with llm.LLM(engine_dir, drafts=drafts, num_pages=64) as engine:
            assert engine.config.pipeline_depth == 1
            again = engine.generate(PROMPTS + PROMPTS[:1], params)
        assert [output.token_ids for output in again] == [*wanted, wanted[0]]


@pytest.fixture
def looked_at(look: Instead, on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Ops of steps of fixed sizes: what a GPU would launch is looked up, then the reference does it."""
    done: set[str] = set()

    def both(name: str) -> Callable[..., Any]:
        launched, plain = getattr(CUDA, name), getattr(REFERENCE, name)

        def run(*values: Any) -> Any:
            done.add(name)
            with launches(look):
                launched(*values)
            return plain(*values)

        return run

    monkeypatch.setattr(
        steps, "forms", lambda kind: SimpleNamespace(**{name: both(name) for name in vars(CUDA)})
    )
    resolve = llm.resolve
    monkeypatch.setattr(
        llm, "resolve", lambda *given: resolve(*given).model_copy(update={"cuda_graphs": True})
    )
    return done


@pytest.mark.parametrize("drafts", ["none", "mtp", "ngram"])
def test_whatever_steps_of_fixed_sizes_launch_was_compiled(
    family: str, engine_dir: Path, looked_at: set[str], tiny_checkpoint: Callable[..., Path], drafts: str
) -> None:
    oracle = Oracle(tiny_checkpoint(family))
    wanted = [oracle.generate(prompt, NUM_TOKENS).token_ids for prompt in PROMPTS]
    kinds = {
        "greedy": {"temperature": 0.0},
        "drawn": {"temperature": 0.8, "seed": 3},
        "asked": {"logprobs": 1},
    }
    with llm.LLM(engine_dir, drafts=drafts, num_pages=64, adaptive_drafts=False) as engine:
        for kind, values in kinds.items():
            params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **values)
            outputs = engine.generate(PROMPTS, params)
            assert kind != "greedy" or [output.token_ids for output in outputs] == wanted
    drafting = {"none": set(), "ngram": {"look_up"}, "mtp": {"first_pairs", "keep", "write", "next_pairs"}}
    always = {"mark", "change", "fill", "best", "edit", "draw", "logprobs", "accept", "tell"}
    assert looked_at == always | drafting[drafts]
