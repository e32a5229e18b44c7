"""What needs no server: how pieces become responses, and what happens when an engine or a send fails."""

import gc
import importlib.util
import json
import os
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from kit.served import until

from hemiola.builder.build import Options, build
from hemiola.runtime.api import Counters, Load, Logprob, Metrics, Piece, SamplingParams
from hemiola.runtime.cache.statistics import Statistics
from hemiola.runtime.cache.tier import NO_TIER, TierStatistics, TierUse
from hemiola.runtime.choose.grammar import Stuck
from hemiola.runtime.errors import Failed, Lost, Refused
from hemiola.runtime.llm import LLM
from hemiola.runtime.progress import File, read_report
from hemiola.runtime.schedule.request import refused_by_grammar
from hemiola.runtime.serving import ask as asks
from hemiola.runtime.serving import ending, service
from hemiola.runtime.serving.arrival import make_mark
from hemiola.runtime.serving.ask import read_tensor
from hemiola.runtime.serving.error_text import error_from
from hemiola.runtime.serving.metrics import Board, Series
from hemiola.runtime.text import LONG_TEXT

MODEL = Path(__file__).resolve().parents[2] / "model_repo/hemiola/1/model.py"
FINAL = 1


class Tensor:
    def __init__(self, name: str, values: np.ndarray) -> None:
        self._name, self._values = name, values

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._values

    def plain(self) -> object:
        return self._values[0].decode() if self._values.dtype == object else self._values.tolist()


class TritonError(Exception):
    INVALID_ARG, INTERNAL, CANCELLED, UNAVAILABLE = range(4)

    def __init__(self, message: str, code: int) -> None:
        message.encode()  # as a C++ string it must be UTF-8
        super().__init__(message)


class InferenceResponse:
    def __init__(self, tensors: list[Tensor] = (), error: TritonError | None = None) -> None:
        self.said = str(error) if error else {tensor.name(): tensor.plain() for tensor in tensors}


class Sender:
    """A response sender that can be slow, or broken."""

    def __init__(self) -> None:
        self.sent: list[tuple[object, int]] = []
        self.num_begun = 0
        self.gate = threading.Event()
        self.gate.set()
        self.broken = self.cancelled = self.lost = False

    def send(self, response: InferenceResponse, flags: int = 0) -> None:
        self.num_begun += 1
        self.gate.wait()
        if self.broken:
            raise RuntimeError("broken")
        self.sent.append((response.said, flags))

    def is_cancelled(self) -> bool:
        if self.lost:
            raise RuntimeError("lost")
        return self.cancelled


class MetricFamily:
    """Tritonserver's, as far as we call it."""

    COUNTER, GAUGE = "counter", "gauge"
    page: ClassVar[dict[tuple[str, tuple], float]] = {}

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.name, self.kind = name, kind
        assert description

    def Metric(self, labels: dict[str, str]) -> SimpleNamespace:  # noqa: N802
        key = self.name, tuple(sorted(labels.items()))
        self.page.setdefault(key, 0.0)  # what an engine left that was unloaded stays

        def increment(by: float) -> None:
            assert self.kind == "counter" and by > 0
            self.page[key] += by

        def put(value: float) -> None:
            assert self.kind == "gauge"
            self.page[key] = value

        return SimpleNamespace(increment=increment, set=put, value=lambda: self.page[key])


class FakeLlm:
    """Says what the test says."""

    def __init__(self, engine_dir: str, *, progress: bool | File, **options: object) -> None:
        self.opened, self.progress = (engine_dir, options), progress
        self.requests: list[SimpleNamespace] = []
        self.aborted: list[int] = []
        self.before_submit_returns: Callable[[SimpleNamespace], None] = lambda request: None
        self.before_encode_returns: Callable[[object], None] = lambda prompt: None
        self.config = SimpleNamespace(max_rows=2, num_drafts=3, page_len=16, max_len=100)
        self.manifest = SimpleNamespace(arch="cpu")
        self.counters, self.reuse = Counters(), Statistics()
        self.tiers = {"host": TierUse(TierStatistics(3, 4, 5, 6), 10, 2, 100, True), "disk": NO_TIER}
        self.failure = ""

    def load(self) -> Load:
        return Load(1, 2, 10, 4, 3, 8, 5, 0.0, self.failure)

    def chat_text(self, messages: list[dict[str, str]]) -> str:
        return messages[-1]["content"]

    def encode(self, prompt: str | list[int]) -> list[int]:
        self.before_encode_returns(prompt)
        return list(prompt.encode()) if isinstance(prompt, str) else prompt

    def submit(
        self, prompt: list[int], params: SamplingParams, on_piece: Callable[[Piece], None], arrival: float
    ) -> int:
        if prompt == [0]:
            raise Refused("other", message="prompt is zero")
        if prompt == [9]:
            raise Failed("the engine failed (x)")
        if prompt == [7]:
            raise ValueError("trouble")
        request = SimpleNamespace(prompt=prompt, params=params, say=on_piece, arrival=arrival)
        self.requests.append(request)
        number = len(self.requests)
        self.before_submit_returns(request)
        return number

    def abort(self, request_id: int) -> None:
        self.aborted.append(request_id)
        self.requests[request_id - 1].say(last("cancelled"))

    def close(self) -> None:
        pass


