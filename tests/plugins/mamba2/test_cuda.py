"""How mamba2's launches on CUDA are cut; no GPU needed."""

import pytest

from hemiola.plugins.mamba2.cuda import choose


@pytest.mark.parametrize(("heads", "groups"), [(128, 8), (80, 1), (96, 8), (20, 4), (9, 3)])
@pytest.mark.parametrize("num_rows", [1, 8, 64, 256, 1024])
def test_a_program_of_heads_of_two_groups(num_rows: int, heads: int, groups: int) -> None:
    plan = choose(num_rows, heads, 64, groups)
    assert heads // groups % plan.heads == 0
