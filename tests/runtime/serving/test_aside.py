"""The process that reads large bodies. `eval` stands for a reader: it takes a body, and comes from there."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest
from kit.served import ENVIRONMENT, until

from hemiola.runtime.errors import Lost, Refused
from hemiola.runtime.serving.aside import Aside
from hemiola.runtime.serving.guard import check_content
from hemiola.runtime.serving.http_request import Refusal
from hemiola.runtime.serving.json_size import MUCH, is_dear
from hemiola.runtime.serving.openai.errors import ApiError
from hemiola.runtime.serving.openai.work import prepare

PID = b"__import__('os').getpid()"
HOLDS = """
from hemiola.runtime.serving.aside import Aside
aside = Aside()
print(aside.run(eval, b"__import__('os').getpid()"), flush=True)
aside.run(eval, b"__import__('time').sleep(1000)")
"""


@pytest.fixture(scope="module")
def aside() -> Iterator[Aside]:
    made = Aside({"a place": HTTPStatus, "a reader": prepare})  # as the front's process: with its readers
    yield made
    made.close()


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").exists()


def test_a_large_body_is_read_by_this_process(aside: Aside) -> None:
    assert aside.run(eval, PID) not in (os.getpid(), None)
    assert aside.run(eval, b"len(given)", {"given": b"x" * 2**22}) == 2**22, "more than a pipe holds"
    assert aside.run(eval, b"'x' * 2**22" + b" " * 2**22) == "x" * 2**22
    assert aside.run(eval, b"print('a line') or 5") == 5, "a line stands within an answer"
    assert aside.run(eval, b"given", {"given": HTTPStatus}) is HTTPStatus


@pytest.mark.parametrize(
    "error",
    [
        Refused("out_of_range", "prompt", 5, "the limit is 4", "send less"),
        Refusal(HTTPStatus.TOO_MANY_REQUESTS, "too many"),
        ApiError(429, "later", param="n", code="overloaded", retry_after_s=7),
    ],
)
def test_an_error_arrives_as_another(aside: Aside, error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        aside.run(eval, b"(_ for _ in ()).throw(error)", {"error": error})
    assert (str(caught.value), vars(caught.value)) == (str(error), vars(error))
    with pytest.raises(Refusal, match=r"^\[INVALID_ARG\] the body is no JSON"):
        aside.run(check_content, b"{", b"POST /v2/models/m/generate HTTP/1.1")
    assert not aside.run(eval, b"'torch' in __import__('sys').modules"), "it takes 200 MB and a second"
    with pytest.raises(RuntimeError, match="Local: what no pickle holds"):
        aside.run(eval, b"(_ for _ in ()).throw(type('Local', (Exception,), {})('what no pickle holds'))")


def test_a_result_that_no_pickle_holds_ends_the_process(aside: Aside) -> None:
    pid = aside.run(eval, PID)
    with pytest.raises(RuntimeError, match="pickle"):
        aside.run(eval, b"lambda: 5")
    assert aside.run(eval, PID) == pid


def test_a_body_that_ends_the_process_ends_all_others(aside: Aside) -> None:
    with pytest.raises(Lost, match="has ended; send the request again"):
        aside.run(eval, b"__import__('os')._exit(1)")
    pid = aside.run(eval, PID)
    os.kill(pid, signal.SIGKILL)
    until(lambda: aside._process is not None and aside._process.poll() is not None)
    assert aside.run(eval, PID) != pid


def test_its_parent_leaves_it_behind_with_a_body() -> None:
    command = [sys.executable, "-c", HOLDS]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    until(lambda: not is_there(pid))


def test_closing_waits_for_a_body() -> None:
    aside, errors = Aside(), []
    pid = aside.run(eval, PID)

    def read() -> None:
        try:
            aside.run(eval, b"__import__('time').sleep(1000)")
        except Lost as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    aside.close()
    thread.join(60)
    assert errors and not is_there(pid)
    with pytest.raises(Lost):
        aside.run(eval, PID)


def test_what_it_knows_is_pickled_while_somebody_waits() -> None:
    """A tokenizer of 250,000 tokens, with Python's lock held."""
    pickled: list[bool] = []

    class Tokenizer:
        def __reduce__(self) -> tuple[type[int], tuple[int]]:
            pickled.append(True)
            return int, (5,)

    tokenizer = Tokenizer()
    aside = Aside({"a tokenizer": tokenizer})
    assert pickled == [True]
    assert aside.run(eval, b"given", {"given": tokenizer}) is tokenizer and pickled == [True]
    aside.close()


def test_what_is_dear_is_read_here() -> None:
    most_bytes, most_values, most_names = MUCH
    assert not is_dear(b"") and not is_dear(b'"' + b"x" * (most_bytes - 2) + b'"')
    assert is_dear(b'"' + b"x" * (most_bytes - 1) + b'"')
    assert not is_dear(b"[" + b"5," * (most_values - 1) + b"5]")
    assert is_dear(b"[" + b"5," * most_values + b"5]")
    for bracket in (b"{", b"[", b":"):
        assert not is_dear(b"x" + bracket * most_names) and is_dear(b"x" + bracket * (most_names + 1))
