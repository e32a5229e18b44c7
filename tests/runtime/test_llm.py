"""LLM on a tiny engine: text, chat, threads, and everything a user can get wrong."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kit.refused import code_and_field, refused
from kit.served import descendants
from kit.triton_calls import joined
from tokenizers import Tokenizer

import hemiola
from hemiola.runtime import manifest
from hemiola.runtime.api import Piece, SamplingParams
from hemiola.runtime.errors import Refused
from hemiola.runtime.llm import LLM
from hemiola.runtime.template import ChatTemplate


@pytest.fixture(scope="module")
def llm(engine_dir: Path) -> Iterator[LLM]:
    with LLM(engine_dir, max_rows=4) as made:
        yield made


OPENED = """
import sys
from hemiola import LLM
from hemiola.plugins.cpu.jit import KERNELS, CFunction
compiled, compile = [], CFunction.compile
CFunction.compile = lambda kernel: (compiled.append(kernel), compile(kernel))[1]
LLM(sys.argv[1], drafts="none").close()
from hemiola.runtime.step import recorded
print([kernel.name for kernel in KERNELS if kernel not in compiled])
"""


def test_an_engine_with_other_options_does_not_compile_kernels_again(engine_dir: Path) -> None:
    """Nor a request: what is imported late is compiled when an engine opens, too."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", OPENED, engine_dir], cwd=root, capture_output=True, text=True, timeout=300
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def params(**values: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **values})


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM, engine_dir: Path) -> None:
    prompts = ["def ", [5, 6, 7], "import os\n" * 9, "x"]
    each = [params(max_tokens=n) for n in (3, 12, 7, 1)]
    outs = llm.generate(prompts, each)
    tokenizer = Tokenizer.from_file(str(engine_dir / "tokenizer/tokenizer.json"))
    for out, prompt, own in zip(outs, prompts, each, strict=True):
        assert out.prompt_token_ids == (tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt)
        assert len(out.token_ids) == own.max_tokens and out.finish_reason == "length"
        assert out.text == tokenizer.decode(out.token_ids)
        assert out.metrics.num_prompt_tokens == len(out.prompt_token_ids)
        assert out.metrics.num_output_tokens == len(out.token_ids)
        assert out.logprobs is None and out.error is None
    alone = [llm.generate([prompt], own)[0] for prompt, own in zip(prompts, each, strict=True)]
    assert [out.token_ids for out in alone] == [out.token_ids for out in outs]


def cached(llm: LLM, prompt: list[int]) -> int:
    (out,) = llm.generate([prompt], params(max_tokens=1))
    return out.metrics.cached_tokens


def test_reset_prefix_cache_forgets(llm: LLM) -> None:
    prompt = list(range(5, 105))
    assert [cached(llm, prompt) for _ in range(2)] == [0, 96]
    llm.reset_prefix_cache()
    assert [cached(llm, prompt) for _ in range(2)] == [0, 96]


@pytest.mark.parametrize(("interval", "found"), [(0, 0), (32, 64), (64, 64), (96, 0)])
def test_a_snapshot_interval_keeps_states_along_a_prompt(engine_dir: Path, interval: int, found: int) -> None:
    """The second prompt leaves the first where only the interval has left a state."""
    first = list(range(5, 155))
    with LLM(engine_dir, max_rows=4, snapshot_interval=interval) as llm:
        assert cached(llm, first) == 0
        assert cached(llm, [*first[:90], *range(200, 230)]) == found


