"""The command line as a user sees it: stdout, stderr, exit status."""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from kit.stages import without_stages

from hemiola import __version__
from hemiola.builder import cli as builder
from hemiola.runtime import manifest
from hemiola.runtime.api import Metrics, Piece, SamplingParams
from hemiola.runtime.cli.main import COMMANDS
from hemiola.runtime.config import ServeConfig
from hemiola.runtime.llm import LLM

ROOT = Path(__file__).resolve().parents[3]
# Dependencies come from where they are, hemiola from the checkout only: no hook of an installation runs.
UNINSTALLED = f"""
import runpy, sys
root, module = sys.argv[1:3]
sys.path[:0] = [root, {str(Path(typer.__file__).parents[1])!r}]
sys.argv[:3] = [module]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""

WITHOUT_TORCH = """
import sys
from importlib import import_module
sys.modules["torch"] = None
main = import_module(sys.argv.pop(1)).main
main()
"""


def in_a_shell(*arguments: str, stdout: Any = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hemiola", *arguments],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", "OMP_NUM_THREADS": "1"},
        stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=300,
    )  # fmt: skip


def test_generate_streams_the_text_and_reports_on_stderr(
    engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hemiola: Callable
) -> None:
    with LLM(engine_dir, max_rows=1) as llm:
        (wanted,) = llm.generate(["def "], SamplingParams(max_tokens=9, ignore_eos=True))
        chat = llm.chat_text([{"role": "user", "content": "def "}])
        (wanted_chat,) = llm.generate([chat], SamplingParams(max_tokens=9, ignore_eos=True))
    common = ("generate", "--engine-dir", str(engine_dir), "--max-tokens", "9", "--ignore-eos")
    done = in_a_shell(*common, "--prompt", "def ")
    assert (done.returncode, done.stdout) == (0, wanted.text + "\n")
    assert "9 tokens" in done.stderr and "tokens/s, ended by length" in done.stderr
    (tmp_path / "prompt").write_text("def ")
    assert hemiola(*common, "--prompt-file", tmp_path / "prompt", "--chat").out == wanted_chat.text + "\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("def "))
    assert hemiola(*common, "--prompt-file", "-").out == wanted.text + "\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("d\udcffef"))
    ended = hemiola(*common, "--prompt-file", "-")
    assert ended.err == "error: --prompt-file - is not UTF-8 (invalid start byte at byte 1); convert it\n"


def test_every_option_of_an_engine_is_one_of_generate(
    engine_dir: Path, monkeypatch: pytest.MonkeyPatch, hemiola: Callable
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    asked = ("generate", "--engine-dir", engine_dir, "--prompt", "def ", "--max-tokens", 9, "--ignore-eos")
    plain = hemiola(*asked, "--drafts", "none").out
    assert plain == hemiola(*asked, "--drafts", "ngram", "--num-drafts=1", "--max-len", "64").out != ""
    shown = hemiola("generate", "--help").out
    for name in set(ServeConfig.model_fields) - {"max_rows"}:
        assert f"--{name.replace('_', '-')}" in shown


def test_every_sampling_option_reaches_the_engine(monkeypatch: pytest.MonkeyPatch, hemiola: Callable) -> None:
    asked: list[SamplingParams] = []

    class FakeLlm:
        def __init__(self, engine_dir: Path, *, progress: Callable, **options: object) -> None:
            progress("reading programs", 0, 0)
            assert options == {"max_rows": 1, "prefix_cache": False}

        def __enter__(self) -> "FakeLlm":
            return self

        def __exit__(self, *_: object) -> None: ...

        def stream(self, prompt: str, params: SamplingParams) -> Iterator[Piece]:
            asked.append(params)
            metrics = Metrics(num_prompt_tokens=1, arrival=0.0)
            yield Piece("x", [1], finish_reason="error", metrics=metrics, error="the engine failed: KeyError")

    monkeypatch.setattr("hemiola.runtime.llm.LLM", FakeLlm)
    arguments = (
        "--max-tokens 9 --min-tokens 2 --temperature 0.5 --top-p 0.9 --top-k 7 --min-p 0.1 --seed 3 --stop a"
        " --stop b --stop-token-ids 4 --ignore-eos --repetition-penalty 1.1 --presence-penalty 0.2"
        " --frequency-penalty -0.3"
        " --logit-bias 5=-100 --logit-bias 6=0.5 --bad-words c --bad-words d --prefix-cache false"
    )
    ended = hemiola("generate", "--engine-dir", "e", "--prompt", "p", *arguments.split())
    assert asked == [
        SamplingParams(
            max_tokens=9, min_tokens=2, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3,
            stop=("a", "b"), stop_token_ids=(4,), ignore_eos=True, repetition_penalty=1.1,
            presence_penalty=0.2, frequency_penalty=-0.3, logit_bias={5: -100.0, 6: 0.5},
            bad_words=("c", "d"),
        )
    ]  # fmt: skip
    assert (ended.status, ended.err) == (1, "error: the engine failed: KeyError\n"), "no traceback"


@pytest.fixture
def compiled(engine_dir: Path) -> None:
    """The CPU's kernels, of which a first run says that it compiles them."""
    with LLM(engine_dir, max_rows=1):
        pass


