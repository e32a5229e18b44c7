"""Lines for operators: they cost nobody else anything."""

import logging
import os
import time
from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import pytest

from hemiola.runtime.serving import log as logs
from hemiola.runtime.serving.log import Handler, Log, Printer, say


def test_a_full_disk_costs_the_lines_and_nobody_waits(capfd: pytest.CaptureFixture[str]) -> None:
    say("before")
    kept = os.dup(1)
    with open("/dev/full", "w") as full:
        os.dup2(full.fileno(), 1)
        say("lost")
        printer = Printer(full.fileno())
        printer.say("lost")
        printer.flush()
        os.dup2(kept, full.fileno())  # there is room again
        os.dup2(kept, 1)
        os.close(kept)
        printer.say("after\n")
        printer.flush()
    assert capfd.readouterr().out == "before\n1 line of this log is lost\nafter\n"


def test_a_reader_that_stalls_costs_what_is_too_much_and_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logs, "MOST_LINES", 5)
    monkeypatch.setattr(logs, "FLUSH_S", 0.01)
    read, write = os.pipe()
    printer = Printer(write)
    for i in range(200):
        printer.say(f"{i:04}" + 100_000 * "x" + "\n")
    printer.flush()
    written = lost = 0
    with os.fdopen(read) as reader:
        while written + lost < 200:
            words = reader.readline().split()
            written += len(words) == 1
            lost += int(words[0]) if words[2:4] == ["of", "this"] else 0
    assert written + lost == 200 and lost > 100


def test_pythons_own_log_goes_the_same_way(capfd: pytest.CaptureFixture[str]) -> None:
    printer, log = Printer(), logging.Logger("x")
    log.addHandler(Handler(printer))
    log.warning("a %s", 1)
    printer.flush()
    assert capfd.readouterr().err == "a 1\n"


def log_of(lines: Iterable[str]) -> Log:
    log = Log(SimpleNamespace(stdout=[line + "\n" for line in lines]), Printer(), verbose=False)
    log.thread.join()
    return log


def test_the_reason_is_what_the_model_said() -> None:
    noise = 'E1121 02:03:22.692375 6899 server.cc:241] "CudaDriverHelper has not been initialized."'
    said = (
        "E1121 02:03:23.041137 6899 model_lifecycle.cc:642] \"failed to load 'b' version 1: Internal: "
        'TritonModelException: max_rows is 9; rebuild\\n\\nAt:\\n  /tmp/model.py(45): initialize\\n"'
    )
    other = (
        "E1121 02:03:23.04 6899 x.cc:1] \"failed to load 'b' version 1: Internal: ImportError: no y\\n\\nAt\""
    )
    assert log_of([noise, said, "error: creating server: failed"]).reason() == "b: max_rows is 9; rebuild"
    assert log_of([other]).reason() == "b: Internal: ImportError: no y"
    assert log_of(["E1121 02:03:22.69 6899 x.cc:1] the first"]).reason() == "the first"
    assert log_of(["one", "two"]).reason() == "two"
    assert log_of([]).reason() == "it said nothing"


def test_the_reason_is_the_last_request_of_a_caller() -> None:
    """With --log-requests; it was told as why tritonserver had ended."""
    line = (
        "request {}: success, 3 tokens in; 16 out (length), 0 cached, queued 0.1 s, first 0.1 s; total 0.2 s"
    )
    said = log_of(["free(): invalid pointer", line.format("'a1'"), line.format('"it\'s"')])
    assert said.reason(10) == "free(): invalid pointer"
    assert log_of([line.format("''")]).reason(10) == "it said nothing"


def test_the_reason_is_not_that_there_is_no_gpu() -> None:
    noise = 'E1123 05:43:06.509094 1412 server.cc:241] "CudaDriverHelper has not been initialized."'
    loads = 'I1123 05:43:06.510318 1412 model_lifecycle.cc:472] "loading: hemiola:1"'
    taken = "E1123 05:43:06.53 1412 main.cc:257] the port is taken"
    assert log_of(["W1123 x", noise, loads]).reason() == '"loading: hemiola:1"'
    assert log_of([loads, taken, noise, loads]).reason() == "the port is taken"
    assert log_of([noise]).reason() == "it said nothing"


def test_the_reason_of_one_that_ended_is_nothing_that_it_said_before() -> None:
    def late() -> Iterator[str]:
        yield 'E1121 02:03:22.692375 6899 server.cc:241] "CudaDriverHelper has not been initialized."\n'
        time.sleep(0.2)
        yield "E1121 02:03:23.692375 6899 main.cc:257] the port is taken\n"

    assert Log(SimpleNamespace(stdout=late()), Printer(), verbose=False).reason(60) == "the port is taken"


def test_only_errors_are_shown_and_only_once_it_is_ready(capfd: pytest.CaptureFixture[str]) -> None:
    log_of(["E1121 02:03:22.692375 1 a.cc:1] early"])
    harmless = "[[1;33mWARN[0;39m] evhtp.c:4050 NODELAY NOT SUPPORTED :: (errno: Operation not supported)\n"
    quiet = ["W1121 x\n", "I1121 x\n", "Signal (15) received.\n", harmless]
    process = SimpleNamespace(stdout=[*quiet, "E1121 late\n", "Traceback\n"])
    printer = Printer()
    Log(process, printer, verbose=False, ready=True).thread.join()
    printer.flush()
    assert capfd.readouterr().err == "E1121 late\nTraceback\n"
