"""The client among threads, signals and forks."""

import contextlib
import itertools
import linecache
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
from kit.fake_triton import Triton, all_ended, final, response
from kit.served import ENVIRONMENT, until

from hemiola.runtime.errors import Cancelled, Lost
from hemiola.runtime.serving import client as module
from hemiola.runtime.serving import exchange
from hemiola.runtime.serving.client import Client

WHOLE = {"input_ids": [9], "text_output": "é", "output_ids": [5]}
PIECE = response(text_output="a", output_ids=[1])


def test_threads_that_share_a_client_get_each_others_answers(client: Client, triton: Triton) -> None:
    triton.answers = [PIECE, final(text_output="b")]

    def one(number: int) -> str:
        if number % 2:
            return client.generate([[number]])[0].text
        return "".join(piece.text for piece in client.stream([number]))

    class Either(list):
        """A `generate` gets one response."""

        def __iter__(self) -> Any:
            streams = triton.requests[-1].parameters["stream"].bool_param
            return iter([PIECE, final(text_output="b")] if streams else [final(**WHOLE)])

    with ThreadPoolExecutor(8) as pool:
        triton.answers = Either()
        # one at a time of each kind, since the fake answers by its last request
        assert list(pool.map(one, [0] * 64)) == ["ab"] * 64
        assert list(pool.map(one, [1] * 64)) == ["é"] * 64
    all_ended(triton, "read to its end")


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], None]]:
    """What sends Ctrl-C to the main thread, which a background job would ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.main_thread().ident
    assert main is not None
    try:
        yield lambda: signal.pthread_kill(main, signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("method", ["generate", "chat", "stream"])
def test_ctrl_c_is_not_heard_until_the_answer_or_leaves_the_request_running(
    client: Client, triton: Triton, method: str
) -> None:
    prompt: Any = ["a"] if method == "generate" else [{"role": "user", "content": "a"}]
    with interrupts() as interrupt:
        left = threading.Event()

        def wait() -> None:
            until(lambda: triton.requests)
            interrupt()
            while not left.wait(30):  # Python drops one that comes while it clears something away
                interrupt()

        thread = threading.Thread(target=wait)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            if method == "stream":
                list(client.stream(prompt))
            else:
                getattr(client, method)(prompt)
        left.set()
        thread.join()
    all_ended(triton, "read to its end")
    assert triton.cancelled == [triton.requests[0].id]


def clears_away(frame: FrameType | None) -> bool:
    """Whether `__del__` is under way."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def interrupted_at(line: int, call: Callable[[], Any]) -> bool:
    """Whether Ctrl-C came: at this line of the client's that this thread runs, or where a lock is waited for.

    Not at any line of threading: Python interrupts no `with` of a lock between its last line and the release.
    Nor in `__del__`, out of which Python lets no Ctrl-C.
    """
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        name = frame.f_code.co_filename
        waits = name == threading.__file__ and "waiter.acquire(" in linecache.getline(name, frame.f_lineno)
        ours = event == "line" and (waits or name.endswith("/runtime/serving/client.py"))
        if ours and not clears_away(frame):
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.filterwarnings(
    "error:coroutine:RuntimeWarning", "error::pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("method", ["generate", "chat", "stream"])
def test_ctrl_c_while_a_request_is_sent_leaves_it_running(
    client: Client, triton: Triton, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CI of 2026-11-24 met one of these lines: `Thread.start` waits, and what it had begun was lost."""
    monkeypatch.setattr(module, "CANCEL_TIMEOUT_S", 0.3)  # of a thread that was never started
    prompt: Any = ["a"] if method == "generate" else [{"role": "user", "content": "a"}]

    def call() -> None:
        if method == "stream":
            list(client.stream(prompt))
        else:
            getattr(client, method)(prompt)

    triton.answers = [final(**WHOLE)]
    assert not interrupted_at(10**9, call)
    lines = itertools.count(1)
    while interrupted_at(next(lines), call):
        until(lambda: not triton.num_open)
    assert next(lines) > 40  # else the trace has lost the client
    until(lambda: not triton.num_open)


def test_a_closed_client_raises_an_error_of_grpc_s(client: Client, triton: Triton) -> None:
    client.close()
    for call in (lambda: client.generate(["a"]), lambda: client.stream("a")):
        with pytest.raises(Lost, match="the client was closed"):
            call()
    assert not triton.requests


@pytest.mark.parametrize("under_way", ["answering", "waiting to send it again"])
def test_a_thread_that_reads_waits_on_when_another_closes_the_client(
    url: str, triton: Triton, under_way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "RETRY_S", 3600.0)
    triton.dies = under_way != "answering"
    with Client(url) as client, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(client.generate, ["a"])
        until(lambda: triton.ended if triton.dies else triton.requests)
        client.close()
        with pytest.raises((Cancelled, Lost)):
            reading.result(60)
    until(lambda: len(triton.ended) == 1)


FORKS = """
import os, sys
from hemiola import Client, Lost
url, way = sys.argv[1:]
def ask(client):
    assert "".join(piece.text for piece in client.stream("x")) == "ab"
parent = Client(url)
ask(parent)
read = parent.stream("x")
assert "".join(piece.text for piece in read) == "ab"
calls = parent._here.channel._call_state
child = os.fork()
if not child:
    calls.managed_calls = 1  # grpc's thread had not ended: it does a little later than its request
    client = parent if way == "its parent's" else Client(url)
    ask(client)
    read._request._read = read._over = False  # as if it were under way, which grpc forbids at a fork
    try:
        next(read)
    except Lost as error:
        assert "is a fork of it" in str(error)
        print("child", flush=True)
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
ask(parent)
print("parent")
"""


@pytest.mark.parametrize("way", ["its parent's", "its own"])
def test_a_forked_child_hangs_with_a_client(url: str, triton: Triton, way: str) -> None:
    """As multiprocessing makes its workers. grpc takes no fork while a request is in flight."""
    triton.answers = [PIECE, final(text_output="b")]
    command = [sys.executable, "-c", FORKS, url, way]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["child", "parent"], done.stderr
    assert not triton.cancelled


def test_a_client_that_nobody_closed_complains_at_exit(url: str, triton: Triton) -> None:
    triton.answers = [PIECE, final(text_output="b")]
    code = "import sys; from hemiola import Client; c = Client(sys.argv[1]); s = c.stream('x'); next(s)"
    command = [sys.executable, "-c", code, url]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