def last(finish_reason: str, error: str | None = None) -> Piece:
    return Piece("", [], None, finish_reason, Metrics(num_prompt_tokens=3, arrival=0.0), error)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    utils = ModuleType("triton_python_backend_utils")
    utils.Tensor, utils.TritonError, utils.InferenceResponse = Tensor, TritonError, InferenceResponse
    utils.TritonModelException = type("TritonModelException", (Exception,), {})
    utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    utils.Logger = SimpleNamespace(log_error=lambda message: None)
    utils.MetricFamily = MetricFamily
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    spec = importlib.util.spec_from_file_location("triton_model", MODEL)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    loaded.LLM = FakeLlm
    MetricFamily.page.clear()
    loaded.close_inherited_sockets = lambda: None  # this process is no engine
    monkeypatch.setattr(service, "Watchdog", lambda: SimpleNamespace(restart_if_lost=lambda: False))
    # all that tests have imported takes a second to look through; and what conftest.py froze stays so
    untouched = SimpleNamespace(collect=lambda: 0, freeze=lambda: None, unfreeze=lambda: None)
    monkeypatch.setattr(service, "gc", untouched)
    return loaded


def config(
    folder: str = "/nowhere", kind: str = "MODEL", count: int = 1, gpus: Sequence[int] = (), **parameters: str
) -> dict[str, str]:
    """As Triton calls the instance of the last of these GPUs."""
    values = {name: {"string_value": value} for name, value in parameters.items()}
    named = {"model_name": "m", "model_version": "1", "model_repository": folder}
    placed = {"model_instance_kind": kind, "model_instance_device_id": str([0, *gpus][-1])}
    group = {"kind": f"KIND_{kind}", "count": count, "gpus": list(gpus)}
    return named | placed | {"model_config": json.dumps({"parameters": values, "instance_group": [group]})}


@pytest.fixture
def model(module: ModuleType) -> Iterator[Any]:
    made = module.TritonPythonModel()
    made.initialize(config(engine_dir="/engine", max_rows="4", memory_fraction="0.25", drafts="ngram"))
    yield made
    made.finalize()


def triton_request(
    sender: Sender,
    parameters: Mapping[str, object] | None = None,
    prompt: Sequence[int] = (1, 2, 3),
    name: str = "",
) -> SimpleNamespace:
    tensors = [Tensor("input_ids", np.array(prompt, np.int64))] if prompt else []
    return SimpleNamespace(
        inputs=lambda: tensors,
        parameters=lambda: json.dumps(parameters or {}),
        timeout=lambda: 0,
        request_id=lambda: name,
        get_response_sender=lambda: sender,
    )


def ask(model: Any, *request: object, **named: object) -> Sender:
    """As triton_request has it."""
    sender = Sender()
    model.execute([triton_request(sender, *request, **named)])
    return sender


