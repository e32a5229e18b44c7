"""Engines beside each other: in threads of one process, and in a process that was forked."""

import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.llm import LLM

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
