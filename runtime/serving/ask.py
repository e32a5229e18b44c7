"""What a Triton request asks for, as far as it can be said without an engine: keys, other names, types."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hemiola.runtime.api import MAX_ENTRIES, SamplingParams
from hemiola.runtime.errors import Amount, Name, Refused
from hemiola.runtime.json_file import Repeated, parse_json
from hemiola.runtime.serving import arrival
from hemiola.runtime.serving.http_request import MAX_BODY
from hemiola.runtime.serving.json_size import MOST_VALUES, check_size

MAX_N = 64
MAX_ID = 1024  # characters; each response repeats it
MOST_SCORES = 2**22  # log-probabilities of an answer that is held until it is whole; some 130 bytes each
MOST_TOKENS = 2**23  # of all prompts of a body: each choice's is sent by itself, and the answer may repeat it
PROMPTS = ("text_input", "input_ids", "messages")
FLAGS = {  # and what they are if nothing is said
    "chat": False,
    "stream": False,
    "return_input_ids": False,
    "return_metrics": False,
    "return_log_probs": False,
    "exclude_input_in_output": True,
    "error_data": False,
}
SAMPLING = tuple(SamplingParams.model_fields)
ALIASES = {  # TensorRT-LLM's name -> ours
    "streaming": "stream",
    "stop_words": "stop",
    "end_id": "stop_token_ids",
    "random_seed": "seed",
    "request_output_len": "max_tokens",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
}
FIXED = {  # taken for TensorRT-LLM's sake, with the one value that is true here
    "beam_width": 1,
    "return_finish_reason": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
}
KEYS = (*PROMPTS, *FLAGS, "n", "timeout", *SAMPLING, "cancel", *ALIASES, *FIXED)
TOKEN_ID = re.compile(r"-?[0-9]{1,19}", re.ASCII)
LISTS = {"input_ids", "stop", "stop_token_ids", "bad_words", "cancel"}
JSON = {  # keys that are JSON texts, such as these
    "logit_bias": '{"5": -100}',
    "bad_words_ids": "[[5, 6]]",
    "structured_outputs": '{"regex": "[0-9]+"}',
    "messages": '[{"role": "user", "content": "hello"}]',
}


class Ask(NamedTuple):
    """A request as far as it can be checked without the engine."""

    prompt: str | list[int]
    messages: Sequence[Mapping[str, object]] | None  # instead of a prompt
    flags: dict[str, bool]
    n: int
    timeout_s: float  # 0: none
    params: SamplingParams


def wants_data(request: Any) -> bool:
    """Whether errors go out as data, of a request that may be wrong in any other way."""
    try:
        return parse_json(read_parameters(request)).get("error_data") is True
    except ValueError:
        return False


def read_parameters(request: Any) -> str:
    """JSON, which may spell a character as six."""
    text: str = request.parameters() or "{}"
    if len(text) > 2 * MAX_BODY:
        message = f"the parameters hold {len(text)} characters, the limit is {2 * MAX_BODY}"
        raise Refused("too_long", message=message, way_out="send less")
    return text


def read_request(request: Any) -> dict[str, Any]:
    """What the request says, in tensors and request parameters alike, by our names."""
    asked: dict[str, Any] = {}
    for tensor in request.inputs():
        _put(asked, tensor.name(), read_tensor(tensor))
    for name, value in parse_once("parameters", read_parameters(request)).items():
        if name == "id":  # HTTP's generate repeats the request's id here
            continue
        if name not in KEYS and name != arrival.NAME:
            known = f"the keys are {', '.join(KEYS)}"
            raise Refused("unknown", name[:80], message=f"unknown key {name[:80]!r}", way_out=known)
        _put(asked, name, [value] if ALIASES.get(name, name) in LISTS else value)
    if request.timeout():
        asked["timeout"] = request.timeout()
    return asked


def _put(asked: dict[str, Any], name: str, value: Any) -> None:
    if name in FIXED:
        if value != FIXED[name]:
            raise Refused("unsupported", name, value, f"only {FIXED[name]!r} is served", "leave it out")
        return
    ours = ALIASES.get(name, name)
    if ours in asked:
        message = f"{ours} is given twice, as a tensor or a request parameter, perhaps by its other name"
        raise Refused("conflict", ours, message=message, way_out="give it once")
    asked[ours] = value


def read_ask(asked: dict[str, Any]) -> Ask:
    flags = {name: read_flag(name, asked.pop(name, default)) for name, default in FLAGS.items()}
    n = read_count("n", asked.pop("n", 1), 1, MAX_N)
    timeout_s = read_count("timeout", asked.pop("timeout", 0), 0, 2**63) / 1e6
    if n > 1 and flags["stream"]:
        message = f"n is {n} in a stream, which has one answer"
        raise Refused("conflict", "n", message=message, way_out=f"send {n} requests, or leave stream out")
    asked.update({name: read_json(name, asked[name]) for name in JSON if name in asked})
    messages = asked.pop("messages", None)
    prompt = "" if messages is not None else read_prompt(asked)
    if messages is not None:
        _check_messages(asked, messages)
    elif flags["chat"]:
        if not isinstance(prompt, str):
            message = "chat needs text_input, this request has input_ids"
            raise Refused("conflict", "chat", message=message, way_out="give text_input")
        messages = [{"role": "user", "content": prompt}]
    if not flags["exclude_input_in_output"] and (messages is not None or not isinstance(prompt, str)):
        message = "exclude_input_in_output is false, but this request has no text_input to repeat"
        raise Refused(
            "conflict", "exclude_input_in_output", message=message, way_out="give text_input, no chat"
        )
    if flags["return_log_probs"]:
        asked.setdefault("logprobs", 0)
    return Ask(prompt, messages, flags, n, timeout_s, SamplingParams(**asked))


def read_tensor(tensor: Any) -> Any:
    """A list or a single value, in Python's types."""
    name, values = tensor.name(), tensor.as_numpy().reshape(-1)
    _check_length(name, values)
    if values.dtype == np.object_:
        content = [read_text(name, value) for value in values]
    elif values.dtype == np.float32:
        content = [float(str(value)) for value in values]  # 0.7 as the caller wrote it, not 0.699999988
    else:
        content = values.tolist()
    return content if ALIASES.get(name, name) in LISTS else content[0]