def test_an_error_that_cannot_be_sent_leaves_its_caller_waiting(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a lone surrogate in it, or one that cannot be written at all."""

    class Unwritable(Refused):
        @property
        def parts(self) -> tuple[str, ...]:
            raise RecursionError("too deep")

    for error, said in (
        (Refused("other", message="no \ud800 here"), "[INVALID_ARG] no \ufffd here"),
        (Unwritable("other"), "[INTERNAL] Unwritable cannot be written as text (RecursionError)"),
    ):
        monkeypatch.setattr(model.service.llm, "submit", raising(error))
        sender = ask(model)
        assert sender.sent == [(said, FINAL)]
    monkeypatch.undo()
    sender = ask(model)
    model.service.llm.requests[-1].say(last("error")._replace(refused=Unwritable("other")))
    until(lambda: sender.sent)
    assert sender.sent == [("[INTERNAL] Unwritable cannot be written as text (RecursionError)", FINAL)]
    failing = Piece("", [], None, "error", Metrics(num_prompt_tokens=3, arrival=0.0), "no \ud800 here")
    sender = ask(model)
    model.service.llm.requests[-1].say(failing)
    until(lambda: sender.sent)
    assert sender.sent == [("[INTERNAL] no ? here", FINAL)]


def raising(error: Exception) -> Callable[..., Any]:
    def raises(*_: object, **__: object) -> Any:
        raise error

    return raises


def test_options_are_the_parameters_by_their_json_spelling(model: Any) -> None:
    assert model.service.llm.opened == (
        "/engine",
        {"max_rows": 4, "memory_fraction": 0.25, "drafts": "ngram"},
    )
    said = model.service.llm.progress
    assert said is True, "without `hemiola serve` the server's log says how far the engine is"


def test_an_engine_tells_its_server_how_far_it_is(module: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    model = module.TritonPythonModel()
    own = json.dumps({"engine_dir": "/engine", "progress_file": str(tmp_path / "hemiola")})
    (tmp_path / "1" / "model.json").write_text(own)
    model.initialize(config(str(tmp_path)))
    model.service.llm.progress("compiling kernels", 3, 34)
    model.finalize()
    assert read_report(tmp_path / "hemiola") == ("compiling kernels", 3, 34)


def test_an_engine_sees_the_gpu_of_its_instance_alone(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Triton tells of the instance; tests/runtime/serving/test_place.py has every case."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 1, raising=False)
    seen = []

    class Llm(FakeLlm):
        def __init__(self, engine_dir: str, **options: Any) -> None:
            super().__init__(engine_dir, **options)
            self.manifest.arch = "sm_90"
            seen.append(os.environ["CUDA_VISIBLE_DEVICES"])

    module.LLM = Llm
    model = module.TritonPythonModel()
    model.initialize(config(engine_dir="/engine", kind="GPU", gpus=[1]))
    model.finalize()
    assert seen == ["5"]
    for reason, placed in (
        ("asks for 2 instances", {"kind": "GPU", "gpus": [0, 1]}),
        ("its instance_group is KIND_CPU", {"kind": "CPU"}),
        ("device is 1, but", {"device": "1"}),
    ):
        with pytest.raises(Exception, match=reason):
            module.TritonPythonModel().initialize(config(engine_dir="/engine", **placed))


def test_a_placeholder_left_in_the_config_is_refused(module: ModuleType) -> None:
    with pytest.raises(
        Exception, match=r"engine_dir is the placeholder \$\{engine_dir\}; write its value into model.json"
    ):
        module.TritonPythonModel().initialize(config(engine_dir="${engine_dir}"))


def test_one_answer_in_one_row_is_not_told_in_plurals(module: ModuleType) -> None:
    model = module.TritonPythonModel()
    model.initialize(config(engine_dir="/engine", max_queue="0"))
    model.service.llm.config.max_rows = model.service._most_open = 1
    ask(model)
    sender = ask(model)
    until(lambda: sender.sent)
    ((said, _),) = sender.sent
    room = "1 answer is under way in 1 row, and no more than max_queue=0 may wait"
    assert said.partition("] ")[2] == f"{room}; try again in 1 s"
    model.finalize()


def test_a_request_for_several_answers_needs_a_place_for_each(module: ModuleType) -> None:
    """Counted as one, n = 3 came in where two had room, and the queue was longer than max_queue."""
    model = module.TritonPythonModel()
    model.initialize(config(engine_dir="/engine", max_queue="0"))
    model.service.llm.config.max_rows = model.service._most_open = 4
    ask(model, {"n": 2})
    refused = ask(model, {"n": 3})
    until(lambda: refused.sent)
    ((said, _),) = refused.sent
    assert "2 answers are under way in 4 rows" in said
    assert len(model.service.llm.requests) == 2
    ask(model, {"n": 2})
    assert len(model.service.llm.requests) == 4 and model.service.outbox.num_open == 4
    model.finalize()


def test_a_full_collection_does_not_look_at_what_stands(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "gc", gc)
    gc.unfreeze()
    model = module.TritonPythonModel()
    model.initialize(config(engine_dir="/engine"))
    assert gc.get_freeze_count() > 10_000 > len(gc.get_objects())
    model.finalize()
    assert gc.get_freeze_count() == 0
    gc.freeze()  # for the tests behind


def test_pieces_said_while_a_send_is_slow_leave_as_one_response(model: Any) -> None:
    sender = ask(model, {"stream": True, "logprobs": 1})
    (request,) = model.service.llm.requests
    sender.gate.clear()
    for i in range(5):
        request.say(Piece(str(i), [i], [Logprob(i, -0.5, ((i, -0.5),))]))
        until(lambda: sender.num_begun)
    request.say(last("stop"))
    sender.gate.set()
    until(lambda: sender.sent and sender.sent[-1][1] == FINAL)
    said = [response for response, _ in sender.sent]
    assert len(said) == 2, "the first was on its way; all the others are one"
    assert "".join(response["text_output"] for response in said) == "01234"
    assert [i for response in said for i in response["output_ids"]] == [0, 1, 2, 3, 4]
    logprobs = [
        entry for response in said if "logprobs" in response for entry in json.loads(response["logprobs"])
    ]
    assert logprobs == [{"token_id": i, "logprob": -0.5, "top": [[i, -0.5]]} for i in range(5)]
    assert [response.get("finish_reason") for response in said] == [None, "stop"]
    assert (said[1]["num_input_tokens"], said[1]["num_output_tokens"]) == ([3], [5])


def test_a_prompts_logprobs_are_one_list_however_many_answers_there_are(model: Any) -> None:
    sender = ask(model, {"n": 3, "prompt_logprobs": 1})
    first, *others = model.service.llm.requests
    assert first.params.prompt_logprobs == 1
    assert [other.params.prompt_logprobs for other in others] == [None, None]
    scores = [None, Logprob(5, -0.5, ((6, -0.25),))]
    for request in (*others, first):  # the one that scores the prompt may be the last
        request.say(Piece("a", [7], prompt_logprobs=scores if request is first else None))
    for request in model.service.llm.requests:
        request.say(last("stop"))
    until(lambda: sender.sent)
    ((response, _),) = sender.sent
    assert json.loads(response["prompt_logprobs"]) == [
        None,
        {"token_id": 5, "logprob": -0.5, "top": [[6, -0.25]]},
    ]


def test_the_log_probabilities_of_a_whole_answer_are_held_without_a_limit(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 answers of 4,000 tokens with their 20 best took 0.7 GB; a stream holds none of them."""
    monkeypatch.setattr(asks, "MOST_SCORES", 12 * 3)
    asked = {"n": 2, "max_tokens": 6, "logprobs": 2}
    cut_short = {"n": 1, "max_tokens": 5000, "logprobs": 2}  # the context ends it
    model.service.llm.config.max_len = 13  # with its prompt of one token
    wanted = (
        "[INVALID_ARG] logprobs of {} tokens may be {}, the limit is 36; stream, or lower n or max_tokens"
    )
    for more, said in (
        (asked, None),
        (cut_short, None),
        (asked | {"max_tokens": 7}, wanted.format(14, 42)),
        (asked | {"logprobs": 3}, wanted.format(12, 48)),
        ({"n": 1, "max_tokens": 12, "logprobs": 3, "stream": True}, None),
        ({"n": 2, "max_tokens": 12, "return_log_probs": True}, None),
        ({"n": 4, "max_tokens": 12, "return_log_probs": True}, wanted.format(48, 48)),
    ):
        sender = ask(model, more, [1])
        assert sender.sent == ([(said, FINAL)] if said else []), more
        for request in model.service.llm.requests:
            request.say(last("stop"))
        until(lambda: not model.service.outbox.num_open)
        model.service.llm.requests.clear()
    monkeypatch.setattr(asks, "MOST_TOKENS", 3 * 5)
    assert not ask(model, {"prompt_logprobs": 1}, [1] * 5).sent
    ((said, _),) = ask(model, {"prompt_logprobs": 1, "stream": True}, [1] * 6).sent
    assert "are 18 tokens and log-probabilities of tokens, the limit is 15" in said


def test_an_id_of_any_length_comes_back_with_each_response(model: Any) -> None:
    """Of 8 MB over gRPC, they took the time of all other streams."""
    said = "[INVALID_ARG] id has 1025 characters, the limit is 1024; give a shorter one"
    assert ask(model, name="x" * 1025).sent == [(said, FINAL)]
    sender = ask(model, name="x" * 1024)
    model.service.llm.requests[0].say(last("stop"))
    until(lambda: sender.sent)


def test_the_engines_thread_never_waits_for_a_send(model: Any) -> None:
    sender = ask(model, {"stream": True})
    sender.gate.clear()
    for i in range(1000):
        model.service.llm.requests[0].say(Piece("", [i]))
    assert not sender.sent
    sender.gate.set()


def test_without_stream_there_is_one_response(model: Any) -> None:
    sender = ask(model)
    for i in range(3):
        model.service.llm.requests[0].say(Piece("x", [i]))
    time.sleep(0.05)
    assert not sender.sent
    model.service.llm.requests[0].say(last("length"))
    until(lambda: sender.sent)
    ((response, flags),) = sender.sent
    assert (response["text_output"], response["output_ids"], flags) == ("xxx", [0, 1, 2], FINAL)


def test_a_failed_engine_ends_every_stream_with_its_reason(model: Any) -> None:
    senders = [ask(model, {"stream": stream}) for stream in (True, False, True)]
    for request in model.service.llm.requests:
        request.say(last("error", "the engine failed: ValueError: x"))
    until(lambda: all(sender.sent for sender in senders))
    for sender in senders:
        assert sender.sent == [("[INTERNAL] the engine failed: ValueError: x", FINAL)]


@pytest.mark.parametrize("as_data", [False, True])
def test_bans_that_leave_no_token_are_called_a_failure_of_the_engine(model: Any, as_data: bool) -> None:
    sender = ask(model, {"error_data": as_data})
    refused = refused_by_grammar(Stuck("min_tokens and bad words leave no token"))
    model.service.llm.requests[0].say(last("error", str(refused))._replace(refused=refused))
    until(lambda: sender.sent)
    ((said, flags),) = sender.sent
    assert said.startswith("[INVALID_ARG] ") and flags == FINAL
    found = error_from(said)
    assert isinstance(found, Refused) and str(found) == str(refused)
    wanted = ("conflict", "structured_outputs") if as_data else ("other", "")
    assert (found.code, found.field) == wanted
    assert model.service.meter._outcomes == {"invalid": 1}


@pytest.mark.parametrize(
    ("prompt", "said"), [([0], "[INVALID_ARG] prompt is zero"), ([9], "[UNAVAILABLE] the engine failed (x)")]
)
def test_what_the_engine_does_not_take_is_answered_and_forgotten(
    model: Any, prompt: list[int], said: str
) -> None:
    assert ask(model, prompt=prompt).sent == [(said, FINAL)]
    assert not model.service.outbox._open


def test_json_texts_become_what_they_say(model: Any) -> None:
    ask(model, {"logit_bias": '{"5": -1.5, "7": 2}', "bad_words_ids": "[[1, 2], [3]]", "bad_words": "x"})
    params = model.service.llm.requests[0].params
    assert params.logit_bias == {5: -1.5, 7: 2.0}
    assert (params.bad_words_ids, params.bad_words) == (((1, 2), (3,)), ("x",))


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("logit_bias", "{", """logit_bias is '{'; give a text that is JSON, such as {"5": -100}"""),
        ("logit_bias", '{"a": 1}', "give a text that is JSON"),
        ("logit_bias", "null", "give a text that is JSON"),
        ("logit_bias", 5, "logit_bias is 5; give a text that is JSON"),
        ("logit_bias", '{"5": NaN}', "logit_bias[5] is nan; give a finite number"),
        ("logit_bias", "[1]", "logit_bias is [1]; give an object"),
        ("bad_words_ids", "[" * 60_000, "give a text that is JSON, such as [[5, 6]]"),
        ("bad_words_ids", "[" * 100_000, "holds 100000 objects, lists and names, the limit is 65536"),
        ("bad_words_ids", "[[]]", "an empty bad word would forbid every token"),
        ("bad_words_ids", '["a"]', "bad_words_ids[0] is 'a'; give a list"),
        ("structured_outputs", "[0-9]+", """give a text that is JSON, such as {"regex": "[0-9]+"}"""),
        ("structured_outputs", '{"5": "a"}', "structured_outputs: unknown option '5'; the options are json,"),
        ("structured_outputs", '{"regex": "a", "choice": ["a"]}', "regex and choice given; give exactly one"),
    ],
)
def test_bad_json_is_refused_in_one_line(model: Any, name: str, text: object, reason: str) -> None:
    ((said, flags),) = ask(model, {name: text}).sent
    assert str(said).startswith("[INVALID_ARG] ") and reason in str(said) and flags == FINAL
    assert "\n" not in str(said) and len(str(said)) < 300