@pytest.mark.parametrize("words", ["--help", "inspect", "generate --prompt x --max-tokens 3"])
def test_a_full_disk_is_one_line_and_no_traceback(engine_dir: Path, compiled: None, words: str) -> None:
    engine = () if words == "--help" else ("--engine-dir", str(engine_dir))
    with open("/dev/full", "w") as full:
        done = in_a_shell(*words.split(), *engine, stdout=full)
    assert (done.returncode, without_stages(done.stderr)) == (2, "error: output: No space left on device\n")


def test_a_reader_that_went_away_gets_no_complaint(engine_dir: Path, compiled: None) -> None:
    for arguments in (("inspect",), ("generate", "--prompt", "def ", "--max-tokens", "3")):
        read, write = os.pipe()
        os.close(read)
        done = in_a_shell(*arguments, "--engine-dir", str(engine_dir), stdout=write)
        os.close(write)
        assert (done.returncode, without_stages(done.stderr)) == (1, "")


def test_inspect_shows_the_engine(
    engine_dir: Path, monkeypatch: pytest.MonkeyPatch, hemiola: Callable
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    done = hemiola("inspect", "--engine-dir", engine_dir)
    assert done.status == 0
    words = ("Qwen3_5ForCausalLM", "3 delta, 1 attention", "k_pages", "32x1x16", "trunk.jsonl", "max_len")
    assert all(word in done.out for word in words), done.out


@pytest.mark.parametrize("command", ["generate", "inspect", "serve", "bench", "build-engine"])
def test_help_cuts_no_name_in_a_terminal_of_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, hemiola: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    if command == "build-engine":
        builder.app(args=["--help"], standalone_mode=False)
        shown, fields = capsys.readouterr().out, builder.Options.model_fields
    else:
        shown, fields = hemiola(command, "--help").out, ServeConfig.model_fields
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80
    missing = [name for name in fields if f"--{name.replace('_', '-')}" not in shown]
    assert missing == (["max_rows"] if command == "generate" else [])


@pytest.mark.parametrize(
    "words",
    [
        *(f"hemiola.runtime {command} --help" for command in COMMANDS),
        "hemiola.runtime chat -h",
        "hemiola.builder --help",
    ],
)
def test_help_waits_for_torch(words: str) -> None:
    """And so did a shell that completes an option: for seconds."""
    module, *arguments = words.split()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, f"{module}.__main__", *arguments],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0 and "--engine-dir" in done.stdout, done.stderr


@pytest.mark.parametrize("words", ["generate engine prompt", "chat engine"])
def test_a_command_is_silent_while_torch_is_imported(words: str) -> None:
    terminal, end = os.openpty()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "hemiola.runtime.__main__", *words.split()],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}, timeout=300,
        stdin=subprocess.DEVNULL, stderr=end,
    )  # fmt: skip
    os.close(end)
    with open(terminal, "rb", buffering=0) as screen:
        said = screen.read(65536)
    assert done.returncode == 2 and b"starting" in said and b"needs torch" in said, said


def test_help_cuts_no_sentence_about_a_command_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, hemiola: Callable
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = hemiola("--help").out
    assert all(does in shown for does in COMMANDS.values()) and "..." not in shown.replace("[ARGS]...", "")


