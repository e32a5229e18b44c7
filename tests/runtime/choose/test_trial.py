"""Grammars that the library never finishes, or that end its process."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kit.fake_session import VOCAB
from kit.guided import tokenizer
from kit.served import until

from hemiola.runtime.api import StructuredOutputsParams
from hemiola.runtime.choose import grammar as module
from hemiola.runtime.choose.grammar import Grammars
from hemiola.runtime.choose.trial import Trial, TrialLimits
from hemiola.runtime.errors import Busy, Refused

ENDLESS: dict[str, Any] = {"json": {"type": "integer", "multipleOf": 99999991}}
RULES = [f"r{i}: r{i + 1} r{i + 1}" for i in range(4000)]
REFS = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(4000)}
DEEP = {
    "rules": {"grammar": "\n".join(["start: r0", *RULES, 'r4000: "x"'])},
    "rules that fit in other threads": {"grammar": "\n".join(["start: r0", *RULES[:1000], 'r1000: "x"'])},
    "refs": {"json": {"$defs": {**REFS, "a4000": {"type": "string"}}, "$ref": "#/$defs/a0"}},
}
FINE = StructuredOutputsParams(regex="[a-z]{3}")
SOON = TrialLimits(seconds=0.5, num_bytes=2**40)
SMALL = TrialLimits(seconds=600, num_bytes=2**26)


def line(**asked: object) -> str:
    return StructuredOutputsParams.model_validate(asked).model_dump_json(exclude_defaults=True, by_alias=True)


@pytest.mark.parametrize("limits", [SOON, SMALL], ids=["seconds", "bytes"])
def test_a_grammar_that_compiles_for_ever_begins_in_the_process_that_serves(
    limits: TrialLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, compile_grammar = [], module.compile_grammar

    def compile_(vocabulary: module.Vocabulary, asked: StructuredOutputsParams) -> module.Grammar:
        begun.append(asked)
        return compile_grammar(vocabulary, asked)

    monkeypatch.setattr(module, "compile_grammar", compile_)
    monkeypatch.setattr(module, "TRIAL_LIMITS", limits)
    monkeypatch.setattr(module, "MOST_SECONDS", 300.0)
    made = Grammars(tokenizer(), VOCAB)
    with pytest.raises(Refused, match=r"^structured_outputs: it was not compiled within .* MiB"):
        made.compile(StructuredOutputsParams(**ENDLESS))
    assert made.compile(FINE)
    assert begun == [FINE]


@pytest.mark.parametrize("asked", DEEP.values(), ids=DEEP)
def test_a_grammar_that_overflows_the_stack_ends_the_process(
    asked: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_SECONDS", 300.0)
    made = Grammars(tokenizer(), VOCAB)
    with pytest.raises(Refused, match="or is nested too deeply; simplify it"):
        made.compile(StructuredOutputsParams(**asked))
    assert made.compile(FINE)


def test_a_grammar_is_refused_because_its_trial_was_killed_while_it_had_nothing_to_do() -> None:
    trial = Trial(tokenizer().to_str(), VOCAB, TrialLimits())
    assert trial.passes(line(regex="a"))
    process = trial._process
    assert process is not None
    process.kill()
    until(lambda: process.poll() is not None)
    assert trial.passes(line(regex="b"))


def test_a_grammar_whose_trial_is_killed_meanwhile_is_refused_and_stays_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_SECONDS", 300.0)
    monkeypatch.setattr(module, "NUM_THREADS", 1)
    made = Grammars(tokenizer(), VOCAB)
    assert made.compile(FINE)
    process, asked = made._all_trials[0]._process, StructuredOutputsParams(regex="[0-9]")
    assert process is not None and process.stdin is not None
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)  # until then it may still read a line
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(made.compile, asked)
        until(lambda: fcntl.ioctl(process.stdin, termios.FIONREAD, bytes(4)) != bytes(4))
        process.kill()
        with pytest.raises(Busy, match="try again in 1 s"):
            waiting.result(60)
    assert made.compile(asked)


SLEEPS = """
import time
from hemiola.runtime.choose import trial_process
plain = trial_process.compile_grammar
trial_process.compile_grammar = lambda *given: (time.sleep(1), plain(*given))
trial_process.main()
"""


def test_a_grammar_that_waits_for_a_processor_is_called_too_dear() -> None:
    lines = json.dumps([tokenizer().to_str(), VOCAB, 0.4, 2**40]) + "\n" + line(regex="a") + "\n"
    words = [sys.executable, "-c", SLEEPS]
    ended = subprocess.run(words, input=lines, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (0, "passes\n")


def test_a_wrong_grammar_passes_and_is_named_by_the_process_that_serves() -> None:
    trial = Trial(tokenizer().to_str(), VOCAB, TrialLimits())
    assert trial.passes(line(regex="("))
    assert trial.passes(line(json={"$ref": "#"}))


def test_a_trial_outlives_its_engine() -> None:
    trial = Trial(tokenizer().to_str(), VOCAB, TrialLimits())
    assert trial.passes(line(regex="a"))
    assert trial._process is not None
    process = trial._process
    del trial
    assert process.returncode == -signal.SIGKILL and not Path(f"/proc/{process.pid}").exists()


KILLED = """
import os, sys, threading
from hemiola.runtime.choose.trial import Trial, TrialLimits
trial = Trial(sys.argv[1], int(sys.argv[2]), TrialLimits(1.0, 2**40))
thread = threading.Thread(target=trial.passes, args=['{"regex": "a"}'])
thread.start()
thread.join()
print(trial._process.pid, flush=True)
trial.passes(sys.argv[3]) if len(sys.argv) > 3 else sys.stdin.read()
"""


@pytest.mark.parametrize("then", [[], [line(**ENDLESS)]], ids=["idle", "compiling"])
def test_a_trial_outlives_an_engine_that_was_killed(then: list[str]) -> None:
    words = [sys.executable, "-c", KILLED, tokenizer().to_str(), str(VOCAB), *then]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        pid = int(engine.stdout.readline())
        engine.kill()
    until(lambda: ended(pid))


def ended(pid: int) -> bool:
    """Or it is dead, and its new parent has not asked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_trials_outlive_a_closed_engine_or_begin_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRIAL_LIMITS", SMALL._replace(num_bytes=2**40))
    monkeypatch.setattr(module, "MOST_SECONDS", 300.0)
    made = Grammars(tokenizer(), VOCAB)
    assert made.compile(FINE)
    with ThreadPoolExecutor(3) as threads:
        asked = [StructuredOutputsParams(json=ENDLESS["json"] | {"title": str(i)}) for i in range(3)]
        waiting = [threads.submit(made.compile, one) for one in asked]
        until(lambda: len(made._kept) == 4 and all(trial._process for trial in made._all_trials))
        made.close()
        for one in waiting:
            with pytest.raises(Refused, match="the engine is closed; open it again"):
                one.result(60)
    made.close()
    assert [t._process.returncode for t in made._all_trials if t._process] == [-signal.SIGKILL] * 2
    for again in (FINE, StructuredOutputsParams(regex="new")):
        with pytest.raises(Refused, match="the engine is closed; open it again"):
            made.compile(again)
    assert not made._all_trials[0].passes(line(regex="a"))


def test_each_grammar_that_ends_its_trial_leaves_two_pipes_open() -> None:
    trial = Trial(tokenizer().to_str(), VOCAB, TrialLimits(0.2, 2**40))
    assert trial.passes(line(regex="a"))
    num_open = len(os.listdir("/proc/self/fd"))
    assert not trial.passes(line(**ENDLESS))
    assert trial.passes(line(regex="a"))
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_the_limits_of_a_trial_hold_no_grammar_up_that_is_nested_as_deeply_as_json_may_be() -> None:
    schema: dict = {"type": "string"}
    for _ in range(60):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    trial = Trial(tokenizer().to_str(), VOCAB, TrialLimits())
    assert trial.passes(line(json=schema))
    assert trial.passes(line(regex="(" * 240 + "a" + ")*" * 240))
