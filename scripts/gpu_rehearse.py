"""A benchmark of kernels as far as it goes without a GPU: what would end its stage on a GPU ends it here.

    PYTHONPATH=.:tests python3 scripts/gpu_rehearse.py benchmarks/gpu_attention.py --prefill 8192

torch.cuda is stubs that take no time, a GPU's tensors have sizes and no content, and kernels are not
launched: each launch's arguments are counted against the kernel's, and launches are counted. Every comparison
comes out equal. What needs a content (a profile, a digest of bits) cannot be rehearsed.
"""

import runpy
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import triton.testing
from torch.overrides import TorchFunctionMode

from hemiola.plugins.gpu import compile as compiling
from hemiola.plugins.gpu.launch import Kernel, Values, launches

META = torch.device("meta")
# Given a GPU's device, torch makes these of numbers, which it would copy.
OF_NUMBERS = (torch.tensor, torch.arange, torch.randperm)
ANSWERS = {torch.equal: True, torch.Tensor.item: 1.0, torch.Tensor.__setitem__: None}


class Meta(TorchFunctionMode):
    """What is made on a GPU has no content."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: _meta(value) for name, value in (kwargs or {}).items()}
        if func in ANSWERS:
            return ANSWERS[func]
        if func is torch.Tensor.unique:
            return torch.empty(5, device=META)
        if func in OF_NUMBERS and kwargs.get("device") == META:
            return func(*args, **kwargs | {"device": None}).to(META)
        return func(*map(_meta, args), **kwargs)


def _meta(value: Any) -> Any:
    is_gpu = isinstance(value, (torch.device, str)) and str(value).startswith("cuda")
    return META if is_gpu else value


class Event:
    def __init__(self, **_: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def elapsed_time(self, other: "Event") -> float:
        return 1.0


class Graph:
    def replay(self) -> None: ...


def stub() -> None:
    """torch.cuda as of an H200 that does nothing."""
    gpu = SimpleNamespace(name="H200", total_memory=2**37, multi_processor_count=132, major=9, minor=0)
    answers = {
        "is_available": True,
        "get_device_name": gpu.name,
        "get_device_capability": (9, 0),
        "get_device_properties": gpu,
        "mem_get_info": (2**37, 2**37),
        "current_device": 0,
        "graph": nullcontext(),
        "stream": nullcontext(),
        **dict.fromkeys(("Stream", "current_stream"), SimpleNamespace(wait_stream=lambda other: None)),
        **dict.fromkeys(("synchronize", "empty_cache", "manual_seed", "manual_seed_all")),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    for name, value in {"Event": Event, "CUDAGraph": Graph}.items():
        setattr(torch.cuda, name, value)
    triton.testing.do_bench = lambda run, **_: (run(), 1.0)[1]
    compiling.on_demand = lambda: None


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    seen: Counter[str] = Counter()

    def look(kernel: Kernel, grid: tuple[int, ...], values: Values, constants: Mapping[str, Any]) -> None:
        names = [parameter.name for parameter in compiling.source(kernel.name).params]
        named = [name for name in names if name in constants]
        assert len(values) + len(named) == len(names), f"{kernel.name} takes {names}"
        assert all(size >= 0 for size in grid), f"{kernel.name} on a grid of {grid}"
        seen[kernel.name] += 1

    stub()
    del sys.argv[0]
    sys.path.insert(0, sys.argv[0].rpartition("/")[0])
    with Meta(), launches(look):
        runpy.run_path(sys.argv[0], run_name="__main__")
    print(f"rehearsed: {', '.join(f'{name} {num}' for name, num in sorted(seen.items()))}")


if __name__ == "__main__":
    main()
