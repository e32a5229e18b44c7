"""`hemiola inspect`: what it says of engines of every kind, and the picture."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from kit import quantised
from rich.table import Table

from hemiola.builder.build import build
from hemiola.builder.options import Options
from hemiola.runtime import manifest
from hemiola.runtime.cli import inspect, inspected
from hemiola.runtime.cli.graph_plot import (
    KINDS,
    MAX_DRAWN,
    Box,
    DrawnBlock,
    DrawnLayer,
    Placed,
    Repeat,
    blocks_of,
    draw,
    folded,
    held_by,
    layers_of,
)
from hemiola.runtime.cli.stored_weights import stored_weights
from hemiola.runtime.config import ServeConfig
from hemiola.runtime.errors import Refused

Get = Callable[..., Path]


def lines(table: Table) -> list[list[str]]:
    """The cells of a table."""
    return [list(row) for row in zip(*(column.cells for column in table.columns), strict=True)]


def test_equal_states_of_equal_layers_share_a_line(tiny_engine: Get) -> None:
    found = manifest.load(tiny_engine("qwen3_5"))
    table = lines(inspected.states(found))
    named = {(line[0], line[1]): line for line in table}
    assert ("state", "0-1, 3") in named and ("k_pages", "2") in named
    assert ["mtp.k_pages", "0"] in [line[:2] for line in table], "the head's are not the trunk's"
    assert ["mtp.hidden", ""] in [line[:2] for line in table]
    assert len(table) == 11 < len(found.states)


def test_a_strangers_engine_is_shown_as_it_wrote_itself(
    tiny_engine: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Brackets are no markup, and there is nothing that a terminal obeys."""
    engine = shutil.copytree(tiny_engine("qwen3_5"), tmp_path / "engine")
    content = json.loads((engine / manifest.FILE).read_text())
    content["segments"][0]["nodes"][0]["refused"] = {"why": "[/red] of [bold]"}
    (engine / manifest.FILE).write_text(json.dumps(content))
    found = manifest.parse(engine / manifest.FILE).write(engine)
    inspected.show(engine, found, ServeConfig())
    assert "[/red]" in capsys.readouterr().out
    content["segments"][0]["nodes"][0]["refused"] = {"why": "\x1b]0;x\x07"}
    (engine / manifest.FILE).write_text(json.dumps(content))
    with pytest.raises(Refused, match="a line of printable characters"):
        manifest.parse(engine / manifest.FILE)


def test_quantised_weights_are_listed_with_their_format_and_bytes(
    tiny_checkpoint: Get, tmp_path: Path
) -> None:
    recipe = quantised.RECIPES["modelopt_mixed"]
    copies = quantised.quantise(tiny_checkpoint("qwen3_5"), tmp_path, recipe)
    found = build(copies.quantised, tmp_path / "engine", Options(max_len=256, page_len=32))
    table = lines(inspected.weights(tmp_path / "engine", found))
    assert ["mixer.body.out_proj.weight", "0-1, 3", "e4m3 by output", "9,984"] in table
    assert ["head.weight", "", "e2m1 by 16", f"{320 * 64 // 2 + 320 * 4 * 4:,}"] in table
    told = inspected.described(tmp_path / "engine", found, ServeConfig())["quantised_weights"]
    assert [entry["name"] for entry in told] == [line[0] for line in table]
    assert (
        sum(entry["num_bytes"] for entry in told) < (tmp_path / "engine" / found.weights_file).stat().st_size
    )


def test_an_engine_without_quantised_weights_lists_none(tiny_engine: Get) -> None:
    engine_dir = tiny_engine("qwen3_5")
    assert stored_weights(engine_dir, manifest.load(engine_dir)) == []


def test_spans_of_layers() -> None:
    assert inspected.spans([5, 0, 1, 2, 7, 8]) == "0-2, 5, 7-8" and inspected.spans([]) == ""


def test_the_memory_plan_is_what_the_runtime_would_take(tiny_engine: Get) -> None:
    engine_dir = tiny_engine("qwen3_5")
    found = manifest.load(engine_dir)
    plan = lines(inspected.memory(engine_dir, found, ServeConfig(max_rows=2, max_len=64)))
    assert [line[1] for line in plan] == ["1", "9", "3", "8", ""]  # 2 x 2 rows of 2 pages, 4 snapshots a row
    wide = inspected.memory(engine_dir, found, ServeConfig(num_snapshots=0, prefix_cache=False))
    assert wide.title == "memory for 8 rows of 512 tokens, drafts: mtp"
    with pytest.raises(Refused, match="max_rows is 9, the engine was built for 8"):
        inspected.memory(engine_dir, found, ServeConfig(max_rows=9))


def test_a_cut_engine_says_what_it_promises_and_who_compiled_it(
    tiny_engine: Get, capsys: pytest.CaptureFixture[str]
) -> None:
    engine_dir = tiny_engine("nemotron_h_moe", target="onnxruntime")
    inspect.inspect(engine_dir)
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("onnxruntime, cpu", "tokens of the plain run", "parts,", "them different,"):
        assert words in shown, words
    table = dict(lines(inspected.facts(engine_dir, manifest.load(engine_dir))))
    assert table["promise"] == inspected.PROMISES["tokens"]


