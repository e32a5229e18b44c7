"""The CUDA driver, through cuda-python: binaries become launches on torch's current stream."""

import ctypes
import struct
import weakref
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any

import torch
from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

from hemiola.plugins.gpu.binaries import Binary, TensorMap
from hemiola.plugins.gpu.launch import ONE, Block, Launch

CELL = 8  # bytes of a parameter's place; tensor maps have their own
MAP_BYTES, MAP_ALIGNMENT = 128, 64
MAX_MAPS = 4096  # that a kernel keeps
STATIC_SHARED = 48 * 1024  # bytes that a block may have without being asked
FORMATS = {"*": "Q", "i32": "i4x", "i64": "q", "fp32": "f4x"}
DONE = driver.CUresult.CUDA_SUCCESS


class DriverError(RuntimeError):
    """What the driver refused, in one line."""


def version() -> tuple[int, int]:
    """The newest CUDA that the installed driver knows."""
    number = _done("cuDriverGetVersion", driver.cuDriverGetVersion())
    return number // 1000, number % 1000 // 10


# Memory that several processes share.


def allocate(num_bytes: int) -> int:
    """Zeros on the current device; its address."""
    address = _done("cuMemAlloc", driver.cuMemAlloc(num_bytes))
    _done("cuMemsetD8", driver.cuMemsetD8(address, 0, num_bytes))
    _done("cuCtxSynchronize", driver.cuCtxSynchronize())
    return int(address)


def free(address: int) -> None:
    """What `allocate` gave."""
    _done("cuMemFree", driver.cuMemFree(address))


def handle_of(address: int) -> bytes:
    """By which another process finds this memory."""
    return bytes(_done("cuIpcGetMemHandle", driver.cuIpcGetMemHandle(address)).reserved)


def open_handle(handle: bytes) -> int:
    """The address here of memory of another process, which may be another device's."""
    ipc_handle = driver.CUipcMemHandle()
    ipc_handle.reserved = handle
    flag = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    return int(_done("cuIpcOpenMemHandle", driver.cuIpcOpenMemHandle(ipc_handle, flag)))


def close_handle(address: int) -> None:
    """What `open_handle` gave."""
    _done("cuIpcCloseMemHandle", driver.cuIpcCloseMemHandle(address))


def map_host(address: int, num_bytes: int) -> int:
    """The device's address of memory of the host, page-locked until `unmap_host`."""
    flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
    _done("cuMemHostRegister", driver.cuMemHostRegister(address, num_bytes, flags))
    return int(_done("cuMemHostGetDevicePointer", driver.cuMemHostGetDevicePointer(address, 0)))


def unmap_host(address: int) -> None:
    """What `map_host` mapped."""
    _done("cuMemHostUnregister", driver.cuMemHostUnregister(address))