def test_bad_input_is_one_line_and_status_2(engine_dir: Path, tmp_path: Path, hemiola: Callable) -> None:
    (tmp_path / "latin").write_bytes(b"d\xe9f")
    engine, generate = ("--engine-dir", str(engine_dir)), "generate"
    for arguments, reason in [
        ((generate, "--engine-dir", str(tmp_path), "--prompt", "x"), "has no manifest.json"),
        ((generate, *engine, "--prompt", "x" * 5000), "must hold it and at least one more"),
        ((generate, *engine, "--prompt", ""), "prompt is empty"),
        (
            (generate, *engine, "--prompt", "d\udcffef"),
            "--prompt is not UTF-8 (invalid start byte at byte 1); convert it",
        ),
        (
            (generate, *engine, "--prompt", "x", "--max-tokens", "0"),
            "error: --max-tokens is 0; give at least 1",
        ),
        ((generate, *engine, "--prompt", "x", "--top-p", "1.5"), "error: --top-p is 1.5; "),
        ((generate, *engine, "--prompt", "x", "--top-p", "much"), "error: --top-p is 'much'"),
        (
            (generate, *engine, "--prompt", "x", "--prompt-file", "y"),
            "give one of PROMPT, --prompt TEXT, --prompt-ids IDS and --prompt-file PATH",
        ),
        ((generate, *engine), "give one of PROMPT, --prompt TEXT, --prompt-ids IDS and --prompt-file PATH"),
        (
            (generate, *engine, "--prompt-file", str(tmp_path / "none")),
            "cannot be read (No such file or directory)",
        ),
        ((generate, *engine, "--prompt-file", str(tmp_path / "latin")), "is not UTF-8"),
        (
            (generate, *engine, "--prompt", "x", "--beam", "4"),
            "No such option: --beam; see hemiola generate --help",
        ),
        ((generate, *engine, "--prompt", "x", "--drafts", "tree"), "error: --drafts is 'tree'; "),
        (
            (generate, *engine, "--prompt", "x", "--num-drafts", "9"),
            "error: --num-drafts is 9, the engine was built",
        ),
        ((generate, *engine, "--prompt", "x", "--max-rows", "2"), "No such option: --max-rows"),
        (
            (generate, *engine, "--prompt", "x", "--min-tokens", "999"),
            "--min-tokens is 999, --max-tokens is 128; raise it or lower --min-tokens",
        ),
        ((generate, *engine, "--prompt", "x", "--logit-bias", "5"), "--logit-bias is '5'; write INT=FLOAT"),
        ((generate, *engine, "--prompt", "x", "--logit-bias", "5=inf"), "--logit-bias[5] is inf; "),
        (
            (generate, *engine, "--prompt-ids", "5,,7"),
            "--prompt-ids is '5,,7'; give token ids, such as 5,6,7",
        ),
        ((generate, *engine, "--prompt-ids", ""), "--prompt-ids is ''; give token ids"),
        ((generate, *engine, "--prompt-ids", "5," + "x" * 9000), "... (9004 characters); give token ids"),
        (
            (generate, *engine, "--prompt", "x", "--cache-bytes", "-1"),
            "--cache-bytes is -1; give more",
        ),
        (("serve", "--beam"), "see hemiola serve --help"),
        (("chat", "--system"), "requires an argument; see --help"),
        ((generate, "--prompt", "x"), "no engine is given; pass its folder as the first argument"),
        ((generate, str(engine_dir), "x", "--prompt", "y"), "give one of PROMPT, --prompt TEXT"),
        ((generate, *engine, "x", "y"), "give one of PROMPT, --prompt TEXT"),
        ((generate, "", "x"), "ENGINE is empty; give a folder"),
        ((generate, str(engine_dir), "d\udcffef"), "PROMPT is not UTF-8 (invalid start byte at byte 1)"),
        (("inspect", *engine, "other"), "and 'other' were both given; drop one"),
        (("bench", *engine, "other"), "and 'other' were both given; drop one"),
        (("serve", "--engine-dir", str(tmp_path)), "has no manifest.json"),
        (
            ("inspect", str(ROOT / "demo/qwen3.5-code")),
            "is a checkpoint, not an engine; run build-engine",
        ),
        (("inspect", "--engine", "x"), "see hemiola inspect --help"),
        (("inspect", "--engine-dir", str(tmp_path)), "has no manifest.json"),
        (("explode",), "No such command 'explode'; see hemiola --help"),
    ]:
        ended = hemiola(*arguments)
        assert (ended.status, ended.out) == (2, ""), arguments
        assert ended.err.startswith("error: ") and reason in ended.err and ended.err.count("\n") == 1, ended


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_a_bare_command_shows_help_and_no_error(command: str, hemiola: Callable) -> None:
    ended = hemiola(*command.split())
    assert (ended.status, ended.out) == (2, ""), "as click does it"
    assert ended.err == hemiola(*command.split(), "--help").out == hemiola(*command.split(), "-h").out
    assert ended.err.startswith(f"Usage: hemiola {command}")


