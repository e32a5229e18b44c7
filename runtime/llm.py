"""LLM: opens an engine directory and answers prompts. It puts the parts of an engine together."""

import itertools
import logging
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

import numpy as np
import torch

from hemiola.plugins import OPS
from hemiola.plugins.step import import_forms
from hemiola.runtime import manifest as manifests
from hemiola.runtime.abi import widths
from hemiola.runtime.api import (
    Counters,
    Load,
    Logprob,
    OnPiece,
    Output,
    Piece,
    Prompt,
    SamplingParams,
    pairs,
)
from hemiola.runtime.cache.eviction import Cost, Evictor
from hemiola.runtime.cache.pages import PagePool
from hemiola.runtime.cache.prefix import PrefixCache
from hemiola.runtime.cache.slots import SlotPool
from hemiola.runtime.cache.statistics import Statistics
from hemiola.runtime.config import Resolved, ServeConfig, resolve, state_bytes
from hemiola.runtime.device.find import find_device
from hemiola.runtime.device.memory import CPU, Storage, close_all, free_bytes, give_back
from hemiola.runtime.device.session import Session
from hemiola.runtime.engine.grammar import Grammar, Grammars
from hemiola.runtime.engine.loop import Loop
from hemiola.runtime.engine.outbox import Outbox
from hemiola.runtime.engine.pace import Pace
from hemiola.runtime.engine.request import Bounds, Request, new_request
from hemiola.runtime.engine.scheduler import Scheduler
from hemiola.runtime.errors import Name, Refused
from hemiola.runtime.progress import READY, Report, show, silent
from hemiola.runtime.step.steps import Engine, make_steps
from hemiola.runtime.text import Text

log = logging.getLogger("hemiola")


def make_loop(
    config: Resolved,
    storage: Storage,
    session: Engine,
    text: Text | None,
    cost: Cost,
    identity: str = "",
    device: torch.device = CPU,
    held: ExitStack | None = None,
    report: Report = silent,
) -> Loop:
    """The parts of a running engine, put together; not started. held: gets what must be closed behind it."""
    slots = SlotPool(config.num_slots, config.chunk_len, storage.free_slots)
    table_width = widths(config, "trunk")["W"]
    pages = PagePool(config.num_pages, config.page_len, config.num_slots, table_width, storage.free_pages)
    evictor = Evictor(cost, config.page_len)
    prefix = PrefixCache(
        pages, slots, evictor, identity, config.snapshot_interval, enabled=config.prefix_cache
    )
    scheduler = Scheduler(config, prefix, Pace(config.num_drafts, config.adaptive_drafts))
    steps = make_steps(config, storage, session, pages, device, held or ExitStack(), report)
    return Loop(config, scheduler, storage, steps, Outbox(text), device)


def prefix_cost(manifest: manifests.Manifest) -> Cost:
    """Bytes of what the prefix cache keeps. Every token counts as the same work, whatever its position."""
    return Cost(state_bytes(manifest.states, "page"), state_bytes(manifest.states, "slot"))


def shown_sizes(config: Resolved, manifest: manifests.Manifest, free: int) -> str:
    """What an engine will take of the free memory."""
    taken = config.num_pages * state_bytes(manifest.states, "page")
    taken += config.num_slots * state_bytes(manifest.states, "slot")
    return (
        f"{config.num_pages} pages of {config.page_len} tokens and {config.num_slots} slots take"
        f" {taken / 2**30:.2f} GiB of {free / 2**30:.2f} free beside the weights and what a step takes"
    )


def open_loop(
    engine_dir: Path,
    manifest: manifests.Manifest,
    config: Resolved,
    text: Text | None,
    device: torch.device,
    report: Report = silent,
) -> Loop:
    """An engine that runs. What it takes is given back when it is closed, or here, where opening fails."""
    held, callers = ExitStack(), sys.exc_info()[1]
    held.callback(give_back, device)
    try:
        return _open_loop(engine_dir, manifest, config, text, device, held, report)
    except BaseException as error:
        clear_frames(error, callers)
        close_all(held)
        raise


def _open_loop(
    engine_dir: Path,
    manifest: manifests.Manifest,
    config: Resolved,
    text: Text | None,
    device: torch.device,
    held: ExitStack,
    report: Report,
) -> Loop:
    if device.type == "cpu":
        compile_ahead(manifest, report)
    report("taking memory for the cache", 0, 0)
    storage = Storage(manifest.states, config.num_pages, config.num_slots, device=device)
    held.callback(storage.close)
    session = Session(engine_dir, manifest, storage, config.drafts, report)
    held.callback(session.close)
    cost, identity = prefix_cost(manifest), manifest.identity
    loop = make_loop(config, storage, session, text, cost, identity, device=device, held=held, report=report)
    loop.start(held)
    return loop


