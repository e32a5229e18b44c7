"""Parts under onnxruntime on a CPU: the double of a GPU's engines."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from hemiola.runtime.errors import Refused, one_line


def opener(compiler: str) -> Callable[[Path], "OnnxPart"]:
    """A function that opens a part; onnxruntime takes all sizes, and graphs of any version."""
    try:
        import onnxruntime
    except ImportError as error:
        message = f"this engine's dense parts need {compiler} ({error})"
        raise Refused("not_found", message=message, way_out="pip install onnxruntime") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    return lambda path: OnnxPart(onnxruntime, path, options)


class OnnxPart:
    """One graph."""

    def __init__(self, onnxruntime, path: Path, options: object) -> None:
        try:
            providers = ["CPUExecutionProvider"]
            self._session = onnxruntime.InferenceSession(str(path), options, providers=providers)
        except Exception as error:  # onnxruntime's errors share no base class
            message = f"{path} cannot be loaded ({one_line(error)})"
            raise Refused("damaged", message=message, way_out="run build-engine again") from None
        self._names = [value.name for value in self._session.get_inputs()]

    @property
    def num_inputs(self) -> int:
        return len(self._names)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        arrays = {name: tensor.numpy() for name, tensor in zip(self._names, inputs, strict=True)}
        return [torch.from_numpy(array) for array in self._session.run(None, arrays)]
