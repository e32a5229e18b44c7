"""A step that breaks the GPU: the engine says so and ends, and the next process finds a whole GPU."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from kit.gpu_engines import FAMILIES, MARKS, NO_REHEARSAL

pytestmark = [*MARKS, NO_REHEARSAL]

ROOT = Path(__file__).resolve().parents[2]
# An index beyond its tensor ends the process's use of the GPU; the host learns it where it waits.
BROKEN = """
import sys
import torch
from hemiola.runtime.api import SamplingParams
from hemiola.runtime.errors import Failed
from hemiola.runtime.llm import LLM

params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
with LLM(sys.argv[1]) as llm:
    assert llm.generate([[5, 6, 7]], params)[0].finish_reason == "length"
    loop, launch = llm._loop, llm._loop._launch

    def beyond(plan):
        device = loop.device
        torch.zeros(4, device=device)[torch.full((1,), 9, device=device)]
        return launch(plan)

    loop._launch = beyond
    (output,) = llm.generate([[5, 6, 7]], params)
    assert output.finish_reason == "error", output
    print("ended:", output.error)
    try:
        llm.generate([[5]], params)
    except Failed as error:
        print("refused:", error)
print("closed")
"""


@pytest.mark.parametrize("family", FAMILIES)
def test_an_error_of_the_gpu_ends_requests_with_the_reason_and_a_restart_works(
    engine: Callable, family: str
) -> None:
    folders = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", BROKEN, str(engine(family))],
            env=os.environ | {"PYTHONPATH": folders},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr[:6000]}"  # C++'s frames come last
        ended, refused, closed = done.stdout.splitlines()
        said = re.match("ended: the engine failed: .*CUDA.error", ended, re.IGNORECASE)
        assert said, ended  # by torch or by the driver
        assert refused.startswith("refused: the engine failed") and closed == "closed"
