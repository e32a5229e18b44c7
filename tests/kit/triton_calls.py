"""What somebody else's HTTP and gRPC clients would send to the Triton model."""

import json
import re
from collections.abc import Iterator, Mapping
from queue import SimpleQueue

import numpy as np
import requests
import tritonclient.grpc as grpcclient

from hemiola.runtime.api import Piece
from hemiola.runtime.serving.launcher import Server


def post(server: Server, body: Mapping[str, object], *, endpoint: str = "generate") -> requests.Response:
    return requests.post(f"{server.http_url}/v2/models/hemiola/{endpoint}", json=body, timeout=300)


def events(answer: requests.Response) -> Iterator[dict]:
    for line in answer.iter_lines():
        if line:
            assert line.startswith(b"data: "), line
            yield json.loads(line.removeprefix(b"data: "))


def ids(event: dict) -> list[int]:
    """Triton writes a tensor of one element as a number."""
    found = event["output_ids"]
    return found if isinstance(found, list) else [found]


def joined(pieces: list[Piece]) -> tuple[list[int], str]:
    return [t for piece in pieces for t in piece.token_ids], "".join(piece.text for piece in pieces)


def infer_tensors(server: Server, tensors: dict[str, np.ndarray], **options: object) -> list:
    """NVIDIA's client, as somebody else would use it: every setting as a tensor."""
    kinds = {"O": "BYTES", "i8": "INT64", "f4": "FP32", "b1": "BOOL"}
    answers: SimpleQueue = SimpleQueue()
    inputs = []
    for name, values in tensors.items():
        kind = kinds[values.dtype.str[1:] if values.dtype != object else "O"]
        inputs.append(grpcclient.InferInput(name, list(values.shape), kind))
        inputs[-1].set_data_from_numpy(values)
    with grpcclient.InferenceServerClient(server.grpc_url) as theirs:
        theirs.start_stream(lambda result, error: answers.put((result, error)))
        theirs.async_stream_infer("hemiola", inputs, **options)
        theirs.stop_stream()
    return [answers.get() for _ in range(answers.qsize())]


def scrape(server: Server, timeout: float = 60) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The metrics page: name and labels -> value."""
    page = {}
    for line in requests.get(server.metrics_url, timeout=timeout).text.splitlines():
        if not line.startswith("#"):
            name, labels, value = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line).groups()
            page[name, frozenset(re.findall(r'(\w+)="([^"]*)"', labels or ""))] = float(value)
    return page
