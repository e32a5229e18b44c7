"""A TensorRT without a GPU: engines are ONNX parts under onnxruntime, addresses are of the host's memory."""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime

from hemiola.runtime.manifest_parts import Profile

NAMES = {"tensor(float)": ("FLOAT", np.float32), "tensor(int32)": ("INT32", np.int32)}


class Engine:
    """What the runtime asks of an engine; `profiles` are those of the manifest."""

    def __init__(self, model: bytes, profiles: tuple[Profile, ...]) -> None:
        self.session = onnxruntime.InferenceSession(model)
        self.profiles = profiles
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        self.values = self.inputs | {value.name: value for value in self.session.get_outputs()}
        self.num_io_tensors, self.num_optimization_profiles = len(self.values), len(profiles)
        self.calls: list[int] = []  # the profile of every execution

    def get_tensor_name(self, index: int) -> str:
        return list(self.values)[index]

    def get_tensor_mode(self, name: str) -> str:
        return "INPUT" if name in self.inputs else "OUTPUT"

    def get_tensor_dtype(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=NAMES[self.values[name].type][0])

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(size if isinstance(size, int) else -1 for size in self.values[name].shape)

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        sizes = self.profiles[profile].sizes
        shape = [sizes[size] if isinstance(size, str) else (size,) * 3 for size in self.values[name].shape]
        return list(zip(*shape, strict=True))

    def create_runtime_config(self) -> SimpleNamespace:
        return SimpleNamespace()

    def create_execution_context(self, config: SimpleNamespace) -> "Context":
        assert config.dynamic_shapes_kernel_specialization_strategy == "none"
        return Context(self)


class Context:
    """Runs on what lies at the addresses that it was given."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.profile = engine, -1
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, profile: int, stream: int) -> None:
        self.profile = profile

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> None:
        least, _, most = self.engine.get_tensor_profile_shape(name, self.profile)
        assert all(a <= b <= c for a, b, c in zip(least, shape, most, strict=True)), f"{name} is {shape}"
        self.shapes[name] = shape

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        """By the names of the sizes that inputs have."""
        sizes = {
            size: own
            for key, shape in self.shapes.items()
            for size, own in zip(self.engine.values[key].shape, shape, strict=True)
        }
        return tuple(sizes.get(size, size) for size in self.engine.values[name].shape)

    def set_tensor_address(self, name: str, address: int) -> None:
        assert address, f"{name} has no address"
        self.addresses[name] = address

    def _array(self, name: str) -> np.ndarray:
        dtype = NAMES[self.engine.values[name].type][1]
        shape = self.get_tensor_shape(name)
        size = int(np.prod(shape)) * dtype().itemsize
        memory = (ctypes.c_char * size).from_address(self.addresses[name])
        return np.frombuffer(memory, dtype).reshape(shape)

    def execute_async_v3(self, stream: int) -> bool:
        assert self.addresses.keys() == self.engine.values.keys()
        self.engine.calls.append(self.profile)
        made = self.engine.session.run(None, {name: self._array(name) for name in self.engine.inputs})
        for value, array in zip(self.engine.session.get_outputs(), made, strict=True):
            self._array(value.name)[...] = array
        return True


def module(version: str, profiles: tuple[Profile, ...], engines: list[Engine]) -> Any:
    """Stands for tensorrt_rtx; the engines that it opens are put into `engines`."""

    def deserialize(content: bytes) -> Engine | None:
        if content.startswith(b"foreign"):
            return None
        engines.append(Engine(content, profiles))
        return engines[-1]

    return SimpleNamespace(
        __version__=version,
        TensorIOMode=SimpleNamespace(INPUT="INPUT"),
        DynamicShapesKernelSpecializationStrategy=SimpleNamespace(NONE="none"),
        Logger=type("Logger", (), {"ERROR": 0, "__init__": lambda self, level: None}),
        Runtime=lambda log: SimpleNamespace(deserialize_cuda_engine=deserialize),
    )
