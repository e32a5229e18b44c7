"""Conversations with what a plain run says to each turn; asked of a cluster by its OpenAI door."""

import itertools
import json
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import openai

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.choose import grammar
from hemiola.runtime.dynamo.request import ANNOTATION
from hemiola.runtime.llm import LLM

SYSTEMS = ("import os\nimport sys\n\n\n", '"""A module of functions."""\n\n', "class Stack:\n    pass\n\n\n")
WORDS = (
    "def f(x):",
    "return x",
    "class A:",
    "if x is None:",
    "for i in range(9):",
    "    pass",
    "x = 1",
    "\n",
)
SESSION = "x-dynamo-session-id"
REGEX = "([a-z]{1,7} ){1,9}end"
RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "top_p": 0.9},
    "penalties": {"temperature": 0.7, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "min_tokens": {"temperature": 0.9, "min_tokens": 12, "repetition_penalty": 1.1},
    "stop": {"stop": ["return", "self."]},
    "logprobs": {"temperature": 0.6, "logprobs": 2},
    "grammar": {"temperature": 0.9, "structured_outputs": {"regex": REGEX}},
    "tenant": {"cache_salt": "tenant"},
}


@dataclass
class Turn:
    prompt: list[int]
    params: SamplingParams
    text: str = ""  # of the plain run, as all below
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""

    def body(self) -> dict[str, Any]:
        """As OpenAI's completions have it, with Dynamo's fields."""
        given = self.params.model_dump(exclude_defaults=True)
        structured, salt = given.pop("structured_outputs", None), given.pop("cache_salt", None)
        own = {name: given.pop(name) for name in ("min_tokens", "repetition_penalty") if name in given}
        nvext: dict[str, Any] = {"extra_fields": ["worker_id"]}
        if structured is not None:
            nvext["annotations"] = [ANNOTATION + json.dumps(structured)]
        if salt is not None:
            own["cache_salt"] = salt
        given |= {"max_tokens": self.params.max_tokens, "temperature": self.params.temperature}
        if "stop" in given:
            given["stop"] = list(given["stop"])
        return {"model": "hemiola", "prompt": self.prompt, **given, "extra_body": own | {"nvext": nvext}}


Conversation = list[Turn]


@dataclass
class Answer:
    """What a turn got."""

    worker: int = 0
    cached: int = 0
    fault: str = ""
    seconds: float = 0.0


def make(engine_dir: Path, num_turns: int, seed: int, num_tokens: int) -> list[Conversation]:
    """Turns go in rounds: each round's answers are part of the next one's prompts."""
    dice, found = random.Random(seed), []
    patience = patch.object(grammar, "MOST_SECONDS", 300.0)  # on a busy machine; no caller waits here
    with patience, LLM(engine_dir, drafts="none", prefix_cache=False) as llm:
        while sum(map(len, found)) < num_turns:
            found += _batch(llm, dice, min(64, num_turns), num_tokens)
    return found


def _batch(llm: LLM, dice: random.Random, num: int, num_tokens: int) -> list[Conversation]:
    conversations: list[Conversation] = [[] for _ in range(num)]
    texts = [llm.encode(dice.choice(SYSTEMS) * dice.randint(4, 20)) for _ in range(num)]
    rules = [RULES[dice.choice(list(RULES))] for _ in range(num)]
    for number in range(dice.randint(2, 5)):
        going = [n for n in range(num) if number == 0 or dice.random() < 0.8]
        for n in going:
            said = "\n".join(dice.choices(WORDS, k=dice.randint(2, 12)))
            texts[n] = texts[n] + llm.encode(f"# {dice.randrange(1000)}\n{said}\n")
            values = {"max_tokens": dice.randint(16, num_tokens), **rules[n]}
            values |= {"seed": dice.randrange(1000)} if "temperature" in values else {}
            conversations[n].append(Turn(list(texts[n]), SamplingParams(**values)))
        turns = [conversations[n][-1] for n in going]
        outs = llm.generate([turn.prompt for turn in turns], [turn.params for turn in turns])
        for n, turn, out in zip(going, turns, outs, strict=True):
            turn.text, turn.token_ids, turn.finish_reason = out.text, out.token_ids, out.finish_reason
            turn.logprobs = [score.logprob for score in out.logprobs or []]
            texts[n] = texts[n] + out.token_ids
    return [one for one in conversations if one]


