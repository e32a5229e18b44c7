"""Engines that a stranger made: each field of each file, wrong in each way. They are refused in one line, or
open and answer; never a traceback, a crash, a hang, gigabytes, or anything that is run."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.hostile import Opener
from kit.stranger import DEEP, WRONG, Stranger, all_places, places, put
from pydantic import BaseModel
from safetensors.torch import load_file, save_file

from hemiola.runtime import manifest, outline
from hemiola.runtime.api import SamplingParams
from hemiola.runtime.device import session
from hemiola.runtime.device.session import load_weights
from hemiola.runtime.engine_files import check_files
from hemiola.runtime.errors import Refused
from hemiola.runtime.llm import LLM
from hemiola.runtime.manifest import FILE, Manifest
from hemiola.runtime.outline import MOST_LINES
from hemiola.runtime.text import Text

# Free text, shown to people; and what is refused at another door, or is the same on every machine.
SHOWN = {"architecture", "layers", "refused", "builder_version", "torch_version"}


@pytest.fixture(scope="module")
def opener() -> Iterator[Opener]:
    made = Opener()
    yield made
    made.check_sound()
    made.close()


@pytest.fixture
def stranger(tiny_engine: Callable[..., Path], tmp_path: Path, opener: Opener) -> Stranger:
    return Stranger(tiny_engine("nemotron_h_moe"), tmp_path, opener)


def filled(content: dict[str, Any]) -> dict[str, Any]:
    """With what only engines for GPUs, cut ones, random ones and quantised ones have."""
    content = json.loads(json.dumps(content))
    tensor_map = {"swizzle": 3, "item": 9, "item_bytes": 2, "box": [64, 64]}
    call = {"kernel": "delta._scan", "kinds": ["*bf16:16", "i32"], "constants": [["num_warps", 4]]}
    binary = {
        "call": call, "symbol": "_scan", "shared": 0, "threads": 128, "maps": [tensor_map], "waits": False
    }  # fmt: skip
    file = next(iter(content["sha256"]))
    content["kernels"] = [
        {"arch": "sm_90", "cuda": "12.8", "sources": "", "binaries": [{"file": file, "binary": binary}]}
    ]
    content["drawn"] = {
        "w": {"shape": [4, 16], "dtype": "float32", "std": 0.5, "layout": "int8 16", "ranked": True}
    }
    segment = content["segments"][0]
    part = {"kind": "part", "name": "x", "inputs": ["a"], "outputs": ["b"], "constants": [1]}
    segment["pieces"], segment["compiler"] = [part], "onnxruntime 1.0"
    segment["layouts"] = {"w": "int4 32"}
    segment["profiles"] = [{"name": "decode", "sizes": {"T": [1, 2, 3]}}]
    content["sha256"]["parts/x"] = "0" * 64
    return content


def fields(kind: Any) -> Iterator[str]:
    """Of a model, and of what it is made of."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            yield f"{kind.__name__}.{name}"
            yield from fields(field.annotation)
    for part in get_args(kind):
        yield from fields(part)


def test_the_table_has_every_field_of_a_manifest(stranger: Stranger) -> None:
    content = filled(stranger.content())
    seen = {step for path in places(content) for step in path if isinstance(step, str)}
    lost = [name for name in fields(Manifest) if name.split(".")[1] not in seen]
    assert not lost, f"fill them in: {lost}"


@pytest.mark.parametrize("wrong", WRONG)
def test_every_field_of_a_manifest_that_is_wrong_is_refused_or_harmless(
    stranger: Stranger, wrong: str
) -> None:
    """What is refused as it stands needs no engine; the others are opened."""
    value = WRONG[wrong]
    value = value.replace("{made}", str(stranger.made)) if isinstance(value, str) else value
    for whole in (stranger.content(), filled(stranger.content())):
        for path in places(whole):
            if path[0] in ("format", "identity"):
                continue
            (stranger.dir / FILE).write_text(json.dumps(put(whole, path, value)))
            try:
                manifest.parse(stranger.dir / FILE)
            except Refused as error:
                said = str(error)
                assert "\n" not in said and len(said) < 1200 and said.endswith("; run build-engine again")
                continue
            found = stranger.outcome()
            if "tokens" in found and not set(path) & {*SHOWN, "eos_ids", "ops", "sha256", "draft_vocab"}:
                assert found == stranger.expected, path


