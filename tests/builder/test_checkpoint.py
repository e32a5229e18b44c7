"""Config reads, lazy tensors, and the checks that need no model."""

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from kit import checkpoints
from kit.refused import code_and_field, refused
from safetensors.torch import save_file

from hemiola.builder.build import Options, build
from hemiola.builder.checkpoint import Checkpoint, Config, file_in
from hemiola.builder.lazy import Lazy, join, stacked
from hemiola.runtime.errors import Refused


def folder_with(path: Path, tensors: dict[str, torch.Tensor], shards: int = 1, **config: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    checkpoints.write_tensors(path, tensors, shards)
    return path


def test_reads_are_typed() -> None:
    cfg = Config({"n": 3, "x": 1, "flag": True, "words": ["a"], "empty": None}, "config.json")
    assert cfg.read("n", int) == 3 and cfg.read("x", float) == 1.0 and cfg.read("words", list[str]) == ["a"]
    assert cfg.read("empty", int, 5) == 5 and cfg.read("missing", str, "d") == "d"
    for key, kind in (("flag", int), ("n", str), ("n", bool), ("words", list[int]), ("words", str)):
        assert code_and_field(partial(cfg.read, key, kind)) == ("wrong_type", key)
    assert code_and_field(lambda: cfg.read("empty", int)) == ("missing", "empty")


def test_require_accepts_the_default_when_absent_and_nothing_of_another_type() -> None:
    cfg = Config({"act": "gelu", "bias": 0, "none": None}, "config.json")
    cfg.require("missing", False)
    cfg.require("none", None, "swish")
    for key, accepted in (("act", "silu"), ("bias", False), ("none", "silu")):
        assert code_and_field(partial(cfg.require, key, accepted)) == ("unsupported", key)


@pytest.mark.parametrize("text", ['{"__float__": "Infinity"}', "Infinity", '"Infinity"'])
def test_every_spelling_of_infinity(text: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {})
    (folder / "config.json").write_text(f'{{"time_step_limit": [0.0, {text}]}}')
    assert Checkpoint(folder).config.read("time_step_limit", list[float]) == [0.0, math.inf]


@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_keep_their_dtypes(shards: int, tmp_path: Path) -> None:
    stored = {
        "a": torch.randn(2, 3).bfloat16(),
        "b": torch.randn(4).half(),
        "c": torch.randn(1, 2),
        "d": torch.randn(3, 3).bfloat16(),
    }
    checkpoint = Checkpoint(folder_with(tmp_path, stored, shards))
    for name, tensor in stored.items():
        lazy = checkpoint.tensor(name, *tensor.shape)
        assert lazy.dtype == tensor.dtype and torch.equal(lazy.read(), tensor)


def test_joined_tensors_take_the_smallest_dtype_that_holds_all() -> None:
    bf16, fp16, fp32 = (
        Lazy.of(torch.ones(2, 3, dtype=d)) for d in (torch.bfloat16, torch.float16, torch.float32)
    )
    assert join([bf16, bf16]).dtype == torch.bfloat16
    assert join([bf16, fp32]).dtype == join([bf16, fp16]).dtype == torch.float32
    assert join([bf16, bf16]).shape == join([bf16, bf16]).read().shape == (4, 3)
    assert stacked([bf16, fp32]).shape == (2, 2, 3)
    doubled = bf16.map(lambda w: 2 * w.float())
    assert doubled.dtype == torch.float32 and torch.equal(doubled.read(), torch.full((2, 3), 2.0))


def test_leftovers_are_named(tmp_path: Path) -> None:
    names = [*(f"t{i}" for i in range(7)), "model.visual.x", "x.model.visual.x"]
    tensors = {name: torch.zeros(1) for name in names}
    checkpoint = Checkpoint(folder_with(tmp_path, tensors, architectures=["SomeModel"]))
    checkpoint.tensor("t0", 1)
    with pytest.raises(Refused, match=r"does not know: t1, t2, t3, t4 and 3 more"):
        checkpoint.refuse_leftovers(r"model\.visual\.")


def test_eos_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {}, eos_token_id=7, text_config={"eos_token_id": [8, 9]})
    checkpoint = Checkpoint(folder)
    text = checkpoint.config.section("text_config")
    assert checkpoint.eos_ids(text) == (8, 9)
    assert checkpoint.eos_ids(checkpoint.config) == (7,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 11]}')
    assert checkpoint.eos_ids(text) == (2, 11)
    (folder / "generation_config.json").write_text("{}")
    assert checkpoint.eos_ids(text) == (8, 9)


def test_a_tensor_that_the_index_puts_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"a": torch.zeros(1), "b": torch.zeros(1)}, shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    first, second = index["weight_map"]["a"], index["weight_map"]["b"]
    index["weight_map"] = {"a": second, "b": first}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert code_and_field(lambda: Checkpoint(folder)) == ("damaged", "a")


