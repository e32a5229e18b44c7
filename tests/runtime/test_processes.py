"""Engines beside each other: in threads of one process, and in a process that was forked."""

import multiprocessing
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.llm import LLM
from hemiola.runtime.processes import environment

PROMPTS = [[5, 6, 7, 80, 9], list(range(3, 90))]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(autouse=True)
def all_kernels_are_shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """By two threads; tiny models' are not worth it."""
    monkeypatch.setattr("hemiola.plugins.cpu.steps.WORTH_A_TEAM", -1)
    monkeypatch.setattr("hemiola.plugins.cpu.kernel.WORTH_A_THREAD", -1)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def tokens(engine_dir: Path) -> list[list[int]]:
    with LLM(engine_dir, max_rows=2) as llm:
        return [list(out.token_ids) for out in llm.generate(PROMPTS, PARAMS)]


def test_two_engines_in_two_threads_do_not_disturb_each_other(tiny_engine: Callable[..., Path]) -> None:
    folders = [tiny_engine("qwen3_next"), tiny_engine("nemotron_h_moe")]
    alone = [tokens(folder) for folder in folders]
    together: dict[int, list[list[int]]] = {}
    threads = [
        threading.Thread(target=lambda n=n, folder=folder: together.update({n: tokens(folder)}))
        for n, folder in enumerate(folders * 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[n] for n in range(4)] == alone * 2


def _answer(engine_dir: Path, queue: multiprocessing.Queue) -> None:
    queue.put(tokens(engine_dir))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_opens_an_engine_of_its_own(tiny_engine: Callable[..., Path]) -> None:
    """After this process has run kernels, on as many threads as it may."""
    folder = tiny_engine("qwen3_next")
    expected = tokens(folder)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_answer, args=(folder, queue))
    child.start()
    assert queue.get(timeout=120) == expected
    child.join()


def test_an_empty_path_of_the_environment_is_the_folder_that_a_process_stands_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", ":/elsewhere:")
    assert environment()["PYTHONPATH"] == f"{ROOT}:/elsewhere"


# What may also be called in a fork: it asks for the process itself, or touches nothing that both have.
ANYWHERE = {
    "plugins/cpu/team.py", "runtime/serving/client.py", "plugins/gpu/driver.py", "builder/targets/work.py"
}  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]


def test_an_end_of_a_process_or_an_object_is_one_in_a_fork_too() -> None:
    """Its atexit and its garbage end what is its parent's."""
    found = set()
    for room in ("plugins", "runtime", "builder", "model_repo"):
        for path in (ROOT / room).rglob("*.py"):
            text = path.read_text()
            ends = re.findall(r"(?:atexit\.register\(|weakref\.finalize\([^,]+, )(?!only_here\()", text)
            found |= {str(path.relative_to(ROOT))} if ends else set()
    assert found == ANYWHERE


FORKED = """
import os, signal, sys
from hemiola import LLM, SamplingParams
from hemiola.runtime.api import StructuredOutputsParams
from hemiola.runtime.errors import Refused

def digits(length):
    asked = StructuredOutputsParams(regex="[0-9]{%d}" % length)
    return SamplingParams(max_tokens=length, structured_outputs=asked)

def in_the_child(llm, stream):
    signal.alarm(60)
    for ask in (lambda: llm.generate("a"), lambda: llm.generate("a", digits(3)), lambda: next(stream),
                lambda: llm.export_prefix("a"), llm.__enter__):
        try:
            ask()
            os._exit(3)
        except Refused as refused:
            assert "this is a fork of it; open it again in this process" in str(refused), refused
    if sys.argv[2] == "close":
        llm.close()
    sys.exit()

with LLM(sys.argv[1], max_rows=2, host_cache_bytes=2**22) as llm:
    expected = llm.generate("a", digits(2))[0].text
    trials = [trial for trial in llm._grammars._all_trials if trial._process]
    stream = llm.stream("a", SamplingParams(max_tokens=40, ignore_eos=True))
    child = os.fork()
    if not child:
        in_the_child(llm, stream)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all(trial._process.poll() is None for trial in trials)
    assert llm.generate("a", digits(3))[0].text.isdigit() and llm.generate("a", digits(2))[0].text == expected
    assert len(list(stream)) > 0
"""


@pytest.mark.parametrize(("way", "tp"), [("leave", 1), ("close", 1), ("leave", 2)])
def test_a_forked_child_hangs_with_its_parents_engine_or_ends_what_that_needs(
    tiny_engine: Callable[..., Path], way: str, tp: int
) -> None:
    """Its grammars' processes, its threads and its other ranks; a request to the copy waited for ever."""
    folder = tiny_engine("qwen3_5_divisible", tp=tp)
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED, folder, way], check=True, timeout=300)


def test_an_open_engine_has_compiled_the_kernels_it_runs(tiny_engine: Callable[..., Path]) -> None:
    """In a process that has run none before: else the first request waits for the compiler."""
    code = """
import sys
from hemiola.plugins.cpu import jit
seen = []
jit.prepare = lambda report: seen.extend(kernel.name for kernel in jit.KERNELS)
from hemiola import LLM
LLM(sys.argv[1]).close()
assert {"multiply", "_attend", "_scan", "_route", "_group"} <= set(seen), seen
"""
    folder = tiny_engine("nemotron_h_moe")
    subprocess.run([sys.executable, "-c", code, folder], check=True, timeout=300)
