"""The engine of a checkpoint without a tokenizer takes and gives token ids, and says so if asked for text."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hemiola.builder.build import Options, build
from hemiola.runtime import manifest
from hemiola.runtime.api import SamplingParams
from hemiola.runtime.bench.asked import Asked
from hemiola.runtime.bench.options import BenchOptions
from hemiola.runtime.errors import Refused
from hemiola.runtime.llm import LLM

PROMPT = [5, 6, 7, 80, 9]
NINE = SamplingParams(max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module")
def engine_dir(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ids")
    source = shutil.copytree(tiny_checkpoint("qwen3_5"), folder / "source")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (source / name).unlink(missing_ok=True)
    build(source, folder / "engine", Options(max_len=256, max_rows=4, max_step_tokens=64, page_len=32))
    return folder / "engine"


@pytest.fixture(scope="module")
def llm(engine_dir: Path) -> Iterator[LLM]:
    with LLM(engine_dir) as made:
        yield made


def test_it_says_so_when_it_is_built(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other files of a tokenizer are of no use without it."""
    source = shutil.copytree(tiny_checkpoint("nemotron_h_dense"), tmp_path / "source")
    (source / "tokenizer.json").unlink()
    found = build(source, tmp_path / "engine", Options(max_len=64, max_rows=1, max_step_tokens=64))
    assert not (tmp_path / "engine/tokenizer").exists() and not found.has_tokenizer
    assert capsys.readouterr().err == (
        f"warning: {source} has no tokenizer.json: this engine takes and gives token ids; for text, save the"
        " tokenizer in the tokenizers format and build again\n"
    )


def test_ids_in_and_ids_out_as_with_a_tokenizer(llm: LLM, tiny_engine: Callable[..., Path]) -> None:
    (out,) = llm.generate([PROMPT], NINE)
    with LLM(tiny_engine("qwen3_5")) as other:
        (wanted,) = other.generate([PROMPT], NINE)
    assert (out.token_ids, out.finish_reason, out.text) == (wanted.token_ids, "length", "")
    stops = SamplingParams(max_tokens=9, stop_token_ids=[wanted.token_ids[4]], bad_words_ids=[[319]])
    assert [p.finish_reason for p in llm.stream(PROMPT, stops)][-1] == "stop"


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (lambda llm: llm.generate(["def "]), r"prompts\[0\]: prompt is text, the engine has no tokenizer;"),
        (lambda llm: llm.encode("def "), "prompt is text, the engine has no tokenizer; pass token ids"),
        (lambda llm: llm.chat_text([]), "messages are text, the engine has no tokenizer; pass token ids"),
        (
            lambda llm: llm.stream(PROMPT, SamplingParams(stop="a")),
            "stop is text, the engine has no tokenizer; pass stop_token_ids",
        ),
        (
            lambda llm: llm.stream(PROMPT, SamplingParams(bad_words="a")),
            "bad_words is text, the engine has no tokenizer; pass bad_words_ids",
        ),
        (
            lambda llm: llm.stream(PROMPT, SamplingParams(structured_outputs={"regex": "a"})),
            "structured_outputs is about text, the engine has no tokenizer; leave it out",
        ),
    ],
    ids=["generate", "encode", "chat", "stop", "bad_words", "structured_outputs"],
)  # fmt: skip
def test_text_is_refused_with_the_way_out(llm: LLM, ask: Callable[[LLM], object], reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        ask(llm)
    assert llm.generate([PROMPT], NINE)[0].finish_reason == "length"


def test_a_tokenizer_that_was_lost_is_no_engine_for_ids(
    tiny_engine: Callable[..., Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(tiny_engine("qwen3_5"), tmp_path / "engine")
    shutil.rmtree(copy / "tokenizer")
    with pytest.raises(Refused, match=r"tokenizer/.* is missing; run build-engine again"):
        LLM(copy)


def test_generate_takes_and_gives_ids(llm: LLM, engine_dir: Path, hemiola: Callable) -> None:
    (wanted,) = llm.generate([PROMPT], NINE)
    asked = ("generate", "--engine-dir", engine_dir, "--max-tokens", 9, "--ignore-eos")
    for ids in ("5,6,7,80,9", "5 6 7 80 9", "5, 6, 7, 80, 9"):
        assert hemiola(*asked, "--prompt-ids", ids).out == "".join(f"{i} " for i in wanted.token_ids) + "\n"
    for arguments, reason in [
        (("--prompt", "x"), "prompt is text, the engine has no tokenizer; pass token ids"),
        (("--prompt-ids", "5,x"), "--prompt-ids is '5,x'; give token ids, such as 5,6,7"),
        (("--prompt-ids", "5,320"), "token id 320 at position 1"),
        (("--prompt-ids", "5", "--chat"), "--chat needs a prompt as text"),
        (("--prompt-ids", "5", "--prompt", "x"), "give one of PROMPT, --prompt TEXT, --prompt-ids IDS and"),
    ]:
        ended = hemiola(*asked, *arguments)
        assert ended.status == 2 and reason in ended.err and ended.err.count("\n") == 1, arguments


@pytest.mark.parametrize(
    ("family", "said"), [(None, "none: takes and gives token ids"), ("qwen3_5", "tokenizer.json")]
)
def test_inspect_says_what_the_engine_takes(
    engine_dir: Path, tiny_engine: Callable[..., Path], hemiola: Callable, family: str | None, said: str
) -> None:
    shown = hemiola("inspect", "--engine-dir", tiny_engine(family) if family else engine_dir).out
    (line,) = [line for line in shown.splitlines() if "tokenizer " in line]
    assert said in line


def test_bench_needs_text_only_where_it_is_asked_for_text(llm: LLM, tmp_path: Path) -> None:
    assert Asked(BenchOptions(num_requests=2, input_len=4, output_len=2)).sessions(llm)
    with pytest.raises(Refused, match="multi-turn draws its prompts from text: prompt is text"):
        Asked(BenchOptions(workload="multi-turn")).sessions(llm)
    (tmp_path / "ids").write_text('{"prompt": [5, 6]}')
    assert Asked(BenchOptions(workload=str(tmp_path / "ids"))).sessions(llm)
    (tmp_path / "text").write_text('{"prompt": "def "}')
    with pytest.raises(Refused, match="text:1: prompt is text, the engine has no tokenizer; pass token ids"):
        Asked(BenchOptions(workload=str(tmp_path / "text"))).sessions(llm)


def test_its_manifest_lists_no_tokenizer(engine_dir: Path) -> None:
    assert not any(name.startswith("tokenizer") for name in manifest.load(engine_dir).sha256)
