"""What Dynamo's frontend sends to a worker, as a prompt and SamplingParams.

When a worker dies in the middle of a stream, the frontend sends the request to another. The tokens that it
got stand behind the prompt; max_tokens and min_tokens are lowered by their number. It does not say how long
the prompt was, but penalties, grammars and usage need that. So each chunk carries the length as the link to
its worker's trace (`link_of`): this the frontend sends on, as `migration_link`. Where Dynamo itself traces,
its own link takes that place; then those requests are refused that need the length, and no others.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from hemiola.runtime.api import MAX_GRAMMAR, FinishReason, SamplingParams, StructuredOutputsParams
from hemiola.runtime.errors import Amount, Name, Refused
from hemiola.runtime.json_file import parse_json
from hemiola.runtime.serving.json_size import check_size

TRACE_ID = b"hemiola".hex().ljust(32, "0")  # no trace has it
ANNOTATION = "structured_outputs:"  # a grammar that is sent again, too: Dynamo drops requests with its own
MOST_NOTED = 4 * MAX_GRAMMAR  # of such a text, where one character may be written as six
PENALTIES = ("presence_penalty", "frequency_penalty")
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", *PENALTIES)
UNSERVED = {  # what it takes without a word, by what changes nothing
    "sampling_options": {"n": 1, "best_of": 1, "use_beam_search": False, "length_penalty": 1.0},
    "stop_conditions": {"max_thinking_tokens": None},
    "guided_decoding": {"backend": None, "whitespace_pattern": None, "structural_tag": None},
    "": dict.fromkeys(
        ("prompt_embeds", "multi_modal_data", "prefill_result", "bootstrap_info", "encoder_result")
    ),
}
Fields = Mapping[str, Any]


class Submission(NamedTuple):
    """A request, as `LLM.submit` takes it."""

    prompt: list[int]
    output_ids: list[int]  # chosen by a worker that died
    params: SamplingParams
    ended: FinishReason | None = None  # why nothing follows: that worker died behind the last token


def link_of(prompt_len: int) -> dict[str, str]:
    """The link that tells the next worker how long the prompt was."""
    return {"trace_id": TRACE_ID, "span_id": f"{prompt_len:016x}"}


def read_request(request: Fields, max_len: int, min_priority: int) -> Submission:
    """Raises Refused. max_len: of the engine. min_priority: what callers may ask for is the operator's to
    say."""
    _refuse_unserved("", request)
    ids = list(request["token_ids"])
    prompt_len = _prompt_len(request)
    num_said = len(ids) - prompt_len
    stopping = _part(request, "stop_conditions")
    routing = _part(request, "routing")
    outputs = _part(request, "output_options")
    num_left = stopping.get("max_tokens")  # None: as many as fit
    # Only what is given: each value costs a check before the first token.
    values: dict[str, Any] = {
        **_sampling(_part(request, "sampling_options")),
        **{name: value for name, value in outputs.items() if name in ("logprobs", "prompt_logprobs")},
        "max_tokens": max(1, num_said + (max_len - len(ids) if num_left is None else num_left)),
    }
    if stopping.get("stop"):
        values["stop"] = stopping["stop"]
    if stop_token_ids := _stop_token_ids(stopping):
        values["stop_token_ids"] = stop_token_ids
    if stopping.get("ignore_eos"):
        values["ignore_eos"] = True
    if stopping.get("min_tokens") is not None:
        values["min_tokens"] = num_said + stopping["min_tokens"]
    if routing.get("cache_salt"):
        values["cache_salt"] = routing["cache_salt"]
    if priority := _priority(routing, min_priority):
        values["priority"] = priority
    grammar = _grammar(request)
    if grammar is not None:
        values["structured_outputs"] = grammar
    params = SamplingParams(**values)
    _check_length(request, params)
    ended = None
    if num_said and ids[-1] in _end_ids(request, params):
        ended = "stop"
    elif num_left == 0 or (num_said and len(ids) >= max_len):
        ended = "length"
    return Submission(ids[:prompt_len], ids[prompt_len:], params, ended)


def _end_ids(request: Fields, params: SamplingParams) -> Iterable[int]:
    return (*params.stop_token_ids, *(() if params.ignore_eos else request.get("eos_token_ids") or ()))


def _part(request: Fields, name: str) -> Fields:
    part = request.get(name) or {}
    _refuse_unserved(name, part)
    return part


def _refuse_unserved(part: str, values: Fields) -> None:
    for name, harmless in UNSERVED.get(part, {}).items():
        if values.get(name) not in (None, harmless):
            raise Refused("unsupported", name, values[name], "which is not served", "leave it out")


def _prompt_len(request: Fields) -> int:
    link, known_len = request.get("migration_link"), len(request["token_ids"])
    if not link or link["trace_id"] != TRACE_ID:
        return known_len
    prompt_len = int(link["span_id"], 16)
    if not 0 < prompt_len <= known_len:
        limit = f"but the request has {known_len} tokens"
        raise Refused("damaged", "migration_link", prompt_len, limit, "send the request again")
    return prompt_len


def _check_length(request: Fields, params: SamplingParams) -> None:
    """Refuses what cannot go on without the length of the prompt."""
    link = request.get("migration_link")
    if not link or link["trace_id"] == TRACE_ID:
        return
    needs = [name for name in PENALTIES if getattr(params, name)]
    needs += ["structured_outputs"] * (params.structured_outputs is not None)
    for name in needs:
        message = (Name(name), " cannot go on here: Dynamo's tracing has replaced the length of the prompt")
        raise Refused(
            "unsupported", name, message=message, way_out="send the request again, or trace nothing"
        )


def _priority(routing: Fields, least: int) -> int:
    """Dynamo's greater numbers go first."""
    asked = routing.get("priority") or 0
    if -asked < least:
        limit = f"this worker takes {-least} or less (--min-priority)"
        raise Refused("out_of_range", "priority", asked, limit, "give a lower number")
    return -asked


