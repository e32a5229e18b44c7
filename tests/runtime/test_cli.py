"""The command line as a user sees it: stdout, stderr, exit status."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hemiola.runtime.cli import main
from hemiola.runtime.llm import LLM
from hemiola.runtime.request import SamplingParams

ROOT = Path(__file__).resolve().parents[2]


def hemiola(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hemiola", *arguments],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}, input=stdin,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine_dir(tiny_engine: Callable[..., Path]) -> Path:
    return tiny_engine("qwen3_5")


def test_generate_streams_the_text_and_reports_on_stderr(engine_dir: Path, tmp_path: Path) -> None:
    with LLM(engine_dir, max_rows=1) as llm:
        (wanted,) = llm.generate(["def "], SamplingParams(max_tokens=9, ignore_eos=True))
        chat = llm.chat_text([{"role": "user", "content": "def "}])
        (wanted_chat,) = llm.generate([chat], SamplingParams(max_tokens=9, ignore_eos=True))
    common = ("generate", "--engine-dir", str(engine_dir), "--max-tokens", "9", "--ignore-eos")
    done = hemiola(*common, "--prompt", "def ")
    assert (done.returncode, done.stdout) == (0, wanted.text + "\n")
    assert "9 tokens" in done.stderr and "tokens/s, ended by length" in done.stderr
    (tmp_path / "prompt").write_text("def ")
    assert (
        hemiola(*common, "--prompt-file", str(tmp_path / "prompt"), "--chat").stdout
        == wanted_chat.text + "\n"
    )
    assert hemiola(*common, "--prompt-file", "-", stdin="def ").stdout == wanted.text + "\n"


def test_inspect_shows_the_engine(engine_dir: Path) -> None:
    done = hemiola("inspect", "--engine-dir", str(engine_dir))
    assert done.returncode == 0
    for word in (
        "Qwen3_5ForCausalLM",
        "3 delta, 1 attention",
        "layers.2.k_pages",
        "32x1x16",
        "trunk.pt2",
        "max_len",
    ):
        assert word in done.stdout, word


def test_bad_input_is_one_line_and_status_2(
    engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latin").write_bytes(b"d\xe9f")
    engine, generate = ("--engine-dir", str(engine_dir)), "generate"
    for arguments, reason in [
        ((generate, "--engine-dir", str(tmp_path), "--prompt", "x"), "has no manifest.json"),
        ((generate, *engine, "--prompt", "x" * 5000), "must hold it and at least one more"),
        ((generate, *engine, "--prompt", ""), "prompt is empty"),
        ((generate, *engine, "--prompt", "x", "--max-tokens", "0"), "max_tokens is 0"),
        ((generate, *engine, "--prompt", "x", "--top-p", "1.5"), "top_p is 1.5"),
        ((generate, *engine, "--prompt", "x", "--top-p", "much"), "Invalid value for '--top-p'"),
        (
            (generate, *engine, "--prompt", "x", "--prompt-file", "y"),
            "give one of --prompt TEXT and --prompt-file PATH",
        ),
        ((generate, *engine), "give one of --prompt TEXT and --prompt-file PATH"),
        (
            (generate, *engine, "--prompt-file", str(tmp_path / "none")),
            "cannot be read (No such file or directory)",
        ),
        ((generate, *engine, "--prompt-file", str(tmp_path / "latin")), "is not UTF-8"),
        ((generate, *engine, "--prompt", "x", "--beam", "4"), "No such option: --beam"),
        ((generate, "--prompt", "x"), "Missing option '--engine-dir'"),
        (("inspect", "--engine-dir", str(tmp_path)), "has no manifest.json"),
        (("explode",), "No such command 'explode'"),
        ((), "Missing command"),
    ]:
        monkeypatch.setattr(sys, "argv", ["hemiola", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        assert ended.value.code == 2, arguments
        assert shown.out == "" and shown.err.startswith("error: ") and reason in shown.err, shown.err
        assert shown.err.count("\n") == 1, shown.err


def test_the_status_reaches_the_shell(tmp_path: Path) -> None:
    done = hemiola("inspect", "--engine-dir", str(tmp_path))
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("error: ")


def test_the_runtime_package_runs_too() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hemiola.runtime", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and all(word in done.stdout for word in ("generate", "inspect", "serve"))
