# needs: tritonclient[http,grpc]
"""NVIDIA's client: readiness and metadata over HTTP, a stream over gRPC."""

import os
import queue

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

over_http = triton_http.InferenceServerClient(os.environ["TRITON_HTTP"])
assert over_http.is_server_ready() and over_http.is_model_ready("hemiola")
names = {one["name"] for one in over_http.get_model_metadata("hemiola")["inputs"]}
assert {"text_input", "max_tokens", "stream"} <= names

said: queue.Queue = queue.Queue()
client = triton_grpc.InferenceServerClient(os.environ["TRITON_GRPC"])
client.start_stream(lambda result, error: said.put((result, error)))
inputs = []
for name, kind, value in (
    ("text_input", "BYTES", np.array([b"def "], object)),
    ("max_tokens", "INT64", np.array([16], np.int64)),
    ("stream", "BOOL", np.array([True])),
):
    inputs.append(triton_grpc.InferInput(name, [1], kind))
    inputs[-1].set_data_from_numpy(value)
client.async_stream_infer("hemiola", inputs, enable_empty_final_response=True)
text = ""
while True:
    result, error = said.get(timeout=300)
    assert error is None, error
    piece = result.as_numpy("text_output")
    text += "" if piece is None or not piece.size else piece[0].decode()
    if result.get_response().parameters["triton_final_response"].bool_param:
        break
client.stop_stream()
assert text
print(repr(text[:50]))