def test_a_grammar_that_is_compiled_holds_nobody_up_but_its_own_request(model: Any) -> None:
    compiled = threading.Event()

    def compile_it(request: SimpleNamespace) -> None:
        if request.params.structured_outputs is not None:
            assert compiled.wait(60)

    model.service.llm.before_submit_returns = compile_it
    slow = ask(model, {"structured_outputs": '{"regex": "a"}'}, name="slow")
    refused = ask(model, {"structured_outputs": '{"regex": "a"}'}, prompt=[0])
    quick = ask(model)
    until(lambda: len(model.service.llm.requests) == 2 and refused.sent)
    assert refused.sent == [("[INVALID_ARG] prompt is zero", FINAL)]
    by_params = {request.params.structured_outputs is None: request for request in model.service.llm.requests}
    by_params[True].say(last("stop"))
    until(lambda: quick.sent)
    model.service.outbox.cancel(["slow"])
    compiled.set()
    until(lambda: slow.sent)
    assert slow.sent == [("[CANCELLED] the request was cancelled", FINAL)]
    assert not model.service.outbox._open


def test_a_timeout_that_comes_while_the_clock_is_looked_at_is_told_as_cancelled(model: Any) -> None:
    """The engine's thread finds the time over between the look of another thread and what that one writes."""

    class Deadline(float):
        """Over for all who look but the first, who is overtaken."""

        seen = False

        def __lt__(self, now: float) -> bool:
            overtaken, self.seen = not self.seen, True
            if overtaken:
                model.service.llm.requests[0].say(Piece("x", [1]))
            return not overtaken

    model.service.outbox._abort = model.service.llm.aborted.append  # it ends in the next step
    sender = ask(model, {"timeout": 10**12})
    (stream,) = model.service.outbox._open.values()
    stream.deadline = Deadline(0)
    until(lambda: model.service.llm.aborted)
    model.service.outbox._check()  # whoever was overtaken has gone on
    model.service.llm.requests[0].say(last("cancelled"))
    until(lambda: sender.sent)
    ((said, _),) = sender.sent
    assert said["finish_reason"] == "timeout"
    assert model.service.meter._outcomes == {"timeout": 1}


