"""Parts that TensorRT or TensorRT-RTX runs on a GPU, on torch's stream and in torch's memory."""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from hemiola.runtime.device.segments.tensorrt_ops import DTYPES, register
from hemiola.runtime.errors import Refused
from hemiola.runtime.manifest_parts import NEXT


def opener(compiler: str) -> Callable[[Path], "TensorRtPart"]:
    """A function that opens a part. An engine is for the very version that built it."""
    name, version = compiler.split()
    try:
        trt: Any = import_module(name.replace("-", "_"))
    except ImportError as error:
        message = f"this engine's parts need {compiler} ({error})"
        raise Refused("not_found", message=message, way_out=f"pip install {name}-cu13=={version}") from None
    if trt.__version__ != version:
        message = f"this engine's parts were built by {compiler}, here is {trt.__version__}"
        way_out = f"run build-engine again, or pip install {name}-cu13=={version}"
        raise Refused("unsupported", message=message, way_out=way_out)
    if name == "tensorrt":
        register()
    runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))

    def open_part(path: Path) -> TensorRtPart:
        engine = runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            message = f"{path} cannot be loaded by {compiler}, which has said why"
            raise Refused("damaged", message=message, way_out="run build-engine again")
        return TensorRtPart(trt, engine)

    return open_part


class TensorRtPart:
    """An engine with one context for each of its profiles."""

    def __init__(self, trt: Any, engine: Any) -> None:
        self._engine = engine
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        self._inputs = [n for n in names if engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT]
        self._aliases = {n: n.removesuffix(NEXT) for n in names if n.removesuffix(NEXT) in self._inputs}
        self._aliases = {alias: n for alias, n in self._aliases.items() if alias != n}
        self._outputs = {
            n: DTYPES[engine.get_tensor_dtype(n).name]
            for n in names
            if n not in self._inputs and n not in self._aliases
        }
        self._moving = [n for n in self._inputs if -1 in engine.get_tensor_shape(n)]
        profiles = range(engine.num_optimization_profiles)
        self._max_shapes = [
            {n: tuple(engine.get_tensor_profile_shape(n, i)[2]) for n in self._moving} for i in profiles
        ]
        self._contexts = [_context(trt, engine, i) for i in profiles]

    @property
    def num_inputs(self) -> int:
        return len(self._inputs)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        tensors = {name: value.contiguous() for name, value in zip(self._inputs, inputs, strict=True)}
        context = self._contexts[self._profile(tensors)]
        for name in self._moving:
            context.set_input_shape(name, tuple(tensors[name].shape))
        made = {
            name: torch.empty(tuple(context.get_tensor_shape(name)), dtype=dtype, device=inputs[0].device)
            for name, dtype in self._outputs.items()
        }
        aliases = {alias: tensors[name] for alias, name in self._aliases.items()}
        for name, tensor in (tensors | made | aliases).items():
            # an empty tensor has no address, TensorRT wants one: any will do
            context.set_tensor_address(name, tensor.data_ptr() or inputs[0].data_ptr())
        if not context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise RuntimeError("a part of the engine failed, TensorRT has said why")
        return [*made.values()]

    def _profile(self, tensors: dict[str, torch.Tensor]) -> int:
        """The first that takes these sizes."""
        for i, max_shapes in enumerate(self._max_shapes):
            fits = (
                size <= limit
                for name, limits in max_shapes.items()
                for size, limit in zip(tensors[name].shape, limits, strict=True)
            )
            if all(fits):
                return i
        shapes = {name: tuple(tensors[name].shape) for name in self._moving}
        raise RuntimeError(f"no profile of the engine takes {shapes}")


def _context(trt: Any, engine: Any, profile: int) -> Any:
    if hasattr(trt, "DynamicShapesKernelSpecializationStrategy"):
        # TensorRT-RTX would else compile kernels for sizes that it has seen, and change bits while it runs
        options = engine.create_runtime_config()
        options.dynamic_shapes_kernel_specialization_strategy = (
            trt.DynamicShapesKernelSpecializationStrategy.NONE
        )
        context = engine.create_execution_context(options)
    else:
        context = engine.create_execution_context()
    stream = torch.cuda.current_stream()
    context.set_optimization_profile_async(profile, stream.cuda_stream)
    stream.synchronize()
    return context