@pytest.fixture
def slow(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Takes 40 seconds for 400 tokens: whoever leaves, leaves before the end."""
    launch = llm._loop.steps.launch
    monkeypatch.setattr(llm._loop.steps, "launch", lambda plan: (time.sleep(0.1), launch(plan))[1])
    return llm


def test_an_abandoned_stream_is_cancelled(slow: LLM) -> None:
    before = slow.counters.num_output_tokens
    stream = slow.stream("def ", params(max_tokens=400))
    next(stream)
    stream.close()
    while slow._loop.scheduler.busy:
        time.sleep(0.01)
    assert slow.counters.num_output_tokens - before < 400
    slow._loop.scheduler.audit()


def test_a_stream_that_nobody_began_to_read_runs_to_its_end(slow: LLM) -> None:
    before = slow.counters.num_output_tokens
    stream = slow.stream("def ", params(max_tokens=400))
    del stream
    slow.generate("x", params(max_tokens=1))
    while slow._loop.scheduler.busy:
        time.sleep(0.01)
    assert slow.counters.num_output_tokens - before < 400


def test_submit_and_abort(slow: LLM) -> None:
    pieces: list[Piece] = []
    started, ended = threading.Event(), threading.Event()

    def take(piece: Piece) -> None:
        pieces.append(piece)
        started.set()
        if piece.finish_reason:
            ended.set()

    request_id = slow.submit("def ", params(max_tokens=400), take)
    assert started.wait(60)
    slow.abort(request_id)
    assert ended.wait(60) and pieces[-1].finish_reason == "cancelled"


def test_ctrl_c_ends_a_generate_and_its_requests(llm: LLM) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts without it

    def press() -> None:
        while not llm._loop.scheduler.busy:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["def "] * 20, params(max_tokens=500))
    signal.signal(signal.SIGINT, before)
    (out,) = llm.generate(["def "], params())
    assert out.finish_reason == "length"


def test_a_bad_word_is_not_written(llm: LLM) -> None:
    (free,) = llm.generate(["def "], params())
    texts = {token_id: llm._text.decode([token_id]) for token_id in free.token_ids}
    words = {i: text for i, text in texts.items() if llm._text.encode_words(text) == [i]}
    assert words
    for token_id, word in words.items():
        (found,) = llm.generate(["def "], params(bad_words=word))
        assert token_id not in found.token_ids


def test_chat(llm: LLM) -> None:
    assert llm.chat_text([{"role": "user", "content": "hi"}]) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_one_prompt_gives_a_list_of_one(llm: LLM) -> None:
    for prompt in ("def ", [5, 6, 7], (5, 6, 7)):
        (wanted,), (found,) = llm.generate([prompt], params()), llm.generate(prompt, params())
        assert found.token_ids == wanted.token_ids and found.prompt_token_ids == wanted.prompt_token_ids


def test_chat_answers_a_conversation(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (wanted,) = llm.generate(llm.chat_text(messages), params())
    assert llm.chat(messages, params()).token_ids == wanted.token_ids


def test_tools_come_into_the_prompt_where_the_template_shows_them(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    assert llm.chat_text(messages, []) == llm.chat_text(messages)
    template = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{{ messages[0].content }}"
    monkeypatch.setattr(llm._text, "template", template)
    monkeypatch.setitem(vars(llm._text), "_chat_template", ChatTemplate(template))
    assert llm.chat_text(messages, tools) == "add hi"


def test_progress_is_shown_when_asked(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a"], params(max_tokens=1))
    assert capsys.readouterr() == ("", "")
    llm.generate(["a"], params(max_tokens=1), progress=True)
    shown = capsys.readouterr()
    assert "requests" in shown.err and shown.out == ""


def test_no_prompts_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []


MANY = tuple((i,) for i in range(320))
BAD = [  # a prompt, code
    ("", "out_of_range"),
    ([], "out_of_range"),
    (None, "wrong_type"),
    (b"def ", "wrong_type"),
    (7, "wrong_type"),
    ({"prompt": "x"}, "wrong_type"),
    ("a\ud800", "malformed"),
    ([1, 320], "out_of_range"),
    ([1] * 512, "too_long"),
    (["a", "b"], "wrong_type"),
]
CALLS = [
    (lambda llm: llm.generate(""), "out_of_range", "prompt"),
    (lambda llm: llm.generate({"def ": 1}, params()), "wrong_type", "prompts"),
    (lambda llm: llm.generate(["a", "b"], [params()]), "conflict", "params"),
    (lambda llm: llm.generate(["a"], params(bad_words_ids=MANY)), "conflict", "bad_words"),  # it got token 0
    (lambda llm: llm.stream("a", {"max_tokens": 3}), "wrong_type", "params"),
    (lambda llm: llm.chat_text(5), "wrong_type", "messages"),
    (lambda llm: llm.chat_text([{"role": "user", "content": "hi"}], {}), "wrong_type", "tools"),
    (lambda llm: llm.chat([{"role": "user", "content": "hi"}], params(), tools=[{}]), "unsupported", "tools"),
    # what the loop's thread would have met
    (lambda llm: llm.abort([1]), "wrong_type", "request_id"),
    (lambda llm: llm.submit("a", params(), None), "wrong_type", "on_piece"),
    (lambda llm: llm.watch_cache(None), "wrong_type", "observer"),
    # before anything is loaded
    (lambda llm: LLM("engine", prefix_caching=True), "unknown", "prefix_caching"),
    (lambda llm: LLM("engine", progress="yes"), "wrong_type", "progress"),
    (lambda llm: LLM("nowhere"), "not_found", "engine_dir"),
    (lambda llm: LLM(Path(__file__).parent), "not_found", "engine_dir"),
    (lambda llm: LLM(None), "wrong_type", "engine_dir"),
]


@pytest.mark.parametrize(("bad", "code"), BAD)
def test_a_bad_prompt_is_refused_and_the_others_run_on(llm: LLM, bad: object, code: str) -> None:
    good = llm.stream("def ", params())
    first = next(good)
    error = refused(lambda: llm.generate(["x", bad], params()))
    assert (error.code, error.field) == (code, "prompt") and str(error).startswith("prompts[1]: ")
    assert refused(lambda: llm.stream(bad, params())).code == code
    pieces, (out,) = [first, *good], llm.generate(["def "], params())
    assert joined(pieces) == (out.token_ids, out.text)
    assert [piece.finish_reason for piece in pieces] == [None] * 11 + ["length"]


@pytest.mark.parametrize(("call", "code", "field"), CALLS)
def test_bad_calls(llm: LLM, call: Callable[[LLM], object], code: str, field: str) -> None:
    assert code_and_field(lambda: call(llm)) == (code, field)


@pytest.fixture
def copy(engine_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(engine_dir, tmp_path / "engine"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 2**63),
        ("stop", [1]),
        ("logit_bias", {5: "x"}),
        ("structured_outputs", {"regex": 5}),
        ("x", 1),
    ],
)
@pytest.mark.parametrize("way", ["copied", "constructed", "written into"])
def test_params_that_nobody_checked_reach_the_engine(llm: LLM, way: str, name: str, value: object) -> None:
    """Pydantic checks no `model_copy(update=...)`; the engine's thread would raise, for all requests."""
    match way:
        case "copied":
            unchecked = params().model_copy(update={name: value})
        case "constructed":
            unchecked = SamplingParams.model_construct(**{name: value})
            vars(unchecked)[name] = value
        case _:
            unchecked = params()
            vars(unchecked)[name] = value
    with pytest.raises(Refused, match=name):
        llm.submit([5], unchecked, print)


def test_params_that_change_once_they_are_submitted_change_the_request(llm: LLM) -> None:
    own = params(logit_bias={5: 100.0}, max_tokens=4)
    pieces = llm.stream([5], own)
    own.logit_bias["x"] = None  # pyright: ignore[reportIndexIssue]
    assert [token_id for piece in pieces for token_id in piece.token_ids] == [5] * 4


def test_an_edited_manifest_is_refused(copy: Path) -> None:
    path = copy / manifest.FILE
    content = json.loads(path.read_text())
    content["limits"]["max_rows"] = 999
    path.write_text(json.dumps(content))
    with pytest.raises(Refused, match=r"manifest.json was changed after the build"):
        LLM(copy)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (-4, "limits.max_rows is -4, expected more than 0"),
        ("many", "limits.max_rows is 'many', expected a whole number"),
        (None, "limits.max_rows is missing"),
    ],
)
def test_a_damaged_manifest_is_refused_with_the_value_and_not_with_its_limit_alone(
    copy: Path, value: object, said: str
) -> None:
    path = copy / manifest.FILE
    content = json.loads(path.read_text())
    content["limits"]["max_rows"] = value
    if value is None:
        del content["limits"]["max_rows"]
    path.write_text(json.dumps(content))
    with pytest.raises(Refused, match=rf"manifest.json: {said}.*; run build-engine again$"):
        LLM(copy)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"format": "8"}', f"has format '8', hemiola 0.1.0 reads {manifest.FORMAT}"),
        ('{"format": 7}', f"has format 7, hemiola 0.1.0 reads {manifest.FORMAT}"),
        ('{"format": "' + "x" * 5000 + '"}', "has format 'xxx"),
        ("{}", "has no format"),
        ("[]", "is no JSON object"),
        ("null", "is no JSON object"),
    ],
)
def test_a_manifest_is_not_of_a_format_that_is_the_one_that_is_read(copy: Path, text: str, said: str) -> None:
    (copy / manifest.FILE).write_text(text)
    error = refused(lambda: LLM(copy))
    assert str(error).startswith(f"{copy / manifest.FILE} {said}")
    assert str(error).endswith("; run build-engine again") and len(str(error)) < 400


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
@pytest.mark.parametrize("name", [manifest.FILE, "trunk.jsonl"])
def test_what_is_there_and_no_file_is_not_called_missing(
    copy: Path, name: str, make: Callable[[Path], None]
) -> None:
    (copy / name).unlink()
    make(copy / name)
    error = refused(lambda: LLM(copy))
    assert str(error) == f"{copy / name} is no regular file; run build-engine again"