def test_a_cancel_after_the_timeout_or_a_timeout_after_the_cancel_changes_the_reason(model: Any) -> None:
    senders = [ask(model, {"timeout": 10**12}, name=name) for name in ("late", "left")]
    late, left = model.service.outbox._open.values()
    late.end("timeout")
    model.service.outbox.cancel(["late", "left"])
    left.deadline = 0.0
    left.end("timeout")
    until(lambda: all(sender.sent for sender in senders))
    assert senders[0].sent[0][0]["finish_reason"] == "timeout"
    assert senders[1].sent == [("[CANCELLED] the request was cancelled", FINAL)]


def test_an_answer_whose_last_tokens_come_late_is_counted_as_a_timeout(model: Any) -> None:
    """It is whole: nothing is ended any more."""

    class Over(float):
        """For the engine's thread, which the test is, and not for the one that looks at the clock."""

        engine = threading.current_thread()

        def __lt__(self, now: float) -> bool:
            return threading.current_thread() is self.engine

    sender = ask(model, {"timeout": 10**12})
    (stream,) = model.service.outbox._open.values()
    stream.deadline = Over(0)
    model.service.llm.requests[0].say(Piece("x", [1], finish_reason="stop"))
    until(lambda: sender.sent)
    assert sender.sent[0][0]["finish_reason"] == "stop" and not model.service.llm.aborted
    assert model.service.meter._outcomes == {"success": 1}