def test_quantised_tensors_are_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {})
    save_file({"w": torch.zeros(2, dtype=torch.int8)}, folder / "model.safetensors")
    assert code_and_field(lambda: Checkpoint(folder).tensor("w", 2)) == ("unsupported", "w")


OPTIONS = Options(max_len=64, max_rows=2, max_step_tokens=32, drafts="none")
FILES = (
    "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    "tokenizer_config.json", "chat_template.jinja",
)  # fmt: skip


@pytest.fixture
def checkpoint(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy that may be changed; its engine would go to `engine` beside it."""
    return shutil.copytree(tiny_checkpoint("qwen3_5"), tmp_path / "models--a/snapshots/1")


@pytest.mark.parametrize("name", FILES)
def test_a_link_to_a_file_of_the_users_is_not_read(checkpoint: Path, tmp_path: Path, name: str) -> None:
    secret = tmp_path / "id_rsa"
    shutil.copyfile(checkpoint / name, secret) if (checkpoint / name).exists() else secret.write_text("key")
    (checkpoint / name).unlink(missing_ok=True)
    (checkpoint / name).symlink_to(secret)
    with pytest.raises(Refused, match=rf"{name} is a link to .*id_rsa; put the file itself into the folder"):
        build(checkpoint, tmp_path / "engine", OPTIONS)
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("name", [*FILES, "model.safetensors.index.json", "hf_quant_config.json"])
def test_a_pipe_in_a_checkpoint_is_refused_and_nobody_waits_for_it(
    checkpoint: Path, tmp_path: Path, name: str
) -> None:
    (checkpoint / name).unlink(missing_ok=True)
    os.mkfifo(checkpoint / name)
    with pytest.raises(Refused, match=rf"{name} is no regular file"):
        build(checkpoint, tmp_path / "engine", OPTIONS)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nowhere", "is a link to nothing; download it again"),
        ("../../blobs/lost", "is a link to nothing; download it again"),
        ("chat_template.jinja", "cannot be opened"),
        ("/dev/zero", "is a link to /dev/zero; put the file itself into the folder"),
        ("../../blobs", "is a link to ../../blobs; put the file itself into the folder"),
    ],
)
def test_a_link_in_a_circle_to_nothing_or_to_a_device_is_refused(
    checkpoint: Path, tmp_path: Path, target: str, said: str
) -> None:
    (tmp_path / "models--a/blobs").mkdir()
    (checkpoint / "chat_template.jinja").unlink(missing_ok=True)
    (checkpoint / "chat_template.jinja").symlink_to(target)
    with pytest.raises(Refused, match=rf"^[^ ]*( '|/)chat_template.jinja'? {re.escape(said)}"):
        build(checkpoint, tmp_path / "engine", OPTIONS)


def test_a_link_to_a_blob_that_is_a_pipe_or_a_folder_is_refused(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "models--a/snapshots/1", tmp_path / "models--a/blobs"
    folder.mkdir(parents=True)
    (blobs / "folder").mkdir(parents=True)
    os.mkfifo(blobs / "pipe")
    for target in ("pipe", "folder"):
        (folder / target).symlink_to(f"../../blobs/{target}")
        with pytest.raises(Refused, match=f"{target} is no regular file"):
            file_in(folder, target)


def test_a_folder_within_a_snapshot_and_a_link_to_one_have_the_snapshots_blobs(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "models--a/snapshots/1", tmp_path / "models--a/blobs"
    for place in (folder / "original", blobs):
        place.mkdir(parents=True)
    (blobs / "0").write_text("{}")
    (tmp_path / "current").symlink_to(folder)
    (folder / "config.json").symlink_to("../../blobs/0")
    (folder / "original/config.json").symlink_to("../../../blobs/0")
    for place in (folder, folder / "original", tmp_path / "current", tmp_path / "current/original"):
        assert file_in(place, "config.json") == place / "config.json"
    assert file_in(folder, "lost") is None


def test_a_link_to_blobs_from_a_folder_that_is_no_snapshot_is_not_read(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "models--a/copies/1", tmp_path / "models--a/blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "0").write_text("{}")
    (folder / "config.json").symlink_to("../../blobs/0")
    with pytest.raises(
        Refused, match=r"^[^ ]* is a link to ../../blobs/0; put the file itself into the folder$"
    ):
        file_in(folder, "config.json")


SHA = "ab" + "0" * 62


@pytest.mark.parametrize(
    ("target", "is_read"),
    [
        (f"blobs/ab/{SHA}", True),
        (f"blobs/cd/{SHA}", False),
        (f"blobs/ab/{SHA}0", False),
        ("blobs/ab/ab.refs", False),
        (f"blobs/AB/{SHA.upper()}", False),
        (f"blobs/{SHA}", False),
        (f"other/ab/{SHA}", False),
        (f"models--b/blobs/{SHA}", False),
    ],
)
def test_of_what_models_share_only_blobs_are_read(target: str, is_read: bool, tmp_path: Path) -> None:
    folder = tmp_path / "models--a/snapshots/1"
    for place in (folder, (tmp_path / target).parent):
        place.mkdir(parents=True)
    (tmp_path / target).write_text("{}")
    (folder / "config.json").symlink_to(f"../../../{target}")
    if is_read:
        assert file_in(folder, "config.json")
    else:
        with pytest.raises(Refused, match="is a link to"):
            file_in(folder, "config.json")


def test_a_cache_of_the_hub_links_to_its_own_blobs(checkpoint: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "models--a/blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(checkpoint.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../../blobs/{number}")
    build(checkpoint, tmp_path / "engine", OPTIONS)
    copied = tmp_path / "engine/tokenizer/tokenizer.json"
    assert copied.read_bytes() == (checkpoint / "tokenizer.json").read_bytes() and not copied.is_symlink()


@pytest.mark.parametrize("place", ["another repository", "behind a blob", "blobs that are a link"])
def test_a_link_to_blobs_of_somebody_else_is_not_read(checkpoint: Path, tmp_path: Path, place: str) -> None:
    blobs, others = tmp_path / "models--a/blobs", tmp_path / "models--b/blobs"
    others.mkdir(parents=True)
    (others / "key").write_text("key")
    template = checkpoint / "chat_template.jinja"
    template.unlink(missing_ok=True)
    if place == "another repository":
        template.symlink_to("../../../models--b/blobs/key")
    elif place == "behind a blob":
        blobs.mkdir()
        (blobs / "key").symlink_to(others / "key")
        template.symlink_to("../../blobs/key")
    else:
        blobs.symlink_to(others)
        template.symlink_to("../../blobs/key")
    with pytest.raises(Refused, match=r"chat_template.jinja is a link to"):
        build(checkpoint, tmp_path / "engine", OPTIONS)


@pytest.mark.parametrize(
    "name", ["../../x.safetensors", "/etc/passwd", "a/../x", "", ".", "..", "a\0b", "a\nb", "x" * 300, "lost"]
)
def test_an_index_names_files_of_its_folder_only(tmp_path: Path, name: str) -> None:
    folder = folder_with(tmp_path / "a", {"w": torch.zeros(1)}, shards=2)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    save_file({"w": torch.zeros(1)}, tmp_path / "x.safetensors")
    assert "download it again" in str(refused(lambda: Checkpoint(folder)))


def test_code_that_a_config_names_is_not_run_and_that_is_said(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    (checkpoint / "evil.py").write_text(f"open({str(tmp_path / 'made')!r}, 'w')")
    build(checkpoint, tmp_path / "engine", OPTIONS)
    assert "names code of its own (auto_map); it is not run" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("shape", [[0, 2**64 - 1], [2**60, 0, 2**60]])
def test_sizes_that_torch_cannot_multiply_are_a_traceback(shape: list[int], tmp_path: Path) -> None:
    """Beside a zero any size is right to safetensors."""
    header = json.dumps({"X.weight_shape": {"dtype": "I64", "shape": shape, "data_offsets": [0, 0]}}).encode()
    folder = folder_with(tmp_path / "odd", {})
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(Refused, match=r"X.weight_shape is described as no writer does"):
        Checkpoint(folder)


def test_a_file_that_is_cut_before_it_is_read_gives_what_was_in_memory(tmp_path: Path) -> None:
    lazy = Checkpoint(folder_with(tmp_path / "cut", {"w": torch.ones(8, 4)})).tensor("w", 8, 4)
    path = tmp_path / "cut" / "model.safetensors"
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(Refused, match=r"cannot read w \(the file was changed during the build\)"):
        lazy.read(0, 7)
    with pytest.raises(Refused, match=r"cannot read w \(the file ends before it\)"):
        lazy.read()


@pytest.mark.parametrize("is_in_place", [True, False])
def test_a_checkpoint_that_is_saved_again_during_a_build_gives_weights_of_both(
    is_in_place: bool, tmp_path: Path
) -> None:
    """Of the same names and sizes, as a training saves them over and over."""
    lazy = Checkpoint(folder_with(tmp_path / "saved", {"w": torch.ones(8, 4)})).tensor("w", 8, 4)
    path = tmp_path / "saved" / "model.safetensors"
    assert lazy.read(0, 4).eq(1).all()
    other = folder_with(tmp_path / "other", {"w": torch.zeros(8, 4)}) / "model.safetensors"
    os.utime(other, ns=(0, path.stat().st_mtime_ns + 10**9))
    if is_in_place:
        path.write_bytes(other.read_bytes())
        os.utime(path, ns=(0, other.stat().st_mtime_ns))
    else:
        other.rename(path)
    with pytest.raises(Refused, match=r"cannot read w \(the file was changed during the build\)"):
        lazy.read(4, 8)