def test_another_versions_engine_is_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hemiola, "__version__", "9.9")
    with pytest.raises(Refused, match=r"was built by hemiola 0.1.0, this is 9.9; run build-engine again"):
        LLM(copy)


def test_an_engine_that_calls_other_ops_is_one_line_and_no_page_of_warnings(
    copy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As one from before an op got an argument more."""
    found = manifest.load(copy)
    assert set(found.ops) == {"attention", "conv", "delta", "embed", "gate", "linear", "norm", "rope"}
    assert found.ops["norm"].startswith("norm(Tensor x, ") and found.ops["norm"].endswith(" -> Tensor")
    older = {
        **found.ops,
        "delta": found.ops["delta"].replace("Tensor q, ", ""),
        "lost": "lost(Tensor x) -> Tensor",
    }
    found.model_copy(update={"ops": older}).write(copy)
    error = refused(lambda: LLM(copy))
    assert str(error) == (
        f"{copy / 'manifest.json'} was built for other forms of the ops delta, lost than this hemiola has;"
        " run build-engine again"
    )
    assert capfd.readouterr() == ("", "")


def sealed(copy: Path) -> None:
    """Make the manifest agree with the files again: what remains wrong must be found by who reads it."""
    found = manifest.parse(copy / manifest.FILE)
    hashes = {
        name: __import__("hashlib").sha256((copy / name).read_bytes()).hexdigest() for name in found.sha256
    }
    found.model_copy(update={"sha256": hashes}).write(copy)


def test_programs_and_tokenizers_that_do_not_load_are_refused(copy: Path) -> None:
    program = (copy / "trunk.jsonl").read_bytes()
    (copy / "trunk.jsonl").write_bytes(b"nonsense")
    sealed(copy)
    with pytest.raises(Refused, match=r"trunk.jsonl, line 1: "):
        LLM(copy)
    (copy / "trunk.jsonl").write_bytes(program)
    (copy / "tokenizer/tokenizer.json").write_text("{}")
    sealed(copy)
    with pytest.raises(Refused, match=r"tokenizer.json is not a tokenizer"):
        LLM(copy)


def test_a_closed_llm_refuses(engine_dir: Path) -> None:
    with LLM(engine_dir, max_rows=1, max_len=64) as llm:
        assert llm.generate(["a"], params(max_tokens=1))[0].finish_reason == "length"
        with pytest.raises(Refused, match="start with max_len=81"):
            llm.generate([[1] * 80])
    with pytest.raises(Refused, match="the engine is closed"):
        llm.generate(["a"])
    llm.close()


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_an_engine_leaves_processes_that_compiled_grammars(engine_dir: Path, how: str) -> None:
    before = descendants(os.getpid())
    llm = LLM(engine_dir, max_rows=1, max_len=64)
    guided = params(max_tokens=1, ignore_eos=False, structured_outputs={"regex": "[a-z]+"})
    assert llm.generate(["a"], guided)[0].finish_reason == "length"
    (trial,) = descendants(os.getpid()).keys() - before
    if how == "closed":
        llm.close()
        with pytest.raises(Refused, match="the engine is closed"):
            llm.generate(["a"], guided)
        assert trial not in descendants(os.getpid())
    del llm
    gc.collect()
    assert trial not in descendants(os.getpid())


def test_more_pages_than_a_number_holds_are_refused(tiny_engine: Callable[..., Path]) -> None:
    engine = tiny_engine("qwen3_5")
    assert code_and_field(lambda: LLM(engine, num_pages=10**30)) == ("exhausted", "num_pages")


@pytest.mark.parametrize("call", ["generate", "stream", "chat"])
def test_an_on_piece_that_waits_for_another_request_stands_in_everybodys_way(
    engine_dir: Path, call: str
) -> None:
    """It was in the thread that computes: nothing was ever computed again."""
    said: list[Refused] = []
    ended = threading.Event()
    with LLM(engine_dir) as llm:
        waits = {
            "generate": lambda: llm.generate([[2, 3]], SamplingParams(max_tokens=2)),
            "stream": lambda: list(llm.stream([2, 3], SamplingParams(max_tokens=2))),
            "chat": lambda: llm.chat([{"role": "user", "content": "x"}], SamplingParams(max_tokens=2)),
        }

        def on_piece(piece: Piece) -> None:
            try:
                waits[call]()
            except Refused as error:
                said.append(error)
            if piece.finish_reason is not None:
                ended.set()

        llm.submit([2, 3], SamplingParams(max_tokens=2, ignore_eos=True), on_piece)
        assert ended.wait(60)
        assert {str(error).partition(";")[2] for error in said} == {" call this from another thread"}
        assert len(said) == 2 and waits[call]()