def _check_length(name: str, values: "np.ndarray[Any, Any]") -> None:
    """Before they are read, one by one: gRPC takes a message of any length."""
    check_count(name, len(values))
    if values.dtype == np.object_ and (size := sum(map(len, values.tolist()))) > MAX_BODY:
        raise Refused("too_long", name, Amount(size, "bytes"), f"the limit is {MAX_BODY}", "send less")


def check_id(request_id: str) -> None:
    if len(request_id) > MAX_ID:
        size = Amount(len(request_id), "characters")
        raise Refused("too_long", "id", size, f"the limit is {MAX_ID}", "give a shorter one")


def check_count(name: str, num: int) -> None:
    """Of the values of an input."""
    ours = ALIASES.get(name, name)
    if ours not in LISTS and num != 1:
        raise Refused("too_long", name, Amount(num, "values"), way_out="give one")
    if ours == "input_ids" and num > MOST_VALUES:
        raise Refused("too_long", name, Amount(num, "values"), f"the limit is {MOST_VALUES}", "send fewer")
    if ours == "cancel" and num > MAX_ENTRIES:
        limit = f"the limit is {MAX_ENTRIES}"
        raise Refused("too_long", ours, Amount(num, "ids"), limit, "send several requests")
    if ours != "input_ids" and num > MAX_ENTRIES:
        limit = f"at most {MAX_ENTRIES} are served"
        raise Refused("too_long", ours, Amount(num, "entries"), limit, "give fewer")


