"""A gRPC server that answers as the Triton model does, with pieces that a test has written."""

import json
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import grpc
from kit import fake_triton
from kit.served import until
from tritonclient.grpc import service_pb2, service_pb2_grpc

from hemiola.runtime.api import Metrics, Piece
from hemiola.runtime.serving.error_text import KINDS, kind_of, text_of
from hemiola.runtime.serving.response import write_prompt_logprobs

pb2: Any = service_pb2


class ScriptedTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Every request is answered by `script`. Errors of ours in it travel as data, others as their text."""

    def __init__(self, workers: int = 64, address: str = "127.0.0.1:0") -> None:
        self.script: Sequence[Piece | Exception] = ()
        self.pause_s = 0.0  # before each piece
        self.gate = threading.Event()  # behind each piece; open unless a test closes it
        self.gate.set()
        self.requests: list[Any] = []
        self.cancelled: list[str] = []  # ids of requests
        self._server = grpc.server(ThreadPoolExecutor(workers))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.url = f"127.0.0.1:{self._server.add_insecure_port(address)}"

    def __enter__(self) -> "ScriptedTriton":
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(grace=None).wait()

    def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802  # gRPC's names
        return pb2.ModelReadyResponse(ready=True)

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802
        request = next(requests)
        self.requests.append(request)
        left = threading.Event()
        threading.Thread(target=self._listen, args=(requests, left), daemon=True).start()
        for piece in self.script:
            if left.wait(self.pause_s) if self.pause_s else left.is_set():
                yield pb2.ModelStreamInferResponse(error_message="[CANCELLED] the request was cancelled")
                return
            yield response(piece)
            self.gate.wait(60)

    def _listen(self, requests: Iterator[Any], left: threading.Event) -> None:
        try:
            for request in requests:
                self.cancelled.append(request.parameters["cancel"].string_param)
                left.set()
        except grpc.RpcError:
            left.set()

    def inputs(self, number: int = -1) -> dict[str, Any]:
        """What a request said: token ids, texts, parameters."""
        request = self.requests[number]
        found: dict[str, Any] = {}
        for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True):
            if tensor.datatype == "BYTES":
                found[tensor.name] = content[4:].decode()
            else:
                found[tensor.name] = list(struct.unpack(f"<{len(content) // 8}q", content))
        for name, value in request.parameters.items():
            found[name] = getattr(value, value.WhichOneof("parameter_choice"))
        return found

    def await_cancelled(self, count: int) -> None:
        until(lambda: len(self.cancelled) >= count)


def response(piece: Piece | Exception) -> Any:
    if isinstance(piece, Exception):
        text = f"[{kind_of(piece)}] {text_of(piece, as_data=True)}" if type(piece) in KINDS else str(piece)
        return pb2.ModelStreamInferResponse(error_message=text)
    texts: dict[str, str | None] = {"text_output": piece.text, "finish_reason": piece.finish_reason}
    if piece.logprobs is not None:
        texts["logprobs"] = json.dumps([logprob._asdict() for logprob in piece.logprobs])
    if piece.prompt_logprobs is not None:
        texts["prompt_logprobs"] = write_prompt_logprobs(piece.prompt_logprobs)
    if piece.metrics is not None:
        texts["metrics"] = json.dumps(asdict(piece.metrics))
    given = {name: text for name, text in texts.items() if text is not None}
    return fake_triton.response(**given, output_ids=piece.token_ids)


def script(*texts: str, reason: str = "stop", **metrics: object) -> list[Piece]:
    """A piece of one token for each text; the last has a finish reason."""
    pieces = [Piece(text, [7]) for text in texts[:-1]]
    told = Metrics(num_prompt_tokens=3, arrival=0.0, num_output_tokens=len(texts), **metrics)
    return [*pieces, Piece(texts[-1], [7], finish_reason=reason, metrics=told)]