def test_every_command_says_what_types_its_options_have_in_one_style(
    hemiola: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    """typer writes <str> where our own options have TEXT."""
    for command in COMMANDS:
        assert not re.search(r"<\w+>", hemiola(command, "--help").out)
    builder.app(args=["--help"], standalone_mode=False)
    assert not re.search(r"<\w+>", capsys.readouterr().out)


def test_the_version_is_shown(hemiola: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    assert hemiola("--version").out == f"hemiola {__version__}\n"
    builder.app(args=["--version"], standalone_mode=False)
    assert capsys.readouterr().out == f"hemiola {__version__}\n"


@pytest.mark.parametrize(
    ("variable", "shell", "line", "found"),
    [
        ("COMP_WORDS", "bash", "hemiola insp", {"inspect"}),
        ("COMP_WORDS", "bash", "hemiola inspect --pl", {"--plot"}),
        ("_TYPER_COMPLETE_ARGS", "fish", "hemiola serve --openai-po", {"--openai-port"}),
    ],
)
def test_a_shell_completes_commands_and_their_options(
    variable: str, shell: str, line: str, found: set[str], monkeypatch: pytest.MonkeyPatch, hemiola: Callable
) -> None:
    monkeypatch.setenv("_HEMIOLA_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    monkeypatch.setenv(variable, line)
    ended = hemiola()
    assert ended.status == 0 and {words.split("\t")[0] for words in ended.out.splitlines()} == found


def test_an_engine_and_a_prompt_may_be_arguments(engine_dir: Path, hemiola: Callable) -> None:
    common = ("--max-tokens", 5, "--ignore-eos")
    wanted = hemiola("generate", "--engine-dir", engine_dir, "--prompt", "def ", *common)
    assert wanted.status == 0
    assert hemiola("generate", engine_dir, "def ", *common).out == wanted.out
    assert hemiola("generate", *common, "--engine-dir", engine_dir, "def ").out == wanted.out
    assert hemiola("generate", engine_dir, "--prompt", "def ", *common).out == wanted.out
    assert hemiola("inspect", engine_dir).out == hemiola("inspect", "--engine-dir", engine_dir).out


def test_inspect_describes_the_engine_for_programs(engine_dir: Path, hemiola: Callable) -> None:
    found, shown = manifest.load(engine_dir), json.loads(hemiola("inspect", engine_dir, "--json").out)
    assert shown["architecture"] == "Qwen3_5ForCausalLM"
    assert shown["layers"] == list(found.layers) and shown["limits"]["max_len"] == found.limits.max_len
    assert shown["bytes_per_slot"] == sum(s["bytes"] for s in shown["states"] if s["kind"] == "slot")
    assert shown["bytes_per_page"] == sum(s["bytes"] for s in shown["states"] if s["kind"] == "page")
    calls = sum(op["calls"] for segment in shown["segments"] for op in segment["ops"])
    assert calls == sum(len(segment.nodes) for segment in found.segments)
    held = shown["memory"]["held"]
    assert shown["memory"]["bytes"] == sum(one["number"] * one["each_bytes"] for one in held)
    assert [one["what"] for one in held][:2] == ["weights", "pages"]


def test_a_checkout_that_is_not_installed_runs_as_the_readme_says(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    for module, command in (("hemiola", "hemiola"), ("hemiola.builder", "build-engine")):
        assert f"`python -m {module}` is" in readme and f"`{command}`" in readme
        done = subprocess.run(
            [sys.executable, "-S", "-c", UNINSTALLED, str(ROOT), module, "--help"],
            cwd=tmp_path, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0 and "--help" in done.stdout, done.stderr


def test_ctrl_c_ends_a_command_with_status_130(monkeypatch: pytest.MonkeyPatch, hemiola: Callable) -> None:
    def interrupted(engine: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hemiola.runtime.cli.generate.generate", interrupted)
    assert hemiola("generate", "engine").status == 130


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_whose_stream_is_closed_ends_with_a_traceback(closed: str) -> None:
    for words, status in ((["--version"], 0), (["inspect", "/nowhere"], 2)):
        shown = subprocess.run(
            ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "hemiola", *words],
            capture_output=True,
            text=True,
        )
        assert shown.returncode == status and "Traceback" not in shown.stderr, shown.stderr


def test_a_socket_gets_the_number_of_a_closed_stream() -> None:
    code = """
import os
from hemiola.runtime.cli.command import run_command
run_command(lambda: sum(os.readlink(f"/proc/self/fd/{number}") != os.devnull for number in range(3)))
"""
    words = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]
    assert subprocess.run(words).returncode == 0
