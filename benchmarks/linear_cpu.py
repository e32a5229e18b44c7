"""The compiled dense layer beside MKL: one row per case, equality of bits checked in the same run.

    PYTHONPATH=. python benchmarks/linear_cpu.py [--threads 2] [--shapes 256x1288 ...] [--tokens 1 8] [--step]
    PYTHONPATH=. python benchmarks/linear_cpu.py --quantised [--threads 2] [--shapes 4096x12288 ...]

Times are the fastest of many calls, ours and MKL's in turn, so each finds a cache that the other has
used. With one thread they are the thread's CPU time, which other work on the machine disturbs least; with
more, time by the clock. MKL multiplies fp32 weights; for bf16 ones, the same widened beforehand. `bits` says
whether rows of a prompt equal the same rows alone. With --step both are called from compiled code, as a step
calls its kernels: no call of torch or Python counts. With --quantised each format of
`build-engine --quantize` stands beside our own bf16, and `bits` says whether they equal those of the same
numbers in fp32. For narrower registers, on a machine with AVX-512:

    MKL_ENABLE_INSTRUCTIONS=AVX2 NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx2,+fma PYTHONPATH=. python ...
"""

import argparse
import ctypes
import time
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import torch
import torch.nn.functional as F

from hemiola.builder.formats.rounded import LAYOUTS, rounded
from hemiola.plugins.cpu.code import Recorder
from hemiola.plugins.cpu.registers import REGISTERS
from hemiola.plugins.cpu.simd import MOST_ARGUMENTS, invoke
from hemiola.plugins.cpu.steps import RecordedStep
from hemiola.plugins.groups import dequantised
from hemiola.plugins.linear.compiled import linear, pack

SHAPES = ("256x1288", "256x4096", "768x256", "1024x3584", "4096x12288")  # inputs x outputs
TOKENS = (1, 8, 64, 512, 2048)
NONE = torch.empty(0)


def fastest(calls: list[Callable[[], object]], seconds: float, clock: Callable[[], float]) -> list[float]:
    """Seconds of each one's fastest call, called in turn, at least three times."""
    best, num_rounds, end = [float("inf")] * len(calls), 0, time.perf_counter() + seconds
    while num_rounds < 4 or time.perf_counter() < end:
        for n, call in enumerate(calls):
            start = clock()
            call()
            spent = clock() - start
            best[n] = min(best[n], spent) if num_rounds else best[n]
        num_rounds += 1
    return best