def test_a_list_of_a_manifest_that_no_program_needs_is_a_hang(stranger: Stranger) -> None:
    """`hemiola inspect` counted each of them among all."""
    whole = stranger.content()
    for path in (("layers",), ("states",), *(("segments", 0, key) for key in ("weights", "states", "nodes"))):
        at: Any = whole
        for step in path:
            at = at[step]
        (stranger.dir / FILE).write_text(json.dumps(put(whole, path, at * (MOST_LINES // len(at) + 1))))
        with pytest.raises(Refused, match=f"{path[-1]}.* {MOST_LINES}"):
            manifest.parse(stranger.dir / FILE)


def test_a_size_of_a_profile_controls_a_terminal(stranger: Stranger) -> None:
    content = stranger.content()
    content["segments"][0]["profiles"] = [{"name": "decode", "sizes": {"\x1b]0;a\x07": [1, 2, 3]}}]
    (stranger.dir / FILE).write_text(json.dumps(content))
    assert "printable characters" in stranger.outcome()["refused"]


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("x", [], "states["),
        ("layers.9.conv", [99], "nobody knows what of the state layers.9.conv stands at an edge"),
        ("layers.9.conv", [9, 9, 9], "nobody knows what of the state layers.9.conv stands at an edge"),
    ],
)
def test_a_state_of_other_sizes_is_a_traceback_when_a_prefix_is_exported(
    stranger: Stranger, name: str, shape: list[int], said: str
) -> None:
    content = stranger.content()
    content["states"].append({"name": name, "kind": "slot", "shape": shape, "dtype": "float32"})
    (stranger.dir / FILE).write_text(json.dumps(content))
    assert said in stranger.outcome()["refused"]


@pytest.mark.parametrize("change", ["missing", "extra", "twice"])
def test_a_field_that_is_missing_unknown_or_there_twice_is_refused_by_name(
    stranger: Stranger, change: str
) -> None:
    whole = filled(stranger.content())
    optional = {
        "draft_vocab",
        "draft_head",
        "repo",
        "commit",
        "identity",
        "pieces",
        "outputs",
        "compiler",
        "profiles",
        "work_bytes",
        "constants",
        "layout",
        "ranked",
        "tp",
        "sum_segments",
        "rank_files",
        "head",
        "lines_file",
        "scores",
        "layouts",
    }
    for path in places(whole):
        key, at = path[-1], cast(Any, whole)
        for step in path[:-1]:
            at = at[step]
        if not isinstance(key, str) or key in optional or (path[-2:-1] and path[-2] in ("sha256", "ops")):
            continue
        if path[-2:-1] and path[-2] in ("refused", "sizes", "drawn", "layouts"):
            continue  # their keys are names
        copied = json.loads(json.dumps(at))
        if change == "missing":
            del copied[key]
        elif change == "extra":
            copied[f"{key}_of_mine"] = 1
        text = json.dumps(put(whole, path[:-1], copied) if path[:-1] else copied)
        if change == "twice":
            mark = json.dumps(put(whole, path, "MARK"))
            text = mark.replace(f'{json.dumps(key)}: "MARK"', f"{json.dumps(key)}: 1, {json.dumps(key)}: 1")
        (stranger.dir / FILE).write_text(text)
        with pytest.raises(Refused) as refused:
            manifest.parse(stranger.dir / FILE)
        assert key in str(refused.value) or path == ("format",), path


@pytest.mark.parametrize("kind", ["link", "link to a folder", "pipe", "folder", "device"])
def test_a_file_that_leads_out_of_the_engine_is_refused(
    stranger: Stranger, tmp_path: Path, kind: str
) -> None:
    for name in stranger.content()["sha256"]:
        stranger.reset()
        path = stranger.dir / name
        if kind == "link to a folder":
            if path.parent == stranger.dir:
                continue
            path.parent.rename(tmp_path / "elsewhere")
            path.parent.symlink_to(tmp_path / "elsewhere")
        else:
            path.rename(tmp_path / "elsewhere")
            replace(path, kind, tmp_path / "elsewhere")
        said = stranger.outcome(sign=False)["refused"]
        assert str(path.parent) in said, said
        shutil.rmtree(tmp_path / "elsewhere", ignore_errors=True)


def replace(path: Path, kind: str, elsewhere: Path) -> None:
    import os

    match kind:
        case "link":
            path.symlink_to(elsewhere)
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/zero")


def program_lines(text: bytes) -> list[list[Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_every_place_of_a_program_that_is_wrong_is_refused_or_harmless(stranger: Stranger) -> None:
    """One line of each call, each place of it, in two ways each; all ways come round. Some are values that
    the program has: the first weight, each input of a step, a late result."""
    lines = program_lines((stranger.source / "trunk.jsonl").read_bytes())
    inputs = [line[0] for line in lines if line[1] == ""]
    known = [{"node": name} for name in (inputs[0], *inputs[-5:], lines[-3][0])]
    ways = [*WRONG.values(), *known, {"dtype": "load"}]
    first = {line[1]: number for number, line in reversed(list(enumerate(lines)))}
    turn = 0
    for number in first.values():
        for path in all_places(lines[number]):
            for _ in range(2):
                turn += 1
                value = ways[turn % len(ways)]
                value = value.replace("{made}", str(stranger.made)) if isinstance(value, str) else value
                changed = [*lines[:number], put(lines[number], path, value), *lines[number + 1 :]]
                stranger.change("trunk.jsonl", lambda _, c=changed: "\n".join(map(json.dumps, c)).encode())
                stranger.outcome()


def test_a_step_that_takes_more_memory_than_there_is_ends_the_process(
    tiny_engine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may join a value to itself twenty times: half a gigabyte for each token."""
    monkeypatch.setattr("hemiola.plugins.cpu.steps.usual_threads", lambda: 1)
    monkeypatch.setattr("hemiola.runtime.step.recorded.free_bytes_of_host", lambda: 1_000_000)
    said = (
        r"no memory for a step of 256 tokens: it takes \d+ bytes, and 1000000 are free; lower max_step_tokens"
    )
    with pytest.raises(Refused, match=said):
        LLM(tiny_engine("nemotron_h_moe"))
    with LLM(tiny_engine("nemotron_h_moe"), max_rows=1, max_step_tokens=8):
        pass


def test_a_program_that_few_requests_need_is_read_when_one_comes(stranger: Stranger) -> None:
    """That of every line, for log-probabilities of prompts. What was wrong with it, or what had come into the
    folder by then, ended the engine."""
    sizes: dict[str, Any] = {"drafts": "none", "max_rows": 2, "num_pages": 40}
    lines = program_lines((stranger.source / "trunk.jsonl").read_bytes())
    wide = next(n for n, line in enumerate(lines) if line[1] == "aten.add.Tensor")
    doubled = [lines[wide][0], *(f"wide_{n}" for n in range(12))]
    joins = [[name, "aten.cat.default", [[{"node": before}] * 2, 1]] for before, name in pairwise(doubled)]
    for changed, said in (
        (lines[1:], "trunk.jsonl"),
        ([*lines[: wide + 1], *joins, *lines[wide + 1 :]], "takes"),
    ):
        stranger.change("trunk.jsonl", lambda _, c=changed: "\n".join(map(json.dumps, c)).encode())
        assert stranger.sign() is None
        with pytest.raises(Refused, match=said):
            LLM(stranger.dir, **sizes)
    stranger.reset()
    with LLM(stranger.dir, **sizes) as llm:
        (stranger.dir / "trunk.jsonl").write_text("")
        (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1, prompt_logprobs=0))
        assert output.prompt_logprobs is not None


def another(stranger: Stranger) -> Path:
    """An engine with other weights, beside this one."""
    stranger.change("weights.safetensors", lambda data: data[:-64] + bytes(64))
    assert stranger.sign() is None
    made = stranger.dir.rename(stranger.dir.with_name("other"))
    stranger.reset()
    return made


def test_an_engine_that_is_replaced_while_it_is_opened_runs_with_weights_of_another(
    stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its identity, by which files of prefixes and other engines know its bits, would be the first one's."""
    replaced = another(stranger)

    def read_later(*given: Any, **more: Any) -> dict[str, torch.Tensor]:
        if replaced.exists():
            shutil.rmtree(stranger.dir)
            replaced.rename(stranger.dir)
        return load_weights(*given, **more)

    monkeypatch.setattr(session, "load_weights", read_later)
    with pytest.raises(Refused, match=r"engine became another engine while it was opened; open it again"):
        LLM(stranger.dir, drafts="none")
    LLM(stranger.dir, drafts="none").close()


@pytest.mark.parametrize("load", [outline.load, manifest.load], ids=["outline", "manifest"])
def test_an_engine_that_is_replaced_while_its_files_are_compared_is_called_damaged(
    stranger: Stranger, monkeypatch: pytest.MonkeyPatch, load: Callable[[Path], object]
) -> None:
    """To build it again does not help."""
    replaced = another(stranger)

    def check_later(*given: Any) -> None:
        shutil.rmtree(stranger.dir)
        replaced.rename(stranger.dir)
        check_files(*given)

    monkeypatch.setattr(outline, "check_files", check_later)
    with pytest.raises(Refused, match=r"engine became another engine while it was opened; open it again"):
        load(stranger.dir)


HEADERS: dict[str, Callable[[dict[str, Any], str], object]] = {
    "huge shape": lambda header, name: header[name].update(shape=[2**60, 2**60]),
    "shape past the file": lambda header, name: header[name].update(shape=[2**40]),
    "negative": lambda header, name: header[name].update(shape=[-1]),
    "another shape": lambda header, name: header[name].update(shape=[1, *header[name]["shape"]]),
    "offsets behind the end": lambda header, name: header[name].update(data_offsets=[0, 2**62]),
    "offsets that turn": lambda header, name: header[name].update(data_offsets=[64, 0]),
    "dtype": lambda header, name: header[name].update(dtype="I8"),
    "no dtype": lambda header, name: header[name].update(dtype="__class__"),
    "no name": lambda header, name: header.pop(name),
    "another name": lambda header, name: header.update({f"{name}.": header.pop(name)}),
    "metadata": lambda header, name: header.update(__metadata__={"a": [1]}),
    "deep": lambda header, name: header.update({name: DEEP}),
    "nan": lambda header, name: header[name].update(shape=[float("nan")]),
}


@pytest.mark.parametrize("way", HEADERS)
def test_a_header_of_weights_that_is_wrong_is_refused(stranger: Stranger, way: str) -> None:
    path = stranger.source / "weights.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    names = json.loads(data[8 : 8 + size])
    for name in list(names)[:: max(len(names) // 5, 1)]:
        header = json.loads(data[8 : 8 + size])
        HEADERS[way](header, name)
        text = json.dumps(header).encode()
        stranger.change(path.name, lambda d, t=text: len(t).to_bytes(8, "little") + t + d[8 + size :])
        assert "refused" in stranger.outcome(), name


@pytest.mark.parametrize("length", [0, 2**63, 2**64 - 1, 10**9])
def test_a_header_of_another_length_is_refused(stranger: Stranger, length: int) -> None:
    stranger.change("weights.safetensors", lambda data: length.to_bytes(8, "little") + data[8:])
    assert "refused" in stranger.outcome()


TEXTS = {
    "tokenizer/tokenizer.json": [
        b"", b"{}", b"[" * 100_000, b"\xff\xfe", b"null", b"[]", b'{"version": "%s"}' % (b"x" * 10_000),
    ],
    "tokenizer/tokenizer_config.json": [b"", b"[]", b"7", b"null", b"[" * 100_000, b"\xff", b'{"a": 1e999}'],
    "tokenizer/chat_template.jinja": [
        b"\xff\xfe", b"{{", b"{% for %}", b"{{ ''.__class__.__mro__[1].__subclasses__() }}",
        b"{% include '/etc/passwd' %}", b"{% import 'os' as os %}", b"(" * 100_000 + b"{{" + b"(" * 100_000,
        b"{{ cycler.__init__.__globals__.os.system('touch x') }}",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_a_tokenizer_that_is_wrong_is_refused(stranger: Stranger, name: str) -> None:
    for text in TEXTS[name]:
        stranger.reset()
        stranger.change(name, lambda _, text=text: text)
        found = stranger.outcome()
        harmless = text in (b"{}", b'{"a": 1e999}') and name != "tokenizer/tokenizer.json"
        assert "refused" in found or harmless, text[:40]


@pytest.mark.parametrize("name", TEXTS)
def test_a_sparse_file_of_gigabytes_is_read(stranger: Stranger, name: str) -> None:
    """Without looking at its digest, which takes as long as a disk does."""
    with (stranger.dir / name).open("wb") as file:
        file.truncate(2**33)
    with pytest.raises(Refused, match=f"{name} has {2**33} bytes, at most"):
        Text(stranger.dir / "tokenizer")


def test_a_tokenizer_with_ids_that_the_model_has_not_is_refused(stranger: Stranger) -> None:
    def more(text: bytes) -> bytes:
        content = json.loads(text)
        like, known = content["added_tokens"][0], len(content["model"]["vocab"])
        content["added_tokens"] += [like | {"id": known + i, "content": f"<{i}>"} for i in range(50)]
        return json.dumps(content).encode()

    stranger.change("tokenizer/tokenizer.json", more)
    assert "has ids up to" in stranger.outcome()["refused"]


def test_a_weight_of_ranks_in_an_engine_of_one_is_a_traceback(stranger: Stranger) -> None:
    for segment in range(len(stranger.content()["segments"])):
        path = ("segments", segment, "weights", 0)
        (stranger.dir / FILE).write_text(json.dumps(put(stranger.content(), path, "group")))
        assert "weights has group, but tp is 1" in stranger.outcome()["refused"]


def test_pieces_in_an_engine_that_has_a_program_pass_its_checks(stranger: Stranger) -> None:
    """Ops would run on whatever stands there, and of a target of which opening is said to be safe."""
    content = stranger.content()
    op = {"kind": "op", "name": "norm", "inputs": ["w"], "outputs": ["x"], "constants": []}
    content["segments"][0] |= {"pieces": [op], "compiler": "onnxruntime 1.0"}
    (stranger.dir / FILE).write_text(json.dumps(content))
    assert "has pieces, target is torch" in stranger.outcome()["refused"]


@pytest.fixture
def cut(tiny_engine: Callable[..., Path], tmp_path: Path, opener: Opener) -> Stranger:
    pytest.importorskip("onnxruntime")
    return Stranger(tiny_engine("nemotron_h_moe", target="onnxruntime"), tmp_path, opener)


def test_pieces_that_do_not_follow_from_each_other_are_tracebacks(cut: Stranger) -> None:
    content = cut.content()
    segment = content["segments"][0]
    part, op, view = (
        next(n for n, piece in enumerate(segment["pieces"]) if piece["kind"] == kind)
        for kind in ("part", "op", "view")
    )
    node = next(n for n, node in enumerate(segment["nodes"]) if node["op"] == segment["pieces"][op]["name"])
    for path, value, said in (
        (("pieces",), [], "has no pieces, target is onnxruntime"),
        (("compiler",), "tensorrt 10.9", "compiler is 'tensorrt 10.9', target is onnxruntime"),
        (("compiler",), "", "compiler is '', target is onnxruntime"),
        (("compiler",), "onnxruntime", "compiler is 'onnxruntime', target is onnxruntime"),
        (("pieces", part, "inputs"), segment["pieces"][part]["inputs"][1:], "inputs, the manifest gives"),
        (("pieces", part, "inputs", 0), "lost", "reads 'lost', which nothing has computed"),
        (("pieces", part, "outputs", 0), segment["inputs"][0], "which is there already"),
        (("pieces", op, "name"), "lost", "lost is no op, or another one than"),
        (("pieces", op, "inputs"), [], "takes and gives"),
        (("pieces", op, "outputs"), [], "takes and gives"),
        (("pieces", op, "constants"), [1.5], "takes and gives"),
        (("pieces", op, "kind"), "view", "is no view with"),
        (("pieces", view, "name"), "numpy", "is no view with"),
        (("pieces", view, "constants"), ["x"], "is no view with"),
        (("nodes", node, "form"), "reference", "has no form 'reference' here"),
        (("nodes", node, "op"), "lost", "is no op, or another one than lost"),
        (("inputs", 0), "lost", "its inputs are"),
        (("outputs", 0), "lost", "its outputs are"),
        (("outputs",), segment["outputs"][:1], "its outputs are"),
    ):
        (cut.dir / FILE).write_text(json.dumps(put(content, ("segments", 0, *path), value)))
        assert said in cut.outcome().get("refused", "nothing"), path


@pytest.fixture
def quantised(tiny_engine: Callable[..., Path], tmp_path: Path, opener: Opener) -> Stranger:
    return Stranger(tiny_engine("qwen3_5", quantize="int4", draft_head="fp8"), tmp_path, opener)


LAYOUTS = (
    "", "x", "int4", "int4 0", "int4 -1", "int4 1e3", "int4 999999999", "int4 9999999999", "int4 row zeros x",
    "int8 64", "e4m3 row", "e2m1 16", "e2m1 16 factor divisor", "int4 128 zeros zeros",
    "int4 128 x e4m3 by static",
    "int4 128 x e4m3 by nobody", "e4m3 128 x e4m3 by group", "int4 1", "int4 \u0661\u0662",
)  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_that_a_weight_has_not_is_refused_when_it_is_opened_or_inspected(
    quantised: Stranger, layout: str
) -> None:
    content = quantised.content()
    for segment, described in enumerate(content["segments"]):
        name = next(iter(described["layouts"]))
        changed = put(content, ("segments", segment, "layouts", name), layout)
        (quantised.dir / FILE).write_text(json.dumps(changed))
        assert "refused" in quantised.outcome(), name


@pytest.mark.parametrize("way", HEADERS)
def test_a_header_of_quantised_weights_that_is_wrong_is_refused(quantised: Stranger, way: str) -> None:
    path = quantised.source / "weights.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    HEADERS[way](header, next(iter(quantised.content()["segments"][0]["layouts"])))
    text = json.dumps(header).encode()
    quantised.change(path.name, lambda d: len(text).to_bytes(8, "little") + text + d[8 + size :])
    assert "refused" in quantised.outcome()


NAMES = (
    FILE,
    "trunk.jsonl",
    "weights.safetensors",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
)
FUZZ = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)


@given(dice=st.randoms(use_true_random=False), name=st.sampled_from(NAMES))
@settings(FUZZ, max_examples=max(settings().max_examples // 4, 1))
def test_bytes_that_change_are_noticed(stranger: Stranger, dice: random.Random, name: str) -> None:
    """Without a new signature, nothing but what was built answers."""
    stranger.reset()
    stranger.change(name, lambda data: flipped(data, dice))
    found = stranger.outcome(sign=False)
    assert "refused" in found or found == stranger.expected


@given(dice=st.randoms(use_true_random=False), name=st.sampled_from(NAMES))
@settings(FUZZ, max_examples=max(settings().max_examples // 2, 1))
def test_files_that_change_and_are_signed_anew_are_refused_or_answer(
    stranger: Stranger, dice: random.Random, name: str
) -> None:
    answers_or_is_refused(stranger, dice, name)


@given(dice=st.randoms(use_true_random=False), name=st.sampled_from((*NAMES[:3], "draft.jsonl")))
@settings(FUZZ, max_examples=max(settings().max_examples // 2, 1))
def test_files_of_quantised_weights_that_change_and_are_signed_anew_are_refused_or_answer(
    quantised: Stranger, dice: random.Random, name: str
) -> None:
    answers_or_is_refused(quantised, dice, name)


def answers_or_is_refused(stranger: Stranger, dice: random.Random, name: str) -> None:
    """Whatever a file of its engine has become, signed anew."""
    stranger.reset()
    change = flipped if dice.random() < 0.3 else mutated
    stranger.change(name, lambda data: change(data, dice))
    stranger.outcome()


def flipped(data: bytes, dice: random.Random) -> bytes:
    """A few bytes, in the first half of a kilobyte as often as elsewhere."""
    changed = bytearray(data)
    for _ in range(dice.choice([1, 1, 2, 8])):
        at = dice.randrange(min(len(data), dice.choice([512, len(data)])))
        changed[at] = dice.randrange(256)
    return bytes(changed[: dice.choice([len(data), len(data), dice.randrange(len(data))])])


def mutated(data: bytes, dice: random.Random) -> bytes:
    """The structure of the JSON in it: values are exchanged, repeated, lost, or wrong in one of the ways."""
    if data[:1] in b"{[" and b"\n[" in data:  # a line each
        lines = data.splitlines()
        at = dice.randrange(len(lines))
        lines[at] = json.dumps(scrambled(json.loads(lines[at]), dice)).encode()
        if dice.random() < 0.2:
            lines.insert(dice.randrange(len(lines)), lines[dice.randrange(len(lines))])
        return b"\n".join(lines)
    if data[:1] == b"{":
        return json.dumps(scrambled(json.loads(data), dice)).encode()
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(scrambled(json.loads(data[8 : 8 + size]), dice)).encode()
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def scrambled(content: Any, dice: random.Random) -> Any:
    every = list(all_places(content))
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        path = dice.choice(every)
        try:
            other = content
            for step in dice.choice(every):
                other = other[step]
            value = dice.choice(
                [other, dice.choice(list(WRONG.values())), dice.randrange(1 << dice.randrange(1, 64))]
            )
            content = put(content, path, value)
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took this place away
    return content


NUMBERS = (-(2**31) + 1, -4096, -16, -1, 0, 1, 2, 3, 7, 16, 64, 2**31 - 1)
NARROW = (torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn)


@given(dice=st.randoms(use_true_random=False), segment=st.sampled_from((0, 1)), dtype=st.sampled_from(NARROW))
@settings(FUZZ, max_examples=max(settings().max_examples // 2, 1))
def test_calls_that_are_put_into_a_program_are_refused_or_run(
    stranger: Stranger, dice: random.Random, segment: int, dtype: torch.dtype
) -> None:
    """Calls of torch's on any values, a weight of narrow numbers among them, and attributes of ours that no
    model has. A kernel that reads or writes outside of a tensor ends the process sooner or later."""
    stranger.reset()
    content, weight = stranger.content(), torch.ones(1024, 1024).to(dtype)
    described = content["segments"][segment]
    place = len(described["weights"])
    described["weights"].append("mine")
    (stranger.dir / FILE).write_text(json.dumps(content))
    weights = load_file(stranger.source / "weights.safetensors") | {"mine": weight}
    save_file(weights, stranger.dir / "weights.safetensors")
    lines = program_lines((stranger.source / described["file"]).read_bytes())
    lines.insert(place, ["mine", "", [], {"dtype": str(dtype).removeprefix("torch.")}, [*weight.shape]])
    grown = with_calls(lines, dice)
    stranger.change(described["file"], lambda _: "\n".join(map(json.dumps, grown)).encode())
    stranger.outcome()


def with_calls(lines: list[list[Any]], dice: random.Random) -> list[list[Any]]:
    first = next(n for n, line in enumerate(lines) if line[1])
    if dice.random() < 0.5:  # what is declared of results would give most changes away
        lines = [line if line[1] == "" else line[:3] for line in lines]
    for number in range(dice.choice([1, 1, 2, 3])):
        at = dice.randrange(first, len(lines) - 1)
        known = ["mine", *(line[0] for line in lines[max(at - 12, 0) : at])]
        x, y = ({"node": dice.choice(known)} for _ in range(2))
        n, dim = dice.choice(NUMBERS), dice.choice([0, 1, 1, 1, 2, -1])
        called, args = dice.choice(
            [
                ("relu.default", [x]), ("add.Tensor", [x, y]), ("mul.Tensor", [x, x]),
                ("cat.default", [[x, y, x], dim]), ("split.Tensor", [x, n, dim]),
                ("chunk.default", [x, n, dim]), ("unsqueeze.default", [x, dim]),
                ("view.default", [x, [-1, n]]), ("view.default", [x, [-1, n, 16]]),
                ("index_select.default", [x, dim, y]), ("to.dtype", [x, {"dtype": "bfloat16"}]),
            ]
        )  # fmt: skip
        name = f"new_{number}"
        lines.insert(at, [name, f"aten.{called}", args])
        if called in ("split.Tensor", "chunk.default"):
            lines.insert(at + 1, [f"{name}_0", "operator.getitem", [{"node": name}, dice.choice([0, 1, -1])]])
            name += "_0"
        taker = dice.choice(lines[at:-1])
        values = [n for n, arg in enumerate(taker[2]) if isinstance(arg, dict) and taker[0] != name]
        if values and dice.random() < 0.7:
            taker[2][dice.choice(values)] = {"node": name}
    numbered = [
        line for line in lines if line[1].startswith("hemiola.") and type(line[2][-1]) in (int, float)
    ]
    if dice.random() < 0.5:
        args = dice.choice(numbered)[2]
        places = [n for n, arg in enumerate(args) if type(arg) in (int, float, bool)]
        place = dice.choice(places)
        args[place] = type(args[place])(dice.choice(NUMBERS))
    return lines
