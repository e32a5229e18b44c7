"""Weights are read, packed and written in parts: the bits are those of the whole, memory that of a part."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kit.ops import same_bits
from safetensors.torch import load_file, save_file

from hemiola.builder import lazy as lazies
from hemiola.builder import weights
from hemiola.builder.checkpoint import Checkpoint
from hemiola.builder.formats.rounded import LAYOUTS, RoundedTensors
from hemiola.builder.lazy import Lazy, join, stacked
from hemiola.builder.targets.work import Peak
from hemiola.plugins.gpu.words import pack_words
from hemiola.plugins.linear.spec import strips
from tests.builder.formats.test_formats import WRITERS, random, written

SIZE = (208, 160)
CUTS = [(0, 208), (0, 1), (5, 60), (64, 128), (200, 300), (7, None), (1, 3)]
EVERY = {**dict.fromkeys(WRITERS), "bf16": None} | dict.fromkeys(f"rounded to {name}" for name in LAYOUTS)


@pytest.fixture(params=EVERY)
def matrix(request: pytest.FixtureRequest, alone: Callable[..., Checkpoint]) -> Lazy:
    """X, in a checkpoint of every format, and rounded when it is read."""
    if request.param in WRITERS:
        made = written(request.param, SIZE)
        return alone(made.tensors, WRITERS[request.param][1]).matrix("X.weight", *SIZE)
    plain = alone({"weight": random(*SIZE).bfloat16()}, {})
    narrow = request.param.removeprefix("rounded to ")
    source = RoundedTensors(plain, narrow, narrow_inputs=False) if narrow in LAYOUTS else plain
    return source.matrix("X.weight", *SIZE)


def forms_of(matrix: Lazy) -> dict[str, Lazy]:
    """Whatever families make of a matrix."""
    dice = torch.Generator().manual_seed(0)
    by_eights = matrix.take(lambda rows: rows.view(2, -1, 8).transpose(0, 1).flatten())
    span = matrix.layout.span if matrix.layout is not None else 0
    rows = torch.randint(0, SIZE[0], (70,), generator=dice)  # some of them twice
    experts = stacked([join([matrix, by_eights])] * 3)
    return {
        "as it is": matrix,
        "interleaved": by_eights,
        "shuffled": matrix.take(lambda every: every[rows]),
        "columns": matrix.columns(0, span or 160) if span else matrix,
        "joined": join([matrix, by_eights, matrix.take(lambda every: every[:5])]),
        "experts": experts,
        "rows of experts": experts.take(lambda every: every[100:300:2], 1),
    }


def test_parts_are_the_parts_of_the_whole(matrix: Lazy) -> None:
    for name, lazy in forms_of(matrix).items():
        whole = lazy.read()
        assert whole.shape == lazy.shape, name
        for begin, end in [cut for cut in CUTS if cut[0] < len(whole)]:
            assert same_bits(lazy.read(begin, end), whole[begin:end]), (name, begin, end)


@pytest.mark.parametrize("pack", [strips, pack_words])
def test_packed_pieces_are_the_packed_whole(
    matrix: Lazy, pack: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their size."""
    if pack is pack_words and matrix.layout is None:
        pytest.skip("plain weights lie as they are on a GPU")
    for name, lazy in forms_of(matrix).items():
        whole = pack(lazy.read() if lazy.group is None else lazy.group.read())
        for most in (1, 5000, 10**9):
            monkeypatch.setattr(lazies, "PIECE", most)
            pieces = [*lazy.packed(pack).pieces(most)]
            assert same_bits(torch.cat(pieces), whole), (name, most)


def experts(folder: Path, num_experts: int) -> Lazy:
    """Stacked as an engine has them, one tensor each in the checkpoint."""
    made = written("ct w4 g32", SIZE)
    names = {f"{n}.{end}": part.clone() for n in range(num_experts) for end, part in made.tensors.items()}
    save_file({name: part.contiguous() for name, part in names.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    checkpoint = Checkpoint(folder)
    return stacked(checkpoint.matrix(f"{n}.weight", *SIZE) for n in range(num_experts))


@pytest.mark.parametrize("pack", [strips, pack_words])
def test_a_weight_takes_memory_by_the_piece_when_it_is_written(
    pack: Callable[..., torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a layer's experts all lay in memory, several times over: 6.7 GB for one layer of a 35B-A3B."""
    monkeypatch.setattr(weights, "PIECE", 2**15)
    most = []
    for num_experts, num_layers in ((4, 1), (40, 1), (40, 3)):
        lazy = experts(tmp_path, num_experts).packed(pack)
        named = {str(layer): lazy for layer in range(num_layers)}
        with Peak() as peak:
            weights.write_weights(named, tmp_path / "engine", lambda *progress: None)
        most.append(peak.most)
        found = load_file(tmp_path / "engine")
        assert all(same_bits(tensor, lazy.read()) for tensor in found.values()) and len(found) == num_layers
    assert most[0] == most[1] == most[2] < 20 * 2**15


def test_a_matrix_takes_memory_by_the_piece_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of very many rows, quantised or not."""
    monkeypatch.setattr(weights, "PIECE", 2**15)
    save_file({"top.weight": torch.ones(20000, 160, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    head = Checkpoint(tmp_path).matrix("top.weight", 20000, 160)
    narrow = RoundedTensors(Checkpoint(tmp_path), "int4", narrow_inputs=False).matrix(
        "top.weight", 20000, 160
    )
    for lazy in (head, head.take(lambda rows: rows[:15000]), join([narrow, narrow])):
        packed = lazy.packed(strips)
        with Peak() as peak:
            weights.write_weights({"head": packed}, tmp_path / "engine", lambda *progress: None)
        assert peak.most < 60 * 2**15 < packed.nbytes
