"""How mamba2's launches on CUDA are cut; no GPU needed."""

import pytest
from kit.ahead import as_on_a_gpu
from kit.ops import subject

from hemiola.plugins.mamba2.cuda import choose, mamba2


@pytest.mark.parametrize(("heads", "groups"), [(128, 8), (80, 1), (96, 8), (20, 4), (9, 3)])
@pytest.mark.parametrize("num_rows", [1, 8, 64, 256, 1024])
def test_a_program_of_heads_of_two_groups(num_rows: int, heads: int, groups: int) -> None:
    plan = choose(num_rows, heads, 64, groups, 128)
    assert heads // groups % plan.heads == 0


def test_a_plan_of_heads_of_two_groups_is_refused() -> None:
    it = subject("mamba2", 0.0, 1.0, H=6, P=16, G=2, D=16)
    plan = choose(1, 6, 16, 2, 16)._replace(heads=2)
    with pytest.raises(ValueError, match="mamba2: a program of 2 heads, of 3 heads of a group"):
        mamba2(*as_on_a_gpu(it.op, it.arguments(3)), plan=plan)


@pytest.mark.parametrize("num_rows", [1, 256])
def test_a_large_state_is_more_than_a_block_may_have_on_sm_86(num_rows: int) -> None:
    """64 channels of 256: 144 KB of 99."""
    plan = choose(num_rows, 128, 64, 8, 256)
    assert max(plan.channels, plan.scan_channels) * 256 <= 64 * 128