def same_bits(weight: torch.Tensor, packed: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether rows of a prompt, the first, the last and some between, equal the same rows alone."""
    rows = sorted({0, len(x) // 3, len(x) // 2, len(x) - 1})
    alone = torch.cat([linear(x[row : row + 1], packed, NONE, len(weight)) for row in rows])
    return torch.equal(alone.view(torch.int32), y[rows].view(torch.int32))


def measure(num_inputs: int, num_outputs: int, num_tokens: list[int], threads: int, seconds: float) -> None:
    weight = torch.randn(num_outputs, num_inputs) * num_inputs**-0.5
    clock = time.thread_time if threads == 1 else time.perf_counter
    for dtype in (torch.float32, torch.bfloat16):
        wide = weight.to(dtype).float()
        packed = pack(weight.to(dtype))
        assert packed.dtype is dtype
        for tokens in num_tokens:
            x = torch.randn(tokens, num_inputs)
            equal = same_bits(wide, packed, x, linear(x, packed, NONE, num_outputs))
            calls = [lambda: linear(x, packed, NONE, num_outputs), lambda: F.linear(x, wide)]  # noqa: B023
            ours, mkl = fastest(calls, seconds, clock)
            name = str(dtype).removeprefix("torch.").replace("float", "fp").replace("bfp", "bf")
            flops = 2e-9 * tokens * num_inputs * num_outputs / ours
            bandwidth = 1e-9 * packed.numel() * packed.itemsize / ours
            print(
                f"| {num_inputs} x {num_outputs} | {tokens} | {name} | {threads} | {ours * 1e6:.0f} "
                f"| {mkl * 1e6:.0f} | {mkl / ours:.2f} | {flops:.0f} | {bandwidth:.1f} "
                f"| {'equal' if equal else 'DIFFERENT'} |",
                flush=True,
            )


def quantised(num_inputs: int, num_outputs: int, num_tokens: list[int], threads: int, seconds: float) -> None:
    """Every format beside bf16."""
    weight = torch.randn(num_outputs, num_inputs) * num_inputs**-0.5
    clock = time.thread_time if threads == 1 else time.perf_counter
    halves = pack(weight.bfloat16())
    groups = {name: rounded(weight, layout) for name, layout in LAYOUTS.items()}
    packed = {name: pack(group) for name, group in groups.items()}

    def run(x: torch.Tensor, name: str) -> torch.Tensor:
        return linear(x, packed[name], NONE, num_outputs, weight_layout=LAYOUTS[name])

    for tokens in num_tokens:
        x = torch.randn(tokens, num_inputs)
        calls: list[Callable[[], object]] = [lambda: linear(x, halves, NONE, num_outputs)]  # noqa: B023
        calls += [lambda name=name: run(x, name) for name in groups]  # noqa: B023
        usual, *times = fastest(calls, seconds, clock)
        for (name, group), spent in zip(groups.items(), times, strict=True):
            same = torch.equal(run(x, name), linear(x, pack(dequantised(group)), NONE, num_outputs))
            print(
                f"| {num_inputs} x {num_outputs} | {tokens} | {name} | {threads} | {spent * 1e6:.0f} |"
                f" {usual * 1e6:.0f} | {usual / spent:.2f} | {1e-9 * packed[name].numel() / spent:.1f} |"
                f" {'equal' if same else 'DIFFERENT'} |",
                flush=True,
            )


def in_a_step(num_inputs: int, num_outputs: int, num_tokens: list[int], seconds: float) -> None:
    """Both as compiled code calls them: one matrix again and again (warm); few tokens 60 MB in turn, too."""
    size = 4 * num_inputs * num_outputs
    for tokens in num_tokens:
        x = torch.randn(tokens, num_inputs)
        few = tokens <= 8
        for many in sorted({1, max(1, 60_000_000 // size)}) if few else (1,):
            weights = [torch.randn(num_outputs, num_inputs) for _ in range(many)]
            times = max(1, 16 // many) if few else 1
            packed = [list(map(pack, weights)), [pack(weight.bfloat16()) for weight in weights]]
            calls = [replay(x, times * kind, num_outputs) for kind in packed]
            calls.append(mkl(x, times * weights))
            found = [1e6 * best / many / times for best in fastest(calls, seconds, time.thread_time)]
            cells = [f"{us:.1f}" for us in found] + [f"{found[2] / us:.2f}" for us in found[:2]]
            name = "warm" if many == 1 else "cold"
            wide = (weights[0], weights[0].bfloat16().float())
            equal = all(
                same_bits(weight, kind[0], x, linear(x, kind[0], NONE, num_outputs))
                for weight, kind in zip(wide, packed, strict=True)
            )
            cells.append("equal" if equal else "DIFFERENT")
            print(f"| {num_inputs} x {num_outputs} | {tokens} | {name} |", " | ".join(cells), "|", flush=True)


def replay(x: torch.Tensor, packed: list[torch.Tensor], num_outputs: int) -> Callable[[], object]:
    """One step with a layer for each weight."""
    recorder = Recorder()
    for weight in packed:
        linear(recorder.given(x), recorder.given(weight), recorder.given(NONE), num_outputs)
    step = RecordedStep(recorder, [])
    return lambda: step.run({})


def mkl(x: torch.Tensor, weights: list[torch.Tensor]) -> Callable[[], object]:
    """One compiled function that calls torch's sgemv, or sgemm for more tokens, for each weight."""
    (tokens, num_inputs), num_outputs = x.shape, len(weights[0])
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    function = ctypes.cast(library.sgemv_ if tokens == 1 else library.sgemm_, ctypes.c_void_p).value
    y, letters = torch.empty(tokens, num_outputs), np.frombuffer(b"TN", np.uint8).copy()
    whole, real = np.array([num_inputs, num_outputs, tokens, 1], np.int32), np.array([1, 0], np.float32)
    inputs, outputs, rows, one = (whole[n:].ctypes.data for n in range(4))
    alpha, beta, turned = real.ctypes.data, real[1:].ctypes.data, letters.ctypes.data
    table = np.zeros((len(weights), MOST_ARGUMENTS), np.int64)
    for line, weight in zip(table, weights, strict=True):
        matrix = (alpha, weight.data_ptr(), inputs, x.data_ptr())
        if tokens == 1:  # y = weight x, of the matrix [F, O] of Fortran
            given = (outputs, *matrix, one, beta, y.data_ptr(), one)
        else:
            given = (outputs, rows, inputs, *matrix, inputs, beta, y.data_ptr(), outputs)
        line[: len(given)] = given
    first = (turned, inputs) if tokens == 1 else (turned, letters[1:].ctypes.data)
    return lambda: (_repeat(function, *first, table.ctypes.data, len(table)), letters, whole, real, y)


@numba.njit
def _repeat(function, first, second, table, num_calls):
    for n in range(num_calls):
        invoke(function, first, second, table + 8 * MOST_ARGUMENTS * n)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--step", action="store_true", help="both from compiled code, with one thread")
    parser.add_argument("--quantised", action="store_true", help="every format beside bf16, not MKL")
    parser.add_argument("--seconds", type=float, default=0.5, help="per case")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    print(f"{REGISTERS.number} registers of {REGISTERS.lanes}; ratio: MKL's time over ours\n")
    if options.step:
        print("| shape | tokens | weights | us fp32 | us bf16 | us MKL | ratio fp32 | ratio bf16 | bits |")
        print("|---|---|---|---|---|---|---|---|---|")
        for shape in options.shapes:
            in_a_step(*map(int, shape.split("x")), options.tokens, options.seconds)
        return
    if options.quantised:
        print("| shape | tokens | weights | threads | us | us bf16 | ratio | weights GB/s | bits |")
        print("|---|---|---|---|---|---|---|---|---|")
        for shape in options.shapes:
            sizes = map(int, shape.split("x"))
            quantised(*sizes, options.tokens, options.threads, options.seconds)
        return
    print("| shape | tokens | weights | threads | us | us MKL | ratio | GFLOP/s | weights GB/s | bits |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for shape in options.shapes:
        measure(*map(int, shape.split("x")), options.tokens, options.threads, options.seconds)


if __name__ == "__main__":
    main()
