"""What GPU is here, and what a copy on it and a large product reach: the ceilings of all benchmarks.

python3 scripts/gpu_look.py
"""

import sys

import torch


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device here")
    import triton
    from triton.testing import do_bench

    from hemiola.plugins.gpu.driver import version

    device = torch.cuda.get_device_properties(0)
    print(
        f"{device.name}, {device.total_memory / 2**30:.0f} GiB, {device.multi_processor_count}"
        f" multiprocessors, CUDA driver {'.'.join(map(str, version()))}, torch {torch.__version__},"
        f" Triton {triton.__version__}, Python {sys.version.split()[0]}"
        f"; GPUs here: {torch.cuda.device_count()}"
    )
    source = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    milliseconds = do_bench(lambda: target.copy_(source), return_mode="median")
    print(f"| copy | {2 * source.nbytes / milliseconds / 1e9:.2f} TB/s |")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    milliseconds = do_bench(lambda: a @ b, return_mode="median")
    print(f"| bf16 product | {2 * 8192**3 / milliseconds / 1e9:.0f} TFLOP/s |")


if __name__ == "__main__":
    main()
