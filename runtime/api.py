"""What users put in and get out."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from hemiola.runtime.errors import Amount, Name, Refused
from hemiola.runtime.fields import refused_by
from hemiola.runtime.json_file import parse_json

MAX_ENTRIES = 1024  # of a list in SamplingParams
MAX_WORD_IDS = 4096  # token ids of all bad words: a line of logits is compared with each of them
MAX_CHARACTERS = {"stop": 2048, "bad_words": 16384, "cache_salt": 1024}  # in all
MAX_GRAMMAR = 2**18  # characters
LARGEST_INT = 2**31 - 1  # tokens, drafts and ranks are numbers of 32 bits in other places
Prompt = str | Sequence[int]
FinishReason = Literal["stop", "length", "timeout", "cancelled", "error"]


class Strict(BaseModel):
    """Frozen and strictly typed; what does not fit raises Refused with one line."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __init__(self, **values: object) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            names = [field.alias or name for name, field in type(self).model_fields.items()]
            raise refused_by(error, values, names) from None

    def checked(self) -> Self:
        """The same, checked: `model_copy(update=...)` and `model_construct` check nothing."""
        values: dict[str, object] = {}
        fields, is_set = type(self).model_fields, self.model_fields_set
        for name, value in vars(self).items():
            field = fields.get(name)
            if name in is_set or field is None or value != field.default:
                ours = (field and field.alias) or name
                values[ours] = value.checked() if isinstance(value, Strict) else value
        return type(self)(**values)


def _check_unicode(name: str, value: tuple[str, ...] | str) -> None:
    try:
        "".join(value).encode()
    except UnicodeEncodeError:
        limit = "which is not valid Unicode (a lone surrogate)"
        raise Refused("malformed", name, value, limit, "remove it") from None


def check_word_ids(name: str, words: Sequence[Sequence[int]]) -> None:
    """Raises Refused. A line of logits is compared with every token of every bad word."""
    size = Amount(sum(map(len, words)), "token ids in all")
    if size.number > MAX_WORD_IDS:
        raise Refused("too_long", name, size, f"at most {MAX_WORD_IDS} are served", "give fewer")


