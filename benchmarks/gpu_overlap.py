"""What it brings that a kernel is scheduled while the one before it still ends (plugins/gpu/overlap.py).

    PYTHONPATH=. python benchmarks/gpu_overlap.py

Layers of real sizes at one row as a graph, twice: launched to overlap, and one kernel after the other; the
same binaries and the same bits. Norms stand for the small kernels of a recurrence.
"""

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from gpu_dense import contest

from hemiola.plugins.gate.cuda import _gate, gate
from hemiola.plugins.gpu import driver
from hemiola.plugins.gpu.compile import call_of, compile_call, without_lines
from hemiola.plugins.gpu.device import gpu_of
from hemiola.plugins.gpu.launch import Kernel, Values
from hemiola.plugins.linear.cuda import _persistent, _tiles, fused
from hemiola.plugins.norm.cuda import _norm, norm

SIZES = {  # width, outputs of the first layer, width of the recurrence, of the MLP; layers, more than a cache
    "9b": (4096, 12352, 4096, 12288, 6),
    "0.8b": (1024, 8224, 2048, 3584, 24),
}
SMALL = 4  # small kernels between the dense layers of a recurrence
BANDWIDTH = 4.3e12  # bytes a second
DEVICE = torch.device("cuda", 0)


class Layer:
    """Weights, and what runs over them; the residual is added by the dense layers, or by torch."""

    def __init__(self, width: int, first: int, inner: int, mlp: int, by_torch: bool) -> None:
        def made(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, device=DEVICE) * shape[-1] ** -0.5).bfloat16()

        self.first, self.out, self.up, self.down = (
            made(first, width), made(width, inner), made(2 * mlp, width), made(width, mlp)
        )  # fmt: skip
        self.ones = torch.ones(max(width, inner), device=DEVICE)
        self.none = torch.empty(0, dtype=torch.bfloat16, device=DEVICE)
        self.by_torch = by_torch

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return norm(x, self.none, self.ones[: x.shape[1]], 1e-6, x.shape[1], False)

    def add(self, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x + fused(y, weight) if self.by_torch else fused(y, weight, residual=x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        y = fused(self.norm(x), self.first)[:, : self.out.shape[1]]
        for _ in range(SMALL):
            y = self.norm(y)
        x = self.add(x, y, self.out)
        opening, value = fused(self.norm(x), self.up).chunk(2, dim=1)
        return self.add(x, gate(value, opening, "silu"), self.down)


def launching(overlapped: bool) -> None:
    """From now on kernels are launched so, or one after the other."""

    def make(kernel: Kernel, values: Values, constants: Mapping[str, Any]) -> None:
        with without_lines():
            made = compile_call(call_of(kernel, values, constants), gpu_of(DEVICE).capability)
        assert made.binary.waits
        binary = replace(made.binary, waits=overlapped)
        kernel.binaries[binary.call] = driver.load(binary, made.cubin, DEVICE)

    for kernel in (_gate, _norm, _persistent, _tiles):
        kernel.binaries.clear()
        kernel._found.clear()
    Kernel.compile = make


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("gpu_overlap.py: torch finds no CUDA device here")
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}\n")
    print("| layer | residual | us, one after the other | us, overlapped | less | over the floor | same |")
    print("|---|---|---|---|---|---|---|")
    for name, (width, first, inner, mlp, num) in SIZES.items():
        for by_torch in (True, False):
            layers = [Layer(width, first, inner, mlp, by_torch) for _ in range(num)]
            x = torch.randn(1, width, device=DEVICE).bfloat16()

            def step(x: torch.Tensor = x, layers: list[Layer] = layers) -> torch.Tensor:
                for layer in layers:
                    x = layer.run(x)
                return x

            launching(False)
            wanted, (apart,) = step(), contest([step])
            launching(True)
            found, (overlapped,) = step(), contest([step])
            last = layers[-1]
            weights = (last.first, last.out, last.up, last.down)
            floor = sum(weight.nbytes for weight in weights) / BANDWIDTH
            words = (
                f"{1e6 * apart / num:.1f}",
                f"{1e6 * overlapped / num:.1f}",
                f"{1 - overlapped / apart:.1%}",
                f"{overlapped / num / floor:.2f}",
                "equal" if torch.equal(found, wanted) else "OTHER BITS",
            )
            print(f"| {name} | {'torch' if by_torch else 'fused'} | {' | '.join(words)} |", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
