"""Compiled engines on a GPU: nothing compiles when one opens or runs, and its bits are those of Triton's own
launches."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kit.gpu_engines import FAMILIES, MARKS, NO_REHEARSAL
from kit.harness import Harness

from hemiola.runtime import manifest
from hemiola.runtime.errors import Refused
from hemiola.runtime.llm import LLM

pytestmark = [*MARKS, NO_REHEARSAL]

ROOT = Path(__file__).resolve().parents[2]
FAMILY = pytest.mark.parametrize("family", FAMILIES)
ALONE = """
import subprocess, sys, time

def started(*command, **options):
    raise AssertionError(f"a process was started: {command}")

sys.modules["triton"] = None  # absent: torch looks for it
begin = time.perf_counter()
from hemiola.runtime.llm import LLM
from hemiola.runtime.api import SamplingParams
imported = time.perf_counter()
subprocess.Popen.__init__ = started
with LLM(sys.argv[1]) as llm:
    ready = time.perf_counter()
    prompts = [[5 + i] * (7 * i + 1) for i in range(12)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))
    first = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))
    again = time.perf_counter()
assert all(len(output.token_ids) == 30 for output in outputs)
assert sys.modules["triton"] is None
print(f"imports {imported - begin:.1f} s, ready after {ready - imported:.2f} s more,"
      f" first answers {first - ready:.2f} s, second {again - first:.2f} s")
"""


@FAMILY
def test_nothing_compiles_when_an_engine_opens_and_answers(engine: Callable, family: str) -> None:
    """A process without Triton that may start no other."""
    folders = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-c", ALONE, str(engine(family))]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": folders}, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-2000:]


@FAMILY
def test_bits_are_those_of_kernels_that_triton_compiles_and_launches_itself(
    engine: Callable, family: str
) -> None:
    from kit.triton_launcher import launched_by_triton

    harness = Harness(engine(family))
    vocab_size = harness.manifest.vocab_size
    rng = torch.Generator().manual_seed(1)
    texts = [torch.randint(vocab_size, (length,), generator=rng).tolist() for length in (1, 16, 70, 201)]

    def run() -> list[torch.Tensor]:
        harness.forget()
        requests = [harness.request() for _ in texts]
        found = []
        for request, text in zip(requests, texts, strict=True):  # prompts alone, then all together
            found += harness.step([(request, text, 0)])
        for drafts in (0, 3, 1):
            found += harness.step(
                [
                    (request, text[: drafts + 1], drafts)
                    for request, text in zip(requests, texts, strict=True)
                    if len(text) > drafts
                ]
            )
        return [logits.clone() for logits in found]

    ours = run()
    with launched_by_triton():
        theirs = run()
    assert len(ours) == len(theirs) > len(texts)
    for mine, wanted in zip(ours, theirs, strict=True):
        assert not mine.isnan().any() and torch.equal(mine, wanted)


@FAMILY
def test_a_damaged_binary_is_refused_in_one_line(engine: Callable, tmp_path: Path, family: str) -> None:
    """Before the driver sees it, which a damaged one can make end the process."""
    copy = Path(shutil.copytree(engine(family), tmp_path / "engine"))
    file = copy / manifest.load(copy).kernels[0].binaries[0].file
    cubin = file.read_bytes()
    for damaged in (cubin[: len(cubin) // 2], b"\0" * 64 + cubin[64:], b""):
        file.write_bytes(damaged)
        with pytest.raises(Refused, match=r"\.cubin was changed after the build .*; run build-engine again$"):
            LLM(copy)


def test_a_binary_for_another_architecture_is_refused_in_one_line(engine: Callable) -> None:
    from hemiola.plugins.gpu import driver
    from hemiola.plugins.gpu.compile import compile_call

    call = manifest.load(engine(FAMILIES[0])).kernels[0].binaries[0].binary.call
    other = compile_call(call, 80 if torch.cuda.get_device_capability() >= (9, 0) else 90)
    with pytest.raises(driver.DriverError, match=r"^cu\w+: CUDA_ERROR_NO_BINARY_FOR_GPU [^\n]*$"):
        driver.load(other.binary, other.cubin, torch.device("cuda", 0))