def open_text(engine_dir: Path, manifest: manifests.Manifest) -> Text | None:
    """The engine's tokenizer, if it has one: every id that it makes is one that the model knows."""
    if not manifest.has_tokenizer:
        return None
    text = Text(engine_dir / "tokenizer")
    most = max(text.tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if most >= manifest.vocab_size:
        path = engine_dir / "tokenizer/tokenizer.json"
        said = f"{path} has ids up to {most}, but vocab_size is {manifest.vocab_size}"
        raise Refused("damaged", said=said, way_out="run build-engine again")
    return text


def compile_ahead(manifest: manifests.Manifest, report: Report) -> None:
    """The kernels of this engine's ops, and what steps of any options call beside them: no request waits."""
    report("importing", 0, 0)
    from hemiola.plugins.cpu import jit  # numba is not needed elsewhere
    from hemiola.runtime.device import lower  # noqa: F401  its kernels are known when it is imported
    from hemiola.runtime.step import recorded  # noqa: F401

    import_forms("compiled")
    for op in OPS.keys() & {node.op for segment in manifest.segments for node in segment.nodes}:
        if find_spec(f"hemiola.plugins.{op}.compiled"):
            import_module(f"hemiola.plugins.{op}.compiled")
    jit.prepare(partial(report, "compiling kernels"))


def clear_frames(error: BaseException, callers: BaseException | None) -> None:
    """Who keeps an error keeps its frames, and with them the tensors that these have. callers: what the
    caller handles meanwhile; its frames are not ours."""
    found = [error]
    for one in found:
        traceback.clear_frames(one.__traceback__)
        for other in (one.__cause__, one.__context__):
            if other is not None and other is not callers and other not in found:
                found.append(other)


class LLM:
    """Opens an engine directory and serves it from a thread of its own. Options are those of ServeConfig."""

    def __init__(
        self, engine_dir: str | Path, *, progress: Report | bool | None = None, **options: Any
    ) -> None:
        """progress: True shows what opening does (a bar on a terminal, else lines on stderr), False does not;
        None does on a terminal and in a notebook. A function is called with each stage, how much of it is
        done, and of how much; the last stage is "ready"."""
        with show(progress) as report:
            self._open(engine_dir, ServeConfig(**options), report)
            report(READY, 0, 0)

    def _open(self, engine_dir: str | Path, serve_config: ServeConfig, report: Report) -> None:
        if not isinstance(engine_dir, (str, Path)):
            raise Refused("wrong_type", "engine_dir", type(engine_dir), way_out="pass a path")
        engine_dir = Path(engine_dir)
        self.manifest = manifests.load(engine_dir)
        device = find_device(engine_dir, self.manifest.arch)
        weights, own = engine_dir / self.manifest.weights_file, self.manifest
        free = free_bytes(device, weights, own.drawn_bytes, own.work_bytes)
        self.config = resolve(serve_config, self.manifest, free)
        if serve_config.prefix_cache == "auto" and not self.config.prefix_cache:
            log.warning(
                "no prefix cache: max_len=%d leaves no token behind a page of %d",
                self.config.max_len,
                self.config.page_len,
            )
        report("reading the tokenizer", 0, 0)
        self._text = open_text(engine_dir, self.manifest)
        self._grammars = self._text and Grammars(self._text.tokenizer, self.manifest.vocab_size)
        log.info("%s", shown_sizes(self.config, self.manifest, free))
        self._loop = open_loop(engine_dir, self.manifest, self.config, self._text, device, report)
        weakref.finalize(self, self._loop.close)  # when forgotten, and at exit
        self._request_ids = itertools.count(1)
        self._bounds = Bounds(
            self.config.max_len,
            self.manifest.limits.max_len,
            self.manifest.vocab_size,
            self.manifest.eos_ids,
        )

    @property
    def counters(self) -> Counters:
        return self._loop.counters

    @property
    def reuse(self) -> Statistics:
        """What the prefix cache has found, kept and given up."""
        return self._loop.scheduler.prefix.statistics

    def load(self) -> Load:
        """What the engine holds now."""
        return self._loop.load()

    def encode(self, prompt: Prompt, *, must_fit: bool = True) -> list[int]:
        """The token ids of a prompt, as `submit` would use them; must_fit: one far too long is not read."""
        if isinstance(prompt, str):
            max_len = self.config.max_len if must_fit else None
            return self._tokenizer("prompt", " is", "token ids").encode(prompt, max_len)
        if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Sequence):
            way_out = "pass text (str) or a list of token ids"
            raise Refused("wrong_type", "prompt", type(prompt), way_out=way_out)
        return list(prompt)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> str:
        """The prompt for a conversation, by the checkpoint's chat template. tools: in OpenAI's format."""
        if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
            raise Refused("wrong_type", "messages", type(messages), way_out="pass a list of role and content")
        text = self._tokenizer("messages", " are", "token ids")
        if tools is None:
            return text.chat(messages)
        if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
            way_out = "pass a list of functions in OpenAI's format"
            raise Refused("wrong_type", "tools", type(tools), way_out=way_out)
        if tools and text.template is not None and "tools" not in text.variables:
            said = (Name("tools"), " are given, the chat template shows none to the model")
            raise Refused("unsupported", "tools", said=said, way_out="leave them out")
        return text.chat(messages, tools=list(tools) or None)

    def _tokenizer(self, field: str, verb: str, instead: str) -> Text:
        if self._text is None:
            said = (Name(field), f"{verb} text, the engine has no tokenizer")
            raise Refused("unsupported", field, said=said, way_out=("pass ", Name(instead)))
        return self._text

    def submit(
        self, prompt: Prompt, params: SamplingParams, on_piece: OnPiece, arrival: float | None = None
    ) -> int:
        """Queue a request and return its id; on_piece is called in the loop's thread. Refuses at once.

        arrival: when it came, by time.perf_counter, if not now."""
        request = self._request(prompt, params, arrival)
        self._loop.submit(request, on_piece)
        return request.id

    def abort(self, request_id: int) -> None:
        """End a request; its last piece says "cancelled"."""
        self._loop.abort(request_id)

    def reset_prefix_cache(self) -> None:
        """Forget all kept pages and states; what runs goes on."""
        self._loop.flush()

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Piece]:
        """Pieces as they come; who stops reading aborts the request. Refuses before the first piece."""
        pieces: SimpleQueue[Piece] = SimpleQueue()
        request_id = self.submit(prompt, SamplingParams() if params is None else params, pieces.put)
        return self._read(pieces, request_id)

    def _read(self, pieces: SimpleQueue[Piece], request_id: int) -> Iterator[Piece]:
        try:
            while True:
                piece = pieces.get()
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            self.abort(request_id)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[Output]:
        """All outputs, in the order of the prompts; one prompt (a text, or token ids) gives a list of one.
        One bad prompt: Refused, and none has been queued."""
        requests = self._requests(_as_list(prompts), params)
        done: SimpleQueue[_Collector] = SimpleQueue()
        collectors = [_Collector(request, done.put) for request in requests]
        try:
            for collector in collectors:
                self._loop.submit(collector.request, collector)
            for _ in _progress(len(requests), progress):
                done.get()
        finally:
            for collector in collectors:
                if collector.output is None:
                    self.abort(collector.request.id)
        return [collector.output for collector in collectors if collector.output is not None]

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> Output:
        """The model's answer to a conversation. Its text is as the model wrote it, tool calls included."""
        return self.generate(self.chat_text(messages, tools), params)[0]

    def _requests(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        requests = []
        for index, (prompt, own) in enumerate(pairs(prompts, params)):
            try:
                requests.append(self._request(prompt, own))
            except Refused as error:
                raise error.at(f"prompts[{index}]") from None
        return requests

    def _request(self, prompt: Prompt, params: SamplingParams, arrival: float | None = None) -> Request:
        arrival = time.perf_counter() if arrival is None else arrival  # before the prompt is tokenized
        if not isinstance(params, SamplingParams):
            raise Refused("wrong_type", "params", type(params), way_out="pass a SamplingParams")
        if params.stop:
            self._tokenizer("stop", " is", "stop_token_ids")
        encode = self._text.encode_words if self._text is not None else None
        ids = self.encode(prompt)
        grammar = self._grammar(params)
        return new_request(next(self._request_ids), ids, params, self._bounds, encode, grammar, arrival)

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        """Compiled in a thread of its own, while steps go on; the caller waits."""
        if params.structured_outputs is None:
            return None
        if self._grammars is None:
            said = (Name("structured_outputs"), " is about text, the engine has no tokenizer")
            way_out = "leave it out, or build from a checkpoint that has one"
            raise Refused("unsupported", "structured_outputs", said=said, way_out=way_out)
        return self._grammars.compile(params.structured_outputs)

    def close(self, drain: bool = False) -> None:
        """Cancel (or with drain: finish) what runs, end the thread and give all memory back: before it
        returns, or from on_piece soon after. Safe to call twice."""
        self._loop.close(drain)

    def __enter__(self) -> "LLM":
        self._loop.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _as_list(prompts: Any) -> Sequence[Prompt]:
    """Prompts, or one prompt as a list of one."""
    ids = isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], (int, np.integer))
    return [prompts] if isinstance(prompts, str) or (ids and not isinstance(prompts, bytes)) else prompts


class _Collector:
    """An on_piece that puts a request's pieces together."""

    def __init__(self, request: Request, on_done: Callable[["_Collector"], None]) -> None:
        self.request = request
        self.output: Output | None = None
        self._on_done = on_done
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[Logprob] | None = None if request.params.logprobs is None else []

    def __call__(self, piece: Piece) -> None:
        self._text.append(piece.text)
        self._token_ids += piece.token_ids
        if self._logprobs is not None and piece.logprobs is not None:
            self._logprobs += piece.logprobs
        if piece.finish_reason is None or piece.metrics is None:
            return
        self.output = Output(
            prompt_token_ids=self.request.ids[: self.request.prompt_len].tolist(),
            token_ids=self._token_ids,
            text="".join(self._text),
            finish_reason=piece.finish_reason,
            logprobs=self._logprobs,
            metrics=piece.metrics,
            error=piece.error,
        )
        self._on_done(self)


def _progress(total: int, shown: bool) -> Iterator[int]:
    if not shown:
        return iter(range(total))
    from rich.console import Console  # not needed by servers
    from rich.progress import track

    return iter(track(range(total), description="requests", total=total, console=Console(stderr=True)))