LONG = "a" * LONG_TEXT


def test_a_prompt_that_is_tokenized_holds_other_requests_up(model: Any) -> None:
    gate = threading.Event()
    model.service.llm.before_encode_returns = lambda prompt: prompt == LONG and gate.wait(60)
    slow = [
        ask(model, body, prompt=[]) for body in ({"text_input": LONG}, {"text_input": LONG, "chat": True})
    ]
    ask(model)
    until(lambda: len(model.service.llm.requests) == 1)
    assert model.service.outbox.num_open == 3, "those that are tokenized have their room"
    gate.set()
    until(lambda: len(model.service.llm.requests) == 3)
    for request in model.service.llm.requests:
        request.say(last("stop"))
    until(lambda: all(sender.sent for sender in slow))


def test_latencies_and_timeouts_begin_behind_the_tokenizer(model: Any) -> None:
    seen: list[float] = []
    gate = threading.Event()

    def tokenize(prompt: object) -> None:
        seen.append(time.perf_counter())
        assert gate.wait(60)

    model.service.llm.before_encode_returns = tokenize
    sender = ask(model, {"text_input": LONG, "timeout": 1}, prompt=[])
    until(lambda: seen)
    (stream,) = model.service.outbox._open.values()
    until(lambda: stream.reason == "timeout")
    gate.set()
    until(lambda: sender.sent)
    assert model.service.llm.requests[0].arrival == stream.arrival < seen[0]
    assert sender.sent[0][0]["finish_reason"] == "timeout", "its time was over before it was queued"


def test_an_arrival_at_a_door_is_ignored_and_one_that_a_caller_invents_is_taken(module: ModuleType) -> None:
    served = module.TritonPythonModel()
    served.initialize(config(engine_dir="/engine", door_key="SECRET"))
    before = time.perf_counter()
    ask(served, {"hemiola-arrival": make_mark("SECRET", before - 5.0)})
    ask(served, {"hemiola-arrival": make_mark("SECRET", before + 1e9)})
    assert served.service.llm.requests[0].arrival == before - 5.0
    assert before < served.service.llm.requests[1].arrival <= time.perf_counter(), (
        "no request comes from the future"
    )
    assert "cancelled" in str(
        ask(served, {"cancel": "a", "hemiola-arrival": make_mark("SECRET", 1.0)}, []).sent
    )
    for wrong in ("", "secret 5.0", " 5.0", "é 1", 5):
        ((said, _),) = ask(served, {"hemiola-arrival": wrong}).sent
        assert said.startswith("[INVALID_ARG] hemiola-arrival is set by the doors of `hemiola serve` only")
    served.finalize()


def test_an_engine_without_doors_takes_any_arrival(model: Any) -> None:
    """Its key is empty."""
    ((said, _),) = ask(model, {"hemiola-arrival": make_mark("", 1.0)}).sent
    assert said.startswith("[INVALID_ARG] hemiola-arrival is ")


def test_any_caller_may_overtake_all_others(module: ModuleType) -> None:
    for options, least in (({}, 0), ({"min_priority": "-3"}, -3)):
        served = module.TritonPythonModel()
        served.initialize(config(engine_dir="/engine", **options))
        for priority in (least - 1, -(2**31)):
            ((said, _),) = ask(served, {"priority": priority}).sent
            assert said == (
                f"[INVALID_ARG] priority is {priority}, this server takes {least} or more (--min-priority);"
                " give a higher number"
            )
        ask(served, {"priority": least})
        assert [request.params.priority for request in served.service.llm.requests] == [least]
        served.finalize()


