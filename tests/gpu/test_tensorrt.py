"""Our kernels as TensorRT launches them, and engines of TensorRT and TensorRT-RTX, on a GPU.

Nobody has run these tests yet. Kernels need any GPU; for engines the machines at hand lack one or the other,
and each test says which.
"""

from collections.abc import Callable
from importlib import import_module

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from kit import ahead as kit
from kit.gpu_engines import FAMILIES, MARKS
from kit.harness import Harness
from kit.ops import Subject, rel_error, same_bits, subject

from hemiola.builder import targets
from hemiola.builder.targets.trt.ptx import ahead
from hemiola.plugins.gpu import compile
from hemiola.plugins.gpu.device import gpu_of
from hemiola.runtime.api import SamplingParams
from hemiola.runtime.errors import Refused
from hemiola.runtime.llm import LLM

pytestmark = MARKS
SUBJECTS = [
    subject("attention", 0.2, 0, 1.0, 1.0, H=4, D=64, G=2, Z=160, L=16, W=64),
    subject("attention", 0.2, 1, 1.0, 1.0, H=16, D=256, G=1, Z=160, L=16, W=64),
    subject("conv", E=48, W=4),
    subject("delta", G=2, K=128, H=4, V=128, J=1),
    subject("delta", G=1, K=64, H=1, V=64, J=64),
    subject("mamba2", 0.0, 1.0, H=8, P=64, G=2, D=128),
    subject("moe", "swiglu", E=6, K=2, F=64, J=64, I=32),
    subject("moe", "relu2", E=40, K=3, F=80, J=48, I=48),
    subject("route", "softmax", 4, 1, 1, True, 1.0, E=37, absent="bias"),
    subject("route", "sigmoid", 5, 4, 2, True, 2.5, E=60),
]
TOLERANCE = 0.05  # of the largest logit: bf16 keeps 8 bits, and dense layers sum in another order


@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_ptx_launched_as_tensorrt_would_gives_the_bits_of_the_launcher(subject: Subject) -> None:
    """And the reference's numbers; from memory full of NaN, with exactly the parameters that it passes."""
    driver = pytest.importorskip("cuda.bindings.driver")
    compile.on_demand()
    op, gpu = subject.op, gpu_of(torch.device("cuda", 0))
    launcher = getattr(import_module(f"hemiola.plugins.{op.name}.cuda"), op.name)
    states: list[torch.Tensor] = []
    for step in range(len(kit.STEPS)):
        theirs = kit.arguments(subject, step, [state.clone() for state in states], "cuda")
        wanted = launcher(*theirs)
        exact = [
            value.cpu().float() if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value.cpu() if isinstance(value, torch.Tensor) else value
            for value in kit.arguments(subject, step, [state.clone() for state in states])
        ]  # fmt: skip
        truth = op.reference(*exact)
        mine = kit.arguments(subject, step, states, "cuda")
        told = ahead(op, kit.sized(op, mine), mine[len(op.args) :], gpu)
        launches, results = kit.played(op, told, mine, "cuda")
        for one in launches:
            kit.launch(driver, one, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        wanted, truth = (value if isinstance(value, tuple) else (value,) for value in (wanted, truth))
        for result, same, near in zip(results, wanted, truth, strict=True):
            assert same_bits(result, same), f"step {step}"
            assert rel_error(result.cpu(), near) < 2e-2, f"step {step}"
        ours = kit.states_of(subject, mine)
        for state, same in zip(ours, kit.states_of(subject, theirs), strict=True):
            assert same_bits(state, same), f"step {step}"
        states = [state.cpu() for state in ours]


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