def read_text(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        message = f"{name} is not UTF-8 ({error.reason} at byte {error.start})"
        raise Refused("malformed", name, message=message, way_out="send UTF-8 or input_ids") from None


def read_json(name: str, text: object) -> object:
    """JSON has text for keys only, and token ids are keys of logit_bias."""
    if isinstance(text, str):
        check_size(name, text.encode())
    try:
        value = parse_once(name, text) if isinstance(text, str) else None
        if name == "logit_bias" and isinstance(value, dict):
            value = read_biases(value)
    except Refused:
        raise
    except ValueError:
        value = None
    if value is None:
        raise Refused("malformed", name, text, way_out=f"give a text that is JSON, such as {JSON[name]}")
    return value


def parse_once(name: str, text: str) -> Any:
    """The value of a JSON text. Of a name that stands twice in an object, no value is taken."""
    try:
        return parse_json(text, unique=True)
    except Repeated as error:
        raise Refused("conflict", name, message=f"{name}: {error}", way_out="give it once") from None


def read_biases(given: Mapping[str, Any]) -> dict[int, Any]:
    """ValueError for a key that is no id: `int` would take "1_0" for 10."""
    biases: dict[int, Any] = {}
    for key, bias in given.items():
        if TOKEN_ID.fullmatch(key) is None:
            raise ValueError(f"{key[:80]!r}")
        if (token_id := int(key)) in biases:
            message = f"logit_bias has two keys for token id {token_id}"
            raise Refused("conflict", "logit_bias", message=message, way_out="give one")
        biases[token_id] = bias
    return biases


def check_priority(priority: int, least: int) -> None:
    """A lower number runs first: what callers may ask for is the operator's to say."""
    if priority < least:
        limit = f"this server takes {least} or more (--min-priority)"
        raise Refused("out_of_range", "priority", priority, limit, "give a higher number")


def check_total(num_tokens: int, num_choices: int, num_scored: int | None) -> None:
    """num_scored: log-probabilities that are named beside each token's own, if any are."""
    total = num_tokens * num_choices * (1 if num_scored is None else 2 + num_scored)
    if total > MOST_TOKENS:
        named = "" if num_scored is None else " and log-probabilities of tokens"
        message = f"prompts x n are {total} tokens{named}, the limit is {MOST_TOKENS}"
        raise Refused("too_long", "n", num_choices, message=message, way_out="send fewer at once")


def check_scores(num_tokens: int, num_scored: int | None) -> None:
    """Of a whole answer: 128 choices of 4,000 tokens with their 20 best took 1.5 GB."""
    total = 0 if num_scored is None else num_tokens * (1 + num_scored)
    if total > MOST_SCORES:
        message = (Name("logprobs"), f" of {num_tokens} tokens may be {total}, the limit is {MOST_SCORES}")
        way_out = ("stream, or lower n or ", Name("max_tokens"))
        raise Refused("too_long", "logprobs", num_scored, message=message, way_out=way_out)


def read_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise Refused("wrong_type", name, value, way_out="give true or false")
    return value


def read_count(name: str, value: object, least: int, limit: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= limit:
        raise Refused("out_of_range", name, value, way_out=f"give a whole number of {least} to {limit}")
    return value


def read_prompt(asked: dict[str, Any]) -> str | list[int]:
    """Takes text_input or input_ids out of `asked`."""
    text, ids = asked.pop("text_input", None), asked.pop("input_ids", None)
    if (text is None) == (ids is None):
        given = "neither" if text is None else "both"
        message = f"a request has either text_input or input_ids, this one has {given}"
        raise Refused(
            "conflict" if text else "missing", "prompt", message=message, way_out="give one of them"
        )
    return ids if text is None else text


def _check_messages(asked: dict[str, Any], messages: object) -> None:
    beside = [name for name in ("text_input", "input_ids") if name in asked]
    if beside:
        message = f"a request with messages has no {beside[0]}"
        raise Refused("conflict", beside[0], message=message, way_out="give one of them")
    if not isinstance(messages, list) or not messages:
        raise Refused(
            "wrong_type", "messages", messages, way_out=f"give a JSON list, such as {JSON['messages']}"
        )