def _sampling(options: Fields) -> dict[str, Any]:
    """Temperature is 1 unless given, as OpenAI has it."""
    sampling: dict[str, Any] = {"temperature": 1.0}
    sampling |= {name: as_written(options[name]) for name in FLOATS if options.get(name) is not None}
    if options.get("top_k") is not None:
        sampling["top_k"] = max(0, options["top_k"])  # -1: all
    if options.get("seed") is not None:
        sampling["seed"] = options["seed"]
    return sampling


def as_written(value: float) -> float:
    """Dynamo rounds numbers to fp32: the shortest decimal that does, which is what the caller wrote."""
    return float(str(np.float32(value)))


def _stop_token_ids(stopping: Fields) -> list[int]:
    """Hidden ones are the end tokens of the model card, which is the engine's."""
    lists: Iterable[list[int]] = (
        stopping.get(name) or [] for name in ("stop_token_ids", "stop_token_ids_visible")
    )
    return list(dict.fromkeys(token_id for ids in lists for token_id in ids))


def _grammar(request: Fields) -> StructuredOutputsParams | None:
    noted = [note for note in request.get("annotations") or [] if note.startswith(ANNOTATION)]
    guided = (request.get("sampling_options") or {}).get("guided_decoding")
    if noted:
        return _noted(noted[-1].removeprefix(ANNOTATION))
    if not guided:
        return None
    _refuse_unserved("guided_decoding", guided)
    asked = {name: value for name, value in guided.items() if value is not None}
    _check_size(asked)
    return StructuredOutputsParams(**asked)


def _check_size(asked: Fields) -> None:
    """Before a schema is written as text: Dynamo sends it as an object. Each part has a character or more."""
    waiting, size = list(asked.values()), 0
    while waiting and size <= MAX_GRAMMAR:
        part = waiting.pop()
        if isinstance(part, (str, list, dict)):
            size += len(part)
        if isinstance(part, (list, dict)) and size <= MAX_GRAMMAR:
            waiting += part.values() if isinstance(part, dict) else part
    if size > MAX_GRAMMAR:
        message = f"structured_outputs is too large, the limit is {MAX_GRAMMAR} characters"
        raise Refused("too_long", "structured_outputs", message=message, way_out="send less")


def _noted(text: str) -> StructuredOutputsParams:
    """Whoever reads it holds all streams of the worker up: 30 MB took 5 s."""
    if len(text) > MOST_NOTED:
        size, limit = Amount(len(text), "characters"), f"the limit is {MOST_NOTED}"
        raise Refused("too_long", "annotations", size, limit, "send less")
    check_size("annotations", text.encode())
    try:
        asked = parse_json(text, unique=True)
    except ValueError:
        asked = None
    if not isinstance(asked, dict):
        limit, way_out = "which is no JSON object", 'write {"regex": "[a-z]+"}, for example'
        raise Refused("malformed", "annotations", ANNOTATION + text, limit, way_out)
    return StructuredOutputsParams(**asked)
