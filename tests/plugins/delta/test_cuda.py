"""How delta's launches on CUDA are cut; no GPU needed."""

import pytest
import torch
from kit.ahead import as_on_a_gpu
from kit.ops import subject

from hemiola.plugins.delta.cuda import ahead, choose, delta, in_launches
from hemiola.plugins.gpu.device import Gpu


@pytest.mark.parametrize(("tiles", "of"), [(2, 3), (4, 3), (2, 1)])
def test_a_program_of_tiles_of_two_rows(tiles: int, of: int) -> None:
    """Tiles were left out, and their states wrong without a word."""
    it = subject("delta", G=1, K=16, H=of, V=32, J=1)
    plan = choose(1, 1, of, 32, 1, 256)._replace(channels=32, tiles=tiles)
    with pytest.raises(ValueError, match=f"delta: a program of {tiles} tiles, of {of} tiles of a row"):
        delta(*as_on_a_gpu(it.op, it.arguments(3)), plan=plan)


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(16, 16), (8, 1)])
def test_a_tensorrt_engine_of_few_rows_had_no_delta_without_wgmma(num_tokens: int, num_rows: int) -> None:
    """One launch takes 64 KB of shared memory there, of TensorRT's 48; two take less."""
    it = subject("delta", G=16, K=128, H=32, V=128, J=1)
    given = [torch.empty_like(value, device="meta") for value in it.arguments(num_tokens)[:-2]]
    rows = torch.empty(num_rows, 8, dtype=torch.int32, device="meta")
    first, second = ahead(Gpu(86, 84), *given, rows, 16)
    assert first == {} and choose(num_tokens, num_rows, 32, 128, 1, 2048).few
    assert second["plan"] == in_launches(num_tokens, num_rows, 32, 128, 1, 2048) and not second["plan"].few