def test_a_request_for_which_there_is_no_thread_counts_for_ever(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took a place in the queue, and a server that shut down waited for it."""

    def submit(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(model.service._compiling, "submit", submit)
    ((said, flags),) = ask(model, {"structured_outputs": '{"regex": "a"}'}).sent
    assert (said, flags) == ("[INTERNAL] RuntimeError: can't start new thread", FINAL)
    assert model.service.outbox.num_open == 0


def test_one_compiling_grammar_blocks_another(model: Any) -> None:
    gate = threading.Event()
    slow = json.dumps({"regex": "slow"})

    def compile_it(request: SimpleNamespace) -> None:
        assert request.params.structured_outputs.regex != "slow" or gate.wait(60)

    model.service.llm.before_submit_returns = compile_it
    waits = ask(model, {"structured_outputs": slow})
    until(lambda: len(model.service.llm.requests) == 1)
    quick = ask(model, {"structured_outputs": json.dumps({"regex": "quick"})})
    until(lambda: len(model.service.llm.requests) == 2)
    model.service.llm.requests[1].say(last("stop"))
    until(lambda: quick.sent)
    gate.set()
    model.service.llm.requests[0].say(last("stop"))
    until(lambda: waits.sent)


def test_a_grammar_behind_others_that_take_for_ever_waits_for_ever(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    model.service.llm.before_submit_returns = lambda request: gate.wait(60)
    asked = {"structured_outputs": json.dumps({"regex": "slow"})}
    monkeypatch.setattr(model.service, "_most_open", 100)
    waits = [ask(model, asked) for _ in range(service.NUM_COMPILING)]
    until(lambda: len(model.service.llm.requests) == service.NUM_COMPILING)
    behind = ask(model, asked)
    monkeypatch.setattr(service, "MOST_WAIT_S", 0.0)
    gate.set()
    until(lambda: behind.sent)
    ((said, flags),) = behind.sent
    assert (said, flags) == (
        "[OVERLOADED] grammars of other requests took 0 s to compile; try again in 1 s",
        FINAL,
    )
    for request in model.service.llm.requests:
        request.say(last("stop"))
    until(lambda: all(sender.sent for sender in waits))
    assert len(model.service.llm.requests) == service.NUM_COMPILING and not model.service.outbox._open


def test_an_engine_takes_new_requests_while_its_server_ends(module: ModuleType, tmp_path: Path) -> None:
    """Over gRPC connections that callers keep; what is under way goes on, and may be cancelled."""
    served = module.TritonPythonModel()
    served.initialize(config(engine_dir="/engine", heartbeat_file=str(tmp_path / "m")))
    begun = ask(served, name="begun")
    ending.begin(tmp_path)
    refused = ask(served)
    assert refused.sent == [
        (
            "[UNAVAILABLE] the server is shutting down; send the request to another server, or again later",
            FINAL,
        )
    ]
    ((text, _),) = ask(served, {"error_data": True}).sent
    assert isinstance(error_from(text), Lost), "clients ask again"
    assert not begun.sent
    ask(served, {"cancel": "begun"}, [])
    until(lambda: begun.sent)
    served.finalize()


def test_finished_exchanges_are_kept(model: Any) -> None:
    """A server's memory grew with every request it ever had."""
    kept: list[weakref.ref] = []
    for number in range(64):
        senders = [ask(model, {"stream": bool(number % 2)}), ask(model, prompt=[0])]
        kept += map(weakref.ref, senders)
        model.service.llm.requests[-1].say(last("stop"))
        until(lambda senders=senders: all(sender.sent for sender in senders))
    del senders
    model.service.llm.requests.clear()
    assert not model.service.outbox._open

    def forgotten() -> bool:
        gc.collect()
        return sum(found() is not None for found in kept) <= 1  # the last one may be in a thread's hands

    until(forgotten)


def test_a_broken_stream_is_aborted_and_the_next_is_served(model: Any) -> None:
    broken, whole = ask(model, {"stream": True}), ask(model, {"stream": True})
    broken.broken = True
    model.service.llm.requests[0].say(Piece("x", [1]))
    until(lambda: model.service.llm.aborted == [1])
    model.service.llm.requests[1].say(last("stop"))
    until(lambda: whole.sent)
    assert not model.service.outbox._open


def test_a_send_that_fails_before_submit_has_returned_ends_the_request(model: Any) -> None:
    def speak_at_once(request: SimpleNamespace) -> None:
        request.say(Piece("x", [1]))
        (stream,) = model.service.outbox._open.values()
        until(lambda: stream.aborted)

    model.service.llm.before_submit_returns = speak_at_once
    sender = Sender()
    sender.broken = True
    model.execute([triton_request(sender, {"stream": True})])
    until(lambda: model.service.llm.aborted == [1])
    until(lambda: not model.service.outbox._open)


@pytest.mark.parametrize("prompt", [[0], [9], [7], []], ids=["refused", "failed", "trouble", "cancel"])
def test_an_error_that_cannot_be_sent_loses_no_other_request_of_the_batch(
    model: Any, prompt: list[int]
) -> None:
    first, broken, last_one = Sender(), Sender(), Sender()
    broken.broken = True
    bad = triton_request(broken, {} if prompt else {"cancel": "a"}, prompt)
    model.execute([triton_request(first), bad, triton_request(last_one)])
    for request in model.service.llm.requests:
        request.say(last("stop"))
    until(lambda: first.sent and last_one.sent)
    assert not model.service.outbox._open


def test_a_request_without_a_sender_loses_no_other_of_the_batch(model: Any) -> None:
    def no_sender() -> None:
        raise RuntimeError("no sender")

    bad, whole = triton_request(Sender()), Sender()
    bad.get_response_sender = no_sender
    model.execute([bad, triton_request(whole)])
    model.service.llm.requests[0].say(last("stop"))
    until(lambda: whole.sent)


def test_a_sender_that_cannot_say_whether_its_caller_left_is_given_up_alone(model: Any) -> None:
    lost = ask(model)
    lost.lost = True
    until(lambda: model.service.llm.aborted == [1])
    whole = ask(model)
    model.service.llm.requests[1].say(last("stop"))
    until(lambda: whole.sent)


def test_a_silent_request_whose_caller_left_is_aborted_soon(model: Any) -> None:
    sender = ask(model)
    sender.cancelled = True
    until(lambda: sender.sent)
    assert model.service.llm.aborted == [1]
    assert sender.sent == [("[CANCELLED] the request was cancelled", FINAL)]


def test_cancel_ends_the_requests_it_names_and_no_other(model: Any) -> None:
    senders = {name: ask(model, name=name) for name in ("a", "b", "")}
    answer = ask(model, {"cancel": "a"}, prompt=[])
    assert answer.sent == [({"finish_reason": "cancelled"}, FINAL)]
    until(lambda: senders["a"].sent)
    assert model.service.llm.aborted == [1]
    assert ask(model, {"cancel": ""}, prompt=[]).sent, "no request is called nothing"
    assert model.service.llm.aborted == [1]


def test_a_cancel_that_comes_twice_or_for_nobody_or_too_early_is_no_error_and_not_remembered(
    model: Any,
) -> None:
    sender = ask(model, name="a")
    for name in ("a", "a", "nosuch", "later"):
        answer = ask(model, {"cancel": name}, prompt=[])
        assert answer.sent == [({"finish_reason": "cancelled"}, FINAL)]
    until(lambda: sender.sent)
    aborted = list(model.service.llm.aborted)
    assert set(aborted) == {1}
    ask(model, name="later")
    assert model.service.llm.aborted == aborted


def test_a_temperature_sent_as_fp32_is_the_one_that_was_written(module: ModuleType) -> None:
    assert read_tensor(Tensor("temperature", np.array([0.7], np.float32))) == 0.7


def test_an_engine_that_is_loaded_again_shows_levels_of_the_one_before(module: ModuleType) -> None:
    """Tritonserver keeps them; counters go on, but for restarts of tritonserver itself."""
    names = ["pages", "healthy", "heartbeat_timestamp_seconds", "preemptions_total", "restarts_total"]
    names, page = [f"hemiola_{name}" for name in names], MetricFamily.page
    for pages, total in ((46, 3), (0, 6)):
        board = Board(MetricFamily, {})
        for _ in range(2):
            board.post(dict(zip(map(Series, names), (pages, 1, 99, 3, 2), strict=True)))
        assert [page[name, ()] for name in names] == [pages, 1, 99, total, 2]
    board.close()
    assert [page[name, ()] for name in names] == [0, 0, 99, 6, 2], "an unloaded engine looks healthy"


def test_an_engine_without_a_tokenizer_serves_ids_and_refuses_text(
    module: ModuleType, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    source = shutil.copytree(tiny_checkpoint("qwen3_5"), tmp_path / "source")
    (source / "tokenizer.json").unlink()
    build(source, tmp_path / "engine", Options(max_len=64, max_rows=2, max_step_tokens=64, drafts="none"))
    module.LLM = LLM
    served = module.TritonPythonModel()
    served.initialize(config(engine_dir=str(tmp_path / "engine")))
    sender = ask(served, {"max_tokens": 3, "ignore_eos": True})
    until(lambda: sender.sent)
    ((said, flags),) = sender.sent
    assert (said["text_output"], len(said["output_ids"]), flags) == ("", 3, FINAL)
    for asked, prompt in (
        ({"text_input": "a"}, []),
        ({"text_input": "a", "chat": True}, []),
        ({"stop": "a"}, [5]),
    ):
        ((said, _),) = ask(served, asked, prompt).sent
        assert "[INVALID_ARG] " in str(said) and "text, the engine has no tokenizer; pass" in str(said)
    served.finalize()
