"""How delta's launches on CUDA are cut; no GPU needed."""

import pytest
from kit.ahead import as_on_a_gpu
from kit.ops import subject

from hemiola.plugins.delta.cuda import choose, delta


@pytest.mark.parametrize(("tiles", "of"), [(2, 3), (4, 3), (2, 1)])
def test_a_program_of_tiles_of_two_rows(tiles: int, of: int) -> None:
    """Tiles were left out, and their states wrong without a word."""
    it = subject("delta", G=1, K=16, H=of, V=32, J=1)
    plan = choose(1, 1, of, 32, 1, 256)._replace(channels=32, tiles=tiles)
    with pytest.raises(ValueError, match=f"delta: a program of {tiles} tiles, of {of} tiles of a row"):
        delta(*as_on_a_gpu(it.op, it.arguments(3)), plan=plan)