class StructuredOutputsParams(Strict):
    """What the whole output must be: exactly one of these. Names are vLLM's and TensorRT-LLM's.

    Every token leaves a text that can still become what is asked for; an end token comes only where it is.
    """

    json_schema: str | None = Field(
        default=None, alias="json", description="JSON that fits this schema, an object or its text"
    )
    json_object: bool = Field(default=False, description="any JSON object")
    regex: str | None = Field(default=None, description="a text that this regular expression matches whole")
    grammar: str | None = Field(default=None, description="a text of this grammar, GBNF (EBNF) or Lark")
    choice: tuple[str, ...] | None = Field(default=None, fail_fast=True, description="one of these texts")

    @field_validator("json_schema", mode="before")
    @classmethod
    def _as_text(cls, value: object) -> object:
        try:
            schema = parse_json(value, unique=True) if isinstance(value, str) else value
            text = json.dumps(schema, allow_nan=False)
        except (ValueError, TypeError) as error:
            limit, way_out = f"which is not JSON ({error})", "give a schema, as an object or as its text"
            raise Refused("malformed", "json", value, limit, way_out) from None
        except RecursionError:
            limit = "which is nested too deeply"
            raise Refused("too_long", "json", value, limit, "give a flatter schema") from None
        if value is not None and not isinstance(schema, (Mapping, bool)):
            raise Refused("wrong_type", "json", value, way_out='give a schema, such as {"type": "integer"}')
        return None if value is None else text

    @field_validator("choice", mode="before")
    @classmethod
    def _as_tuple(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("choice")
    @classmethod
    def _any(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value == ():
            raise Refused("out_of_range", "choice", value, way_out="give at least one text")
        return value

    @field_validator("json_schema", "regex", "grammar", "choice")
    @classmethod
    def _is_unicode(
        cls, value: tuple[str, ...] | str | None, info: ValidationInfo
    ) -> tuple[str, ...] | str | None:
        _check_unicode((info.field_name or "").removesuffix("_schema"), value or "")
        return value

    @model_validator(mode="after")
    def _is_one(self) -> "StructuredOutputsParams":
        values = self.model_dump(by_alias=True)
        given = [name for name, value in values.items() if value not in (None, False)]
        if len(given) != 1:
            message, way_out = (
                f"{' and '.join(given) or 'nothing'} given",
                f"give exactly one of {', '.join(values)}",
            )
            raise Refused("conflict" if given else "missing", message=message, way_out=way_out)
        return self


class SamplingParams(Strict):
    """How one request's tokens are chosen and when it ends. Greedy unless a temperature is given."""

    max_tokens: int = Field(
        default=16,
        ge=1,
        le=LARGEST_INT,
        description="maximum of tokens to generate; prompt and output together have at most max_len",
    )
    temperature: float = Field(default=0.0, ge=0, description="0: always the best token (greedy)")
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="draw from the smallest set of best tokens whose probabilities sum to this",
    )
    top_k: int = Field(
        default=0, ge=0, le=LARGEST_INT, description="draw from this many of the best tokens; 0: from all"
    )
    min_p: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="draw from tokens at least this probable, relative to the best token",
    )
    seed: int | None = Field(
        default=None,
        ge=-(2**63),
        lt=2**64,
        description="the same seed draws the same text; default: a random seed. -1 is 2**64 - 1",
    )
    stop: tuple[str, ...] = Field(default=(), description="the text ends before the first of these strings")
    stop_token_ids: tuple[int, ...] = Field(
        default=(), description="the text ends at the first of these token ids"
    )
    ignore_eos: bool = Field(default=False, description="continue after the end token")
    min_tokens: int = Field(
        default=0,
        ge=0,
        le=LARGEST_INT,
        description="stop tokens and stop strings are ignored before this many tokens",
    )
    repetition_penalty: float = Field(
        default=1.0,
        gt=0,
        description="penalty of tokens that prompt or output already contain; above 1: fewer repetitions",
    )
    presence_penalty: float = Field(
        default=0.0, ge=-2, le=2, description="penalty of tokens that the output already contains"
    )
    frequency_penalty: float = Field(
        default=0.0, ge=-2, le=2, description="penalty of a token for each time that the output contains it"
    )
    logit_bias: Mapping[int, float] = Field(
        default={}, description="a number to add to the logit of this token id"
    )
    bad_words: tuple[str, ...] = Field(
        default=(), description="words that the output never contains, at the beginning of a word"
    )
    bad_words_ids: tuple[tuple[int, ...], ...] = Field(
        default=(), fail_fast=True, description="the same, as token ids"
    )
    structured_outputs: StructuredOutputsParams | None = Field(
        default=None, description="form of the whole output: JSON, a regex, a grammar or a choice"
    )
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=20,
        description="report log-probabilities, also of this many best tokens per position",
    )
    prompt_logprobs: int | None = Field(
        default=None, ge=0, le=20, description="the same of the prompt's tokens, with this many best ones"
    )
    num_drafts: int | None = Field(
        default=None, ge=0, le=LARGEST_INT, description="maximum of drafts per step; 0: none"
    )
    priority: int = Field(
        default=0, ge=-(2**31), lt=2**31, description="requests with a lower number run first"
    )
    cache_salt: str = Field(
        default="", description="cached prefixes are shared among requests with the same salt only"
    )

    @field_validator("stop", "stop_token_ids", "bad_words", "bad_words_ids", mode="before")
    @classmethod
    def _as_tuple(cls, value: object) -> object:
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, (list, tuple)):
            return value
        return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in value)

    @field_validator("structured_outputs", mode="before")
    @classmethod
    def _as_params(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        try:
            return StructuredOutputsParams(**value)
        except Refused as error:
            raise error.under("structured_outputs") from None

    @field_validator("stop", "stop_token_ids", "bad_words", "bad_words_ids", "logit_bias", mode="before")
    @classmethod
    def _not_endless(cls, value: object, info: ValidationInfo) -> object:
        lists = [
            each
            for each in (value, *(value if isinstance(value, (list, tuple)) else ()))
            if isinstance(each, (list, tuple, Mapping))
        ]
        size = Amount(max(map(len, lists), default=0), "entries")
        if size.number > MAX_ENTRIES:
            limit = f"at most {MAX_ENTRIES} are served"
            raise Refused("too_long", info.field_name or "", size, limit, "give fewer")
        return value

    @field_validator(*MAX_CHARACTERS)
    @classmethod
    def _not_long(cls, value: tuple[str, ...] | str, info: ValidationInfo) -> tuple[str, ...] | str:
        name = info.field_name or ""
        size, limit = Amount(sum(map(len, value)), "characters in all"), MAX_CHARACTERS[name]
        if size.number > limit:
            raise Refused("too_long", name, size, f"at most {limit} are served", "shorten it")
        return value

    @field_validator("bad_words_ids")
    @classmethod
    def _not_many(cls, value: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        check_word_ids("bad_words_ids", value)
        return value

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            limit = "but an empty stop string would end every text at once"
            raise Refused("out_of_range", "stop", list(value), limit, "leave it out")
        return value

    @field_validator("bad_words", "bad_words_ids")
    @classmethod
    def _not_nothing(
        cls, value: tuple[Sequence[object], ...], info: ValidationInfo
    ) -> tuple[Sequence[object], ...]:
        if not all(map(len, value)):
            limit = "but an empty bad word would forbid every token"
            raise Refused("out_of_range", info.field_name or "", list(value), limit, "leave it out")
        return value

    @field_validator("stop", "bad_words", "cache_salt")
    @classmethod
    def _is_unicode(cls, value: tuple[str, ...] | str, info: ValidationInfo) -> tuple[str, ...] | str:
        _check_unicode(info.field_name or "", value)
        return value

    @field_validator("seed")
    @classmethod
    def _of_64_bits(cls, value: int | None) -> int | None:
        return None if value is None else value % 2**64

    @field_validator("min_tokens")
    @classmethod
    def _within_max_tokens(cls, value: int, info: ValidationInfo) -> int:
        max_tokens = info.data.get("max_tokens", value)  # absent: refused itself
        if value > max_tokens:
            limit, way_out = (
                (Name("max_tokens"), f" is {max_tokens}"),
                ("raise it or lower ", Name("min_tokens")),
            )
            raise Refused("conflict", "min_tokens", value, limit, way_out)
        return value

    def each_of(self, num_answers: int) -> list["SamplingParams"]:
        """Of so many answers to one prompt: with a seed, seed + i. The first one scores the prompt."""
        later = self if self.prompt_logprobs is None else self.model_copy(update={"prompt_logprobs": None})
        each: list[SamplingParams] = [self, *[later] * (num_answers - 1)]
        if self.seed is None:
            return each
        return [one.model_copy(update={"seed": (self.seed + i) % 2**64}) for i, one in enumerate(each)]


def pairs(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[Prompt, SamplingParams]]:
    """What `generate` was asked, one by one."""
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Sequence):
        raise Refused("wrong_type", "prompts", type(prompts), way_out="pass a list of prompts")
    if params is None or isinstance(params, SamplingParams):
        params = [SamplingParams() if params is None else params] * len(prompts)
    if not isinstance(params, Sequence):
        raise Refused(
            "wrong_type", "params", type(params), way_out="pass a SamplingParams, or one per prompt"
        )
    if len(params) != len(prompts):
        message = f"{len(prompts)} prompts and {len(params)} SamplingParams"
        raise Refused("conflict", "params", message=message, way_out="pass one each, or one for all")
    return list(zip(prompts, params, strict=True))


@dataclass(slots=True)
class Metrics:
    """One request's counts and times (seconds, time.perf_counter's clock; 0.0 until it happens)."""

    num_prompt_tokens: int
    arrival: float
    first_scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    cached_tokens: int = 0
    # by position in the window: how often a draft stood there, and how often it stayed
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts of one step, of which the first num_accepted stayed."""
        missing = num_drafts - len(self.drafted)
        self.drafted += [0] * missing
        self.accepted += [0] * missing
        for position in range(num_drafts):
            self.drafted[position] += 1
            self.accepted[position] += position < num_accepted

    @property
    def time_to_first_token(self) -> float:
        """0 without a token."""
        return self.first_token - self.arrival if self.first_token else 0.0

    @property
    def time_per_output_token(self) -> float:
        """Mean over the tokens after the first; 0 for a single one."""
        later = self.num_output_tokens - 1
        return (self.last_token - self.first_token) / later if later > 0 else 0.0


@dataclass(slots=True)
class Counters:
    """Sums over the life of an engine."""

    num_steps: int = 0
    num_computed_tokens: int = 0  # recomputation after a preemption counts again
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    num_prompt_steps: int = 0  # of num_steps: all rows read prompts
    num_mixed_steps: int = 0  # some do
    engine_seconds: float = 0.0  # inside session.run
    device_seconds: float = 0.0  # from the first to the last of what a step does on the device
    step_seconds: float = 0.0  # whole steps


class Load(NamedTuple):
    """What an engine holds at a moment; seen from another thread, so sums may be off by a step."""

    num_running: int
    num_waiting: int
    num_pages: int  # without the dump page, and slots without the dump slot
    num_free_pages: int
    num_idle_pages: int  # kept for later prompts, and held by no request
    num_slots: int
    num_free_slots: int
    stalled_s: float  # since the loop last came by, or a kernel of its step began; 0 while it waits for work
    failure: str  # why the engine is lost; "" while it is not


class Logprob(NamedTuple):
    """Raw log-softmax of a chosen token, and of the best ones: before penalties, temperature and filters.

    With structured_outputs, too, it is the model's own word: of a token that the grammar forced on it, how
    unlikely it found that; and the best ones may be tokens that the grammar forbids.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token_id, logprob), best first


PromptLogprobs = list[Logprob | None]  # None: the first token, which nothing predicts


class Piece(NamedTuple):
    """What a step added to a request. The last piece has a finish_reason and metrics; the first one with
    tokens has the prompt's log-probabilities, if they were asked for."""

    text: str
    token_ids: list[int]
    logprobs: list[Logprob] | None = None
    finish_reason: FinishReason | None = None
    metrics: Metrics | None = None
    error: str | None = None  # why, when finish_reason is "error"
    prompt_logprobs: PromptLogprobs | None = None
    refused: Refused | None = None  # the error, where what the request asks for is the reason


@dataclass(frozen=True, slots=True)
class Output:
    """A finished request."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: list[Logprob] | None
    metrics: Metrics
    error: str | None = None
    prompt_logprobs: PromptLogprobs | None = None  # of each token of the prompt


OnPiece = Callable[[Piece], None]
