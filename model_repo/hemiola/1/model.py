"""Hemiola in Triton's Python backend: what tritonserver asks of a model, and no more (serving/service.py)."""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils  # pyright: ignore[reportMissingImports]

from hemiola.runtime.errors import Refused
from hemiola.runtime.llm import LLM
from hemiola.runtime.serving.replies import error_line
from hemiola.runtime.serving.response import ResponseTensor
from hemiola.runtime.serving.service import Service


class TritonPythonModel:
    """One engine. `execute` validates and enqueues, the LLM's thread computes, another one replies."""

    def initialize(self, args: dict[str, str]) -> None:
        close_inherited_sockets()
        try:
            self.service = Service(
                LLM,
                json.loads(args["model_config"]),
                Path(args["model_repository"], args["model_version"]),
                args["model_instance_kind"],
                int(args["model_instance_device_id"]),
                {"model": args["model_name"], "version": args["model_version"]},
                pb_utils.MetricFamily,
                Outlet(),
            )
        except Refused as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: list[Any]) -> None:
        now = time.perf_counter()
        for request in requests:
            try:
                self.service.take(request, now)
            except Exception as error:  # its caller cannot even be told; the others of the batch live on
                Outlet().log(error_line(f"request {request.request_id()!r}", error))

    def finalize(self) -> None:
        self.service.close()


class Outlet:
    """How answers leave: serving/replies.py says which."""

    def send(self, sender: Any, response: list[ResponseTensor], last: bool) -> None:
        made = pb_utils.InferenceResponse([pb_utils.Tensor(*tensor) for tensor in response])
        sender.send(made, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0)

    def fail(self, sender: Any, code: str, message: str) -> None:
        """HTTP answers 400 to every code and gRPC hides it, so the message carries it."""
        kind = "UNAVAILABLE" if code == "OVERLOADED" else code
        text = f"[{code}] {message}".encode(errors="replace").decode()  # no other could be sent
        error = pb_utils.TritonError(text, getattr(pb_utils.TritonError, kind))
        made = pb_utils.InferenceResponse(error=error)
        sender.send(made, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def log(self, text: str) -> None:
        pb_utils.Logger.log_error(text)


def close_inherited_sockets() -> None:
    """An engine that is loaded later is forked with the server's connections, and would keep them open."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if fd > 2 and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                os.close(fd)
