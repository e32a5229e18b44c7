"""Products of small matrices whose bits depend on the two matrices alone.

MKL cuts a matrix into pieces for its threads when a batch has fewer matrices than there are threads, and on
some CPUs a piece's border rounds differently (seen with AVX2; tests/plugins/test_torch_bits.py). So a batch
never gets more threads than matrices, and no more than its work is worth.
"""

from collections.abc import Callable
from functools import lru_cache

import torch

IN_CACHE = 1 << 16  # numbers: chains of elementwise calls take a long tensor in pieces of this size
WORK_OF_A_THREAD = 1 << 21  # multiplications, about 30 us: less is not worth waking a thread for


def bmm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """torch.bmm."""
    if out is None:
        return _bounded(a, b, torch.bmm, a, b)
    return _bounded(a, b, _bmm_into, out, a, b)


def add_bmm(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """total += a @ b."""
    return _bounded(a, b, torch.Tensor.baddbmm_, total, a, b)


def subtract_bmm(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """total -= a @ b."""
    return _bounded(a, b, _subtract, total, a, b)


def inverse(A: torch.Tensor) -> torch.Tensor:
    """(I + A)^-1 [b, C, C] for strictly lower A, row-major; row t is made of rows <= t of A, bit for bit."""
    identity = _identity(A.shape[1], A.dtype).expand(A.shape)
    return _threads(1, _solve, A.mT, identity).mT  # transposed twice, because the solver returns columns


def span_sums(values: torch.Tensor) -> torch.Tensor:
    """Sums over the places s < u <= t of tiles [n, H, C], as [n, H, C, C]; zero for s >= t.

    As a product of matrices, because differences of cumulative sums lose the digits of small spans.
    """
    num_tiles, heads, chunk_len = values.shape
    upto = (values.unsqueeze(2) * causal(chunk_len, values.dtype)).flatten(0, 1)
    sums = bmm(upto, strictly_causal(chunk_len, values.dtype).expand(upto.shape))
    return sums.view(num_tiles, heads, chunk_len, chunk_len)


@lru_cache(maxsize=8)
def causal(chunk_len: int, dtype: torch.dtype) -> torch.Tensor:
    """[C, C]: one where s <= t."""
    return torch.ones(chunk_len, chunk_len, dtype=dtype).tril()


@lru_cache(maxsize=8)
def strictly_causal(chunk_len: int, dtype: torch.dtype) -> torch.Tensor:
    """[C, C]: one where s < t."""
    return torch.ones(chunk_len, chunk_len, dtype=dtype).tril(-1)


@lru_cache(maxsize=8)
def _identity(chunk_len: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.eye(chunk_len, dtype=dtype)


def _bmm_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.bmm(a, b, out=out)


def _subtract(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return total.baddbmm_(a, b, alpha=-1)


def _solve(A: torch.Tensor, identity: torch.Tensor) -> torch.Tensor:
    return torch.linalg.solve_triangular(A, identity, upper=True, unitriangular=True)


def _bounded(
    a: torch.Tensor, b: torch.Tensor, product: Callable[..., torch.Tensor], *args: torch.Tensor
) -> torch.Tensor:
    return _threads(min(a.shape[0], 1 + a.numel() * b.shape[2] // WORK_OF_A_THREAD), product, *args)


def _threads(limit: int, function: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor:
    """Call with at most so many threads."""
    threads = torch.get_num_threads()
    if limit >= threads:
        return function(*args)
    torch.set_num_threads(limit)
    try:
        return function(*args)
    finally:
        torch.set_num_threads(threads)
