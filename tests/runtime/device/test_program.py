"""What a program's file may say: calls from a list, names, numbers. It is data, whoever wrote it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hemiola.builder import graph
from hemiola.runtime import manifest
from hemiola.runtime.device.program import CALLS, EXACT, load_program
from hemiola.runtime.errors import Refused
from hemiola.runtime.outline import MOST_LINES

X = ["x", "", [], {"dtype": "float32"}, [None, 4]]
END = ["output", "output", [[{"node": "x"}, {"node": "x"}]]]


def _file(folder: Path, *lines: object) -> Path:
    path = folder / "trunk.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


@pytest.mark.parametrize("place", ["input", "call"])
@pytest.mark.parametrize(
    "name",
    [
        "x=__import__('os').system('touch {made}')",
        "x: __import__('os').system('touch {made}')",
        "x):\n __import__('os').system('touch {made}')\ndef f(y",
        "*x",
        "self",
        "class",
        "print",
        "__class__",
        "x y",
        "",
        "x" * 1000,
        7,
        None,
    ],
)
def test_a_name_in_a_program_is_not_run_as_code(tmp_path: Path, name: object, place: str) -> None:
    made = tmp_path / "made"
    name = name.replace("{made}", str(made)) if isinstance(name, str) else name
    called = "" if place == "input" else "aten.relu.default"
    bad = [name, called, [{"node": "x"}] if called else []]
    with pytest.raises(Refused, match=r"trunk.jsonl, line 2: .*; run build-engine again$"):
        load_program(_file(tmp_path, X, bad, END))
    assert not made.exists()


UNKNOWN = [
    "load_library", "_dl_open_guard", "hemiola.__class__", "aten.add.__init__", "operator.attrgetter",
    "operator.methodcaller", "operator.call", "prim.Print.default", "aten.from_file.default",
    "aten.relu_.default", "aten.as_strided.default", "call_module", "get_attr", "hemiola.lost.default", 3,
]  # fmt: skip
ARGUMENTS = [
    ([{"dtype": "load"}], "'load' is no dtype"),
    ([{"dtype": ["float32"]}], "is no dtype"),
    ([{"node": "z"}], "'z' was not computed before"),
    ([{"node": ["x"]}], "was not computed before"),
    ([{"code": 1}], "is no argument"),
    ([{"node": "x", "dtype": "float32"}], "is no argument"),
    ([float("nan")], "is no argument"),
    ([2**63], "is no argument"),
    ([[[[[1]]]]], "is no argument"),
    ("x", "expected a list of arguments"),
]
LINES = [
    *[([X, ["y", name, ["/tmp/x"]], END], "line 2: .* which no program may call") for name in UNKNOWN],
    *[([X, ["y", "aten.relu.default", args], END], f"line 2: .*{said}") for args, said in ARGUMENTS],
    ([X, X, END], "line 2: 'x' is the name of two values"),
    ([X, ["y", "aten.relu.default", [{"node": "x"}]], ["z", "", []], END], "line 3: .*behind a call"),
    ([X], "does not end with its output"),
    ([], "does not end with its output"),
    ([X, END, X], "line 3: .*behind the output"),
    ([X, ["output", "output", [{"node": "x"}]]], "line 2"),
    ([X, ["output", "output", []]], "line 2"),
    ([{"x": 1}], "line 1"),
    ([X[:2]], "line 1"),
    ([[*X[:4], [2**60, 2**60]], END], "line 1"),
    ([[*X[:4], [-1]], END], "line 1"),
    ([[*X[:4], [1] * 100], END], "line 1"),
    ([[*X[:3], "float32", [4]], END], "line 1"),
]


@pytest.mark.parametrize(("lines", "said"), LINES)
def test_a_program_is_read_line_by_line_and_the_wrong_one_is_named(
    tmp_path: Path, lines: list[object], said: str
) -> None:
    """Calls from a list, of nodes, dtypes and numbers."""
    with pytest.raises(Refused, match=said):
        load_program(_file(tmp_path, *lines))


@pytest.mark.parametrize("args", [[], [{"node": "x"}], [{"node": "x"}, 0, 0], [5, 0], [{"node": "x"}, "0"]])
def test_an_item_of_nothing_is_a_traceback(tmp_path: Path, args: list[object]) -> None:
    """torch.fx writes x[0] as code of Python's, and looked for both."""
    with pytest.raises(Refused, match=r"trunk.jsonl, line 2: 'y' takes .*; run build-engine again$"):
        load_program(_file(tmp_path, X, ["y", "operator.getitem", args], END))


def test_a_line_that_is_nested_too_deeply_or_no_json_is_refused(tmp_path: Path) -> None:
    for text in ("[" * 100_000, '["x", "", ' + "9" * 10_000 + "]", "nonsense", "\0", ""):
        (tmp_path / "trunk.jsonl").write_text(text)
        with pytest.raises(Refused, match=r"trunk.jsonl.*; run build-engine again$"):
            load_program(tmp_path / "trunk.jsonl")


def test_a_program_of_millions_of_inputs_takes_their_square(tmp_path: Path) -> None:
    """40,000 took half a minute, and a file of the size that was allowed had 4 million."""
    inputs = [[f"x{n}", *X[1:]] for n in range(MOST_LINES)]
    with pytest.raises(Refused, match=f"has {MOST_LINES + 1} lines, a program at most {MOST_LINES}; run"):
        load_program(_file(tmp_path, *inputs, END))
    first, *rest = inputs[: MOST_LINES // 4]
    load_program(_file(tmp_path, ["x", *first[1:]], *rest, END))


def test_builder_and_runtime_share_the_list_of_calls(tiny_engine: Callable[..., Path]) -> None:
    engine_dir = tiny_engine("nemotron_h_moe")
    for segment in manifest.load(engine_dir).segments:
        targets = {n.target for n in load_program(engine_dir / segment.file).graph.nodes} - {"output"}
        assert {target for target in targets if not isinstance(target, str)} <= set(CALLS.values())
    assert set(EXACT) < set(CALLS.values()) and graph.EXACT is EXACT
