"""The embedding against the lines of its weight."""

import pytest
import torch
from kit.ops import form, int32, same_bits

from hemiola.plugins import OPS, references
from hemiola.plugins.embed.compiled import embed

IDS = int32(0, 99, 64, 63, 5, 5)


def strips(weight: torch.Tensor, lanes: int) -> torch.Tensor:
    """[V, F] as [strips, F, lanes], the last one filled up."""
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % lanes), value=7)
    return padded.view(-1, lanes, weight.shape[1]).transpose(1, 2).contiguous()


def weight(width: int = 7) -> torch.Tensor:
    return torch.randn(100, width, generator=torch.Generator().manual_seed(0)).bfloat16().float()


@pytest.mark.parametrize("width", [1, 7, 48])
@pytest.mark.parametrize("lanes", [16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_is_a_line_of_the_weight(dtype: torch.dtype, lanes: int, width: int) -> None:
    packed = strips(weight(width), lanes).to(dtype)
    assert same_bits(embed(packed, IDS, 100), weight(width)[IDS])
    assert same_bits(references.embed(weight(width), IDS), weight(width)[IDS])
    for ids in (IDS[:0], IDS[::2], IDS[:1].expand(5)):
        assert same_bits(embed(packed, ids, 100), weight(width)[ids])
        assert same_bits(references.embed(weight(width), ids), weight(width)[ids])


@pytest.mark.parametrize("token", [-1, 100, 127, 10**6])
def test_an_id_that_is_not_in_the_vocabulary_is_refused(token: int) -> None:
    """The last strip has room for more."""
    with pytest.raises(IndexError, match="in a vocabulary of 100"):
        embed(strips(weight(), 64), int32(0, token, 1), 100)


def test_the_engines_packing_is_the_layout_that_is_read() -> None:
    pytest.importorskip("hemiola.plugins.linear.compiled", exc_type=ImportError)  # until linear lands
    for lines in (weight(), weight() + 2.0**-20):  # such as bfloat16 holds, and others
        assert same_bits(form(OPS["embed"], "compiled")(lines, IDS), lines[IDS])