def test_profiles_and_kernels_of_an_engine_for_gpus_are_listed(tiny_engine: Get) -> None:
    pytest.importorskip("tensorrt_rtx")
    engine_dir = tiny_engine("qwen3_5", target="tensorrt-rtx", arch="sm_89,sm_120")
    found = manifest.load(engine_dir)
    assert lines(inspected.profiles(found))[0] == ["trunk", "decode", "tokens 1/32/32, logits 0/32/32"]
    assert [line[0] for line in lines(inspected.kernels(engine_dir, found))] == ["sm_89", "sm_120"]
    assert "by tensorrt-rtx 1." in lines(inspected.segments(engine_dir, found))[0][1]


@pytest.mark.parametrize(
    ("built", "dtype"),
    [({}, "float32"), ({"arch": "sm_90"}, "bfloat16"), ({"arch": "sm_90", "dtype": "float32"}, "float32")],
    ids=str,
)
def test_an_engine_says_what_it_computes_in(tiny_engine: Get, built: dict, dtype: str) -> None:
    """Of two engines for a GPU only the dtypes of states told which was the one in fp32."""
    engine_dir = tiny_engine("qwen3_5", kv_dtype="fp8", **built)
    table = dict(lines(inspected.facts(engine_dir, manifest.load(engine_dir))))
    assert table["computes in"] == dtype


def test_layers_that_repeat_are_drawn_once() -> None:
    steps = ["embed", *["a", "b", "a", "b", "c"] * 3, "end", "end"]
    assert folded(steps) == [Repeat(("embed",), 1), Repeat(("a", "b", "a", "b", "c"), 3), Repeat(("end",), 2)]
    assert folded(["x", "y", "z"]) == [Repeat(("x", "y", "z"), 1)] and folded([]) == []


OWNS = {"delta": {"slot"}, "mamba2": {"slot"}, "attention": {"page"}}
FAMILIES = ["qwen3_5", "nemotron_h_dense", "nemotron_h_moe"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_is_drawn_once_and_no_repeat_cuts_one_in_two(tiny_engine: Get, family: str) -> None:
    """Ops were folded, so that a repeat began in the middle of a layer."""
    found = manifest.load(tiny_engine(family))
    layers, blocks = layers_of(found), blocks_of(layers_of(found))
    drawn = {number: placed.layer for block in blocks for placed in block.layers for number in placed.numbers}
    assert drawn == dict(enumerate(layers)) and len(layers) == len(found.layers)
    assert sum(len(placed.numbers) for block in blocks for placed in block.layers) == len(layers)
    for kind, layer in zip(found.layers, layers, strict=True):
        assert layer.boxes[0].title == KINDS[kind]
        assert {state.kind for state in layer.boxes[0].states} == OWNS.get(kind, set())
    owned = [state for layer in layers for box in layer.boxes for state in box.states]
    assert len(owned) == sum(not state.name.startswith("mtp.") for state in found.states)


def test_layers_that_repeat_inside_of_a_repeat_are_numbered() -> None:
    one, other = (DrawnLayer((Box(title, "#ffffff"),)) for title in ("one", "other"))
    (block,) = blocks_of([one, one, one, other] * 2)
    assert block == DrawnBlock((Placed(one, (0, 1, 2, 4, 5, 6)), Placed(other, (3, 7))), 2)


@pytest.mark.parametrize("options", [{}, {"target": "onnxruntime"}, {"drafts": "ngram"}], ids=str)
def test_a_picture_says_what_flows_and_where_states_and_drafts_are(
    tiny_engine: Get, tmp_path: Path, options: dict
) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    found = manifest.load(tiny_engine("nemotron_h_moe", **options))
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(tmp_path / "graph.svg", found)
    shown = (tmp_path / "graph.svg").read_text()
    words = ["token ids", f"logits of {found.vocab_size:,}", "Mamba-2", f">{found.hidden_size}<", ">+<"]
    words += [f"up to {found.limits.num_drafts} drafts", found.architecture]
    words += ["prompt lookup"] if options.get("drafts") == "ngram" else ["MTP head", "mtp.hidden"]
    for layer in layers_of(found):
        words += [
            line for _, lines in held_by(layer.boxes[0].states, found.limits.page_len) for line in lines
        ]
    assert [word for word in words if word not in shown] == []
    draw(tmp_path / "graph.png", found)
    assert (tmp_path / "graph.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_a_strangers_layers_takes_gigabytes(tiny_engine: Get, tmp_path: Path) -> None:
    """A manifest may name 16,384, each of its own kind; the picture grew with them."""
    found = manifest.load(tiny_engine("qwen3_5"))
    many = found.model_copy(update={"layers": tuple(f"kind {n}" for n in range(MAX_DRAWN + 1))})
    with pytest.raises(Refused, match=f"has {MAX_DRAWN + 1} layers, at most {MAX_DRAWN} are drawn; leave"):
        draw(tmp_path / "graph.svg", many)
    assert not any(tmp_path.iterdir())


def test_a_picture_of_no_kind_is_refused_before_the_engine_is_read(tmp_path: Path, hemiola: Callable) -> None:
    pytest.importorskip("matplotlib")
    ended = hemiola("inspect", "--engine-dir", tmp_path / "none", "--plot", tmp_path / "graph.nothing")
    assert ended.status == 2 and ended.err.endswith(
        "graph.nothing ends in .nothing, which is no kind of picture;"
        " give a path that ends in .png, .svg or .pdf\n"
    )