def load(binary: Binary, cubin: bytes, device: torch.device) -> Launch:
    """Raises DriverError where the cubin is damaged or for another GPU."""
    torch.cuda.current_stream(device)  # a context
    library = _done("cuLibraryLoadData", driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
    kernel = _done("cuLibraryGetKernel", driver.cuLibraryGetKernel(library, binary.symbol.encode()))
    if binary.shared > STATIC_SHARED:
        max_shared = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        number = driver.CUdevice(device.index)
        _done("cuKernelSetAttribute", driver.cuKernelSetAttribute(max_shared, binary.shared, kernel, number))
        prefer = driver.CUfunc_cache.CU_FUNC_CACHE_PREFER_SHARED
        _done("cuKernelSetCacheConfig", driver.cuKernelSetCacheConfig(kernel, prefer, number))
    _done(
        "cuKernelGetFunction", driver.cuKernelGetFunction(kernel)
    )  # loaded now, not while a graph is captured
    function = driver.CUfunction(int(kernel))
    return _launch(binary, library, function, device)


def _launch(binary: Binary, library: Any, function: Any, device: torch.device) -> Launch:
    parameters, config = Parameters(binary), _config(binary)
    put, address, lock = parameters.put, parameters.address, Lock()
    index, start, stream_of = device.index, driver.cuLaunchKernelEx, torch._C._cuda_getCurrentRawStream

    def launch(grid: tuple[int, ...], values: list[Any]) -> None:
        if 0 in grid:
            return
        x, y, z = (*grid, 1, 1)[:3]
        with lock:  # the driver copies the parameters before it returns
            put(values)
            config.gridDimX, config.gridDimY, config.gridDimZ = x, y, z
            config.hStream = stream_of(index)
            (result,) = start(config, function, address, 0)
        if result != DONE:
            raise DriverError(f"launch of {binary.call.kernel} on a grid of {grid}: {_name(result)}")

    weakref.finalize(launch, driver.cuLibraryUnload, library).atexit = False  # then CUDA may be gone
    return launch


def _config(binary: Binary) -> Any:
    """How the kernel is launched, but for the grid and the stream."""
    config = driver.CUlaunchConfig()
    config.blockDimX, config.blockDimY, config.blockDimZ = binary.threads, 1, 1
    config.sharedMemBytes = binary.shared
    if binary.waits:
        early, allowed = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
        early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        allowed.programmaticStreamSerializationAllowed = 1
        early.value = allowed
        config.attrs, config.numAttrs = [early], 1
    return config


class Parameters:
    """A kernel's parameters, in one piece of memory that every launch fills anew."""

    def __init__(self, binary: Binary) -> None:
        kinds, maps = binary.call.kinds, iter(binary.maps)
        self._taken = [i for i, kind in enumerate(kinds) if kind != ONE]
        self._is_whole = len(self._taken) == len(kinds)
        self._blocks = {i: next(maps) for i in self._taken if kinds[i].startswith("<")}
        self._kept: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        cells = [cell for i in self._taken for cell in _cells(kinds[i])] + [
            "Q",
            "Q",
        ]  # two of Triton's own, null
        offsets, form, end = [], "<", 0
        for cell in cells:
            gap = -end % (MAP_ALIGNMENT if cell.endswith("s") else CELL)
            offsets.append(end + gap)
            form += f"{gap}x{cell}"
            end += gap + struct.calcsize(f"<{cell}")
        self._memory = ctypes.create_string_buffer(end + MAP_ALIGNMENT)
        first = -ctypes.addressof(self._memory) % MAP_ALIGNMENT
        places = [ctypes.addressof(self._memory) + first + offset for offset in offsets]
        self._places = (ctypes.c_void_p * len(places))(*places)
        self.address = ctypes.addressof(self._places)
        self._pack, self._first = struct.Struct(form).pack_into, first

    def put(self, values: list[Any]) -> None:
        """Write these arguments; tensors come as addresses."""
        if self._blocks:
            flat = []
            for i in self._taken:
                flat += self._block(i, values[i]) if i in self._blocks else (values[i],)
            self._pack(self._memory, self._first, *flat, 0, 0)
        elif self._is_whole:
            self._pack(self._memory, self._first, *values, 0, 0)
        else:
            self._pack(self._memory, self._first, *(values[i] for i in self._taken), 0, 0)

    def _block(self, index: int, block: Block) -> tuple[Any, ...]:
        """The descriptor, shape and strides; made once for every place that a tensor was seen at."""
        tensor = block.tensor
        key = (index, tensor.data_ptr(), *tensor.shape, *tensor.stride())
        known = self._kept.get(key)
        if known is None:
            if len(self._kept) >= MAX_MAPS:
                self._kept.clear()
            described = _describe(tensor, self._blocks[index])
            known = self._kept[key] = (described, *tensor.shape, *tensor.stride())
        return known


def _cells(kind: str) -> Iterator[str]:
    """The parameters that an argument takes."""
    if kind.startswith("<"):
        rank = len(kind.split()) - 1
        yield f"{MAP_BYTES}s"
        yield from ["i4x"] * rank + ["q"] * rank
    else:
        yield FORMATS["*" if kind.startswith("*") else kind.rstrip("?").partition(":")[0]]


def _describe(tensor: torch.Tensor, how: TensorMap) -> bytes:
    """A CUtensorMap: dimensions innermost first, strides in bytes."""
    sizes = [driver.cuuint64_t(size) for size in reversed(tensor.shape)]
    strides = [driver.cuuint64_t(s * how.item_bytes) for s in reversed(tensor.stride()[:-1])]
    box = [driver.cuuint32_t(size) for size in reversed(how.box)]
    made = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType(how.item),
        len(sizes),
        tensor.data_ptr(),
        sizes,
        strides,
        box,
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle(how.swizzle),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return ctypes.string_at(_done("cuTensorMapEncodeTiled", made).getPtr(), MAP_BYTES)


def _done(what: str, answer: Sequence[Any]) -> Any:
    """What a call of the driver gave, or its error."""
    if answer[0] != DONE:
        raise DriverError(f"{what}: {_name(answer[0])}")
    return answer[1] if len(answer) > 1 else None


def _name(result: Any) -> str:
    return f"{result.name} ({driver.cuGetErrorString(result)[1].decode()})"
