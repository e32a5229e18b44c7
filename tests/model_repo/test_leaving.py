"""A caller that goes away gives its row back."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Thread

import numpy as np
import pytest
import requests
import tritonclient.grpc as grpcclient
from kit.served import until
from kit.triton_calls import post

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.serving.client import Client
from hemiola.runtime.serving.launcher import Server

pytestmark = pytest.mark.server

LONG = SamplingParams(max_tokens=1000, ignore_eos=True)
STAYS = SamplingParams(max_tokens=1000, ignore_eos=True, num_drafts=0)  # so it runs longest
LEAVING = 7  # of the 8 rows that the tiny engines have


def leave_client(server: Server) -> Callable[[], None]:
    client = Client(server.grpc_url)
    streams = [client.stream("leave", LONG) for _ in range(LEAVING)]
    for stream in streams:
        next(stream)
    return streams.clear  # as when loops are left


def close_client(server: Server) -> Callable[[], None]:
    client = Client(server.grpc_url)
    streams = [client.stream("leave", LONG) for _ in range(LEAVING)]
    for stream in streams:
        next(stream)
    return client.close


def close_sockets(server: Server) -> Callable[[], None]:
    body = {"text_input": "leave", "max_tokens": LONG.max_tokens, "ignore_eos": True, "stream": True}
    url = f"{server.http_url}/v2/models/hemiola/generate_stream"

    def begin(_: int) -> requests.Response:
        answer = requests.post(url, json=body, stream=True, timeout=60)
        next(answer.iter_content(1))
        return answer

    with ThreadPoolExecutor(LEAVING) as threads:  # one after the other, the stream that stays might end
        answers = list(threads.map(begin, range(LEAVING)))
    return lambda: [answer.close() for answer in answers].clear()


def drop_grpc(server: Server) -> Callable[[], None]:
    """One connection only: tritonserver can lock up when many are dropped under load."""
    theirs = grpcclient.InferenceServerClient(server.grpc_url)
    first: SimpleQueue = SimpleQueue()
    theirs.start_stream(lambda result, error: first.put(result))
    text = grpcclient.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"leave"], object))
    for _ in range(LEAVING):
        theirs.async_stream_infer(
            "hemiola", [text], parameters={"max_tokens": LONG.max_tokens, "ignore_eos": True, "stream": True}
        )
    for _ in range(LEAVING):
        first.get(timeout=60)
    return lambda: theirs.stop_stream(cancel_requests=True)


@pytest.mark.parametrize(
    "leave", [leave_client, close_client, close_sockets, drop_grpc], ids=lambda function: function.__name__
)
def test_rows_of_callers_that_left_are_free(server: Server, leave: Callable) -> None:
    """All rows are taken. A stream that stays is the clock: the next request is served before it ends.

    On a busy machine the clock may run out before all have begun, or before anybody heard that they left.
    """
    until(lambda: run_out(server, leave) < LONG.max_tokens)


def run_out(server: Server, leave: Callable) -> int:
    """What the clock says when the next request is served."""
    num_tokens = 0

    def read() -> None:
        nonlocal num_tokens
        for piece in stays:
            num_tokens += len(piece.token_ids)

    with Client(server.grpc_url) as client:
        stays = client.stream("stays", STAYS)
        clock = Thread(target=read)
        clock.start()
        go = leave(server)
        following = client.stream("next", SamplingParams(max_tokens=2, ignore_eos=True))
        left = num_tokens + 20
        while num_tokens < left and clock.is_alive():
            time.sleep(0.001)
        go()
        assert [piece.finish_reason for piece in following][-1] == "length"
        served = num_tokens
        clock.join()
    assert num_tokens == LONG.max_tokens
    return served


def test_cancel_by_id_over_http_ends_a_generate(server: Server) -> None:
    """The only way out of /generate: its lost connection is never seen."""
    body = {"text_input": "a", "max_tokens": LONG.max_tokens, "ignore_eos": True, "id": "to-be-cancelled"}
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(post, server, body)
        while not answer.done():  # the first may come before the request does
            assert post(server, {"cancel": "to-be-cancelled"}).json()["finish_reason"] == "cancelled"
        assert answer.result().json() == {"error": "[CANCELLED] the request was cancelled"}
