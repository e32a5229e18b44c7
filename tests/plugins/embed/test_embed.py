"""The embedding against the lines of its weight."""

from collections.abc import Callable

import pytest
import torch
from kit.ops import both_forms, form, int32, same_bits

from hemiola.plugins import OPS

embed = both_forms("embed")


@pytest.mark.parametrize("width", [1, 7, 48])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_token_is_a_line_of_the_weight(embed: Callable, dtype: torch.dtype, width: int) -> None:
    """Packed as bfloat16 where it holds them; every lane of a strip, and of one that is not full."""
    weight = torch.randn(100, width, generator=torch.Generator().manual_seed(0)).to(dtype).float()
    for ids in (
        torch.arange(100).int(),
        int32(99, 5, 5, 0, 64),
        int32(),
        int32(1, 2, 3)[::2],
        int32(7).expand(5),
    ):
        assert same_bits(embed(weight, ids), weight[ids])


@pytest.mark.parametrize("token", [-1, 100, 127, 10**6])
def test_an_id_that_is_not_in_the_vocabulary_is_refused(token: int) -> None:
    """The last strip has room for more."""
    with pytest.raises(IndexError, match="in a vocabulary of 100"):
        form(OPS["embed"], "compiled")(torch.zeros(100, 7), int32(0, token, 1))