def ask(client: openai.OpenAI, turn: Turn, conversation: str) -> Answer:
    """Asks a turn, and compares."""
    text, scores, reason, answer = "", [], "", Answer()
    try:
        streaming = {"stream": True, "stream_options": {"include_usage": True}}
        stream = client.completions.create(**streaming, **turn.body(), extra_headers={SESSION: conversation})
        for chunk in stream:
            for choice in chunk.choices:
                text += choice.text or ""
                reason = choice.finish_reason or reason
                scores += choice.logprobs.token_logprobs if choice.logprobs else []
            extra = (chunk.model_extra or {}).get("nvext") or {}
            answer.worker = (extra.get("worker_id") or {}).get("decode_worker_id", answer.worker)
            if chunk.usage is not None:
                details = chunk.usage.prompt_tokens_details
                answer.cached = (details and details.cached_tokens) or 0
                if chunk.usage.prompt_tokens != len(turn.prompt):
                    answer.fault = f"usage has {chunk.usage.prompt_tokens} tokens of {len(turn.prompt)}"
    except openai.OpenAIError as error:
        answer.fault = f"lost after {len(text)} characters: {type(error).__name__}: {error}"
        return answer
    if (text, reason) != (turn.text, turn.finish_reason):
        answer.fault = (
            f"got {text[:99]!r} ({reason}), the plain run {turn.text[:99]!r} ({turn.finish_reason})"
        )
    elif turn.logprobs and not np.array_equal(np.float32(scores), np.float32(turn.logprobs)):
        answer.fault = "other log-probabilities"
    return answer


@dataclass
class Later:
    """A turn behind another one of its conversation."""

    at: float  # by time.monotonic, when it was asked
    before: int  # the worker of the turn before
    answer: Answer
    starts: Mapping[int, int]  # tokens behind which each worker would have started then, by id

    def is_on_deepest(self, gone_at: Mapping[int, float]) -> bool | None:
        """Whether no worker would have started behind more tokens than the one that answered; None: nobody
        had anything. Workers that went before the answer's end are left out, whoever ended them."""
        end = self.at + self.answer.seconds
        lived = [start for worker, start in self.starts.items() if gone_at.get(worker, math.inf) > end]
        most = max(lived, default=0)
        return self.starts.get(self.answer.worker, 0) >= most if most else None

    def kind(self, gone_at: Mapping[int, float]) -> str:
        """What the router made of it. gone_at: when workers went, by id."""
        if gone_at.get(self.before, math.inf) <= self.at + self.answer.seconds:
            return "its worker went"
        same = "same worker" if self.answer.worker == self.before else "another worker"
        return same if self.answer.cached else f"{same}, nothing cached"


class Load:
    """Asks conversations, several at once; each waits for its own answers."""

    def __init__(
        self,
        url: str,
        conversations: Sequence[Conversation],
        concurrency: int,
        pause_s: float = 0.0,
        starts: Callable[[Turn], Mapping[int, int]] = lambda turn: {},
    ) -> None:
        """pause_s: between an answer and the next turn. starts: behind how many tokens of a turn each worker
        would start now, by id; is asked before the turn is."""
        self._pause_s, self._starts = pause_s, starts
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        self._conversations, self._concurrency = conversations, concurrency
        self._lock = threading.Lock()
        self.num_done = 0
        self.faults: list[str] = []
        self.later: list[Later] = []

    def run(self) -> None:
        with ThreadPoolExecutor(self._concurrency) as pool:
            for _ in pool.map(self._converse, itertools.count(), self._conversations):
                pass

    def kinds(self, gone_at: Mapping[int, float]) -> Counter[str]:
        return Counter(turn.kind(gone_at) for turn in self.later)

    def deepest_share(self, gone_at: Mapping[int, float]) -> float:
        """Of later turns of which somebody had anything: on a worker than which none that lived had more."""
        found = [turn.is_on_deepest(gone_at) for turn in list(self.later)]
        return found.count(True) / max(1, len(found) - found.count(None))

    def _converse(self, name: int, conversation: Conversation) -> None:
        before = 0
        for number, turn in enumerate(conversation):
            starts = self._starts(turn) if number else {}
            start = time.monotonic()
            answer = ask(self._client, turn, f"conversation {name}")
            answer.seconds = time.monotonic() - start
            with self._lock:
                self.num_done += 1
                if answer.fault:
                    self.faults.append(f"{turn.params.model_dump(exclude_defaults=True)}: {answer.fault}")
                if number:
                    self.later.append(Later(start, before, answer, starts))
            before = answer.worker
            time.sleep(self._pause_s)
