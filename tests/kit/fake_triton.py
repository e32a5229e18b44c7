"""A gRPC server that answers as tritonserver does, and remembers what it was asked."""

import json
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb2
from tritonclient.grpc import service_pb2_grpc

from hemiola.runtime.api import Metrics

METRICS = Metrics(num_prompt_tokens=2, arrival=1.5, num_output_tokens=3)


def response(**outputs: str | list[int]) -> Any:
    message = pb2.ModelStreamInferResponse()
    for name, value in outputs.items():
        if isinstance(value, str):
            kind, content = "BYTES", struct.pack("<I", len(value.encode())) + value.encode()
        else:
            kind, content = "INT32", np.array(value, "<i4").tobytes()
        message.infer_response.outputs.add(name=name, datatype=kind)
        message.infer_response.raw_output_contents.append(content)
    return message


def final(**outputs: str | list[int]) -> Any:
    whole = {
        "text_output": "",
        "output_ids": [],
        "finish_reason": "stop",
        "metrics": json.dumps(asdict(METRICS)),
    }
    return response(**whole | outputs)


@dataclass
class Triton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers every request with `answers`, then waits for our half's end, as Triton does."""

    answers: list[Any] = field(default_factory=list)
    deaf: bool = False  # to cancels too
    dies: bool = False  # after the answers
    dies_of: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    requests: list[Any] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0
    ended: list[str] = field(default_factory=list)  # "read to its end" or "dropped"
    lock: Any = field(default_factory=threading.Lock)

    def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb2.ModelReadyResponse(ready=request.name == "hemiola")

    def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
        index = pb2.RepositoryIndexResponse()
        index.models.add(name="hemiola")
        return index

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802
        whole = False
        with self.lock:
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
        try:
            request = next(requests, None)
            if request is None:  # its client was interrupted before it sent anything
                return
            self.requests.append(request)
            yield from self.answers
            if self.dies:
                context.abort(self.dies_of, "Socket closed")
            for other in requests:
                self.cancelled.append(other.parameters["cancel"].string_param)
                assert self.cancelled[-1] == request.id
                if not self.deaf:
                    done = final(finish_reason="cancelled")
                    done.infer_response.id = other.id
                    yield done
                    yield pb2.ModelStreamInferResponse(error_message="[CANCELLED] the request was cancelled")
            while self.deaf and context.is_active():
                time.sleep(0.01)
            whole = context.is_active()
        finally:
            with self.lock:
                self.num_open -= 1
                self.ended.append("read to its end" if whole else "dropped")


def all_ended(triton: Triton, how: str) -> None:
    deadline = time.monotonic() + 60
    while triton.num_open and time.monotonic() < deadline:
        time.sleep(0.01)
    assert triton.ended == [how] * len(triton.requests)
