"""LLM: opens an engine directory and answers prompts."""

import itertools
import logging
import os
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

import numpy as np
import torch

from hemiola.runtime import manifest as manifests
from hemiola.runtime.api import Counters, Load, OnPiece, Output, Piece, Prompt, SamplingParams, pairs
from hemiola.runtime.cache.depth import Observer
from hemiola.runtime.cache.statistics import Statistics
from hemiola.runtime.cache.tier import TierUse
from hemiola.runtime.choose.grammar import Grammar, Grammars
from hemiola.runtime.config import ServeConfig, resolve
from hemiola.runtime.device.find import find_device
from hemiola.runtime.device.followers import FollowerProcesses
from hemiola.runtime.device.memory import free_bytes
from hemiola.runtime.errors import Name, Refused
from hemiola.runtime.open import open_loop, open_text, packed_form, shown_sizes, start_followers
from hemiola.runtime.processes import only_here
from hemiola.runtime.progress import READY, Report, show
from hemiola.runtime.same_bits import load_same_bits
from hemiola.runtime.schedule.carrier import Carrier
from hemiola.runtime.schedule.collector import Collector
from hemiola.runtime.schedule.request import Bounds, Request, checked_ids, new_request
from hemiola.runtime.text import Text

log = logging.getLogger("hemiola")


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
        manifest = self.manifest
        device = find_device(engine_dir, manifest.arch, manifest.tp)
        files = [engine_dir / file for file in manifest.weights_files(0)]
        free = free_bytes(device, files, manifest.drawn_bytes, manifest.work_bytes)
        followers = start_followers(engine_dir, manifest, report)
        try:
            self._open_with(engine_dir, serve_config, report, device, free, followers)
        except BaseException:
            if followers is not None:
                followers.close()
            raise

    def _open_with(
        self,
        engine_dir: Path,
        serve_config: ServeConfig,
        report: Report,
        device: torch.device,
        free: int,
        followers: FollowerProcesses | None,
    ) -> None:
        if followers is not None:  # sizes are those that the poorest rank has memory for
            free = min(free, followers.opened()) // (self.manifest.tp if device.type == "cpu" else 1)
        self.config = resolve(serve_config, self.manifest, free)
        if serve_config.prefix_cache == "auto" and not self.config.prefix_cache:
            log.warning(
                "no prefix cache: max_len=%d leaves no token behind a page of %d",
                self.config.max_len,
                self.config.page_len,
            )
        if words := manifests.lossy(self.manifest.kv_dtype):
            log.warning("%s", words)
        report("reading the tokenizer", 0, 0)
        self._text = open_text(engine_dir, self.manifest)
        self._same_bits = load_same_bits(engine_dir, self.manifest.sha256, self.manifest.tp)
        self._grammars = self._text and Grammars(self._text.tokenizer, self.manifest.vocab_size)
        log.info("%s", shown_sizes(self.config, self.manifest, free))
        given = engine_dir, self.manifest, self.config, self._text, device, report, followers
        self._loop = open_loop(*given)
        self._pid = os.getpid()
        weakref.finalize(self, only_here(self._loop.close))  # when forgotten, and at exit
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

    @property
    def tiers(self) -> dict[str, TierUse]:
        """What the tiers below the prefix cache, "host" and "disk", have done and hold."""
        return self._loop.scheduler.prefix.tiers

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
            message = (Name("tools"), " are given, the chat template shows none to the model")
            raise Refused("unsupported", "tools", message=message, way_out="leave them out")
        return text.chat(messages, tools=list(tools) or None)

    def _tokenizer(self, field: str, verb: str, instead: str) -> Text:
        if self._text is None:
            message = (Name(field), f"{verb} text, the engine has no tokenizer")
            raise Refused("unsupported", field, message=message, way_out=("pass ", Name(instead)))
        return self._text

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        on_piece: OnPiece,
        arrival: float | None = None,
        output_ids: Sequence[int] = (),
        wants_text: bool = True,
    ) -> int:
        """Queue a request and return its id; on_piece is called in the loop's thread. Refuses at once.

        arrival: when it came, by time.perf_counter, if not now.
        output_ids: the first tokens of its output, which another engine of this identity chose. The pieces
        have what follows, as if this engine had chosen all; params are those of the whole output.
        wants_text: without, pieces may have ids alone, which takes less time."""
        if not callable(on_piece):
            raise Refused("wrong_type", "on_piece", type(on_piece), way_out="pass a function of a Piece")
        request = self._request(prompt, params, arrival, output_ids, wants_text)
        self._loop.submit(request, on_piece)
        return request.id

    def abort(self, request_id: int) -> None:
        """End a request; its last piece says "cancelled"."""
        if not isinstance(request_id, int):
            raise Refused("wrong_type", "request_id", type(request_id), way_out="pass what submit returned")
        self._loop.abort(request_id)

    def reset_prefix_cache(self) -> None:
        """Forget all kept pages and states; what runs goes on."""
        self._loop.flush()

    def watch_cache(self, observer: Observer) -> None:
        """Let one observer know which pages requests can start behind: those there are, then each change."""
        for name in ("stored", "removed"):
            if not callable(getattr(observer, name, None)):
                message = (Name("observer"), f" has no method {name}")
                raise Refused("wrong_type", "observer", message=message, way_out="pass an Observer")
        self._loop.watch(observer)

    def export_prefix(self, prompt: Prompt, *, cache_salt: str = "") -> bytearray:
        """What is stored of a prompt up to its deepest edge, packed: pages, and the state of the recurrences.
        `import_prefix` of an LLM with the same engine takes it. The prompt's ids and the salt are in clear.

        Needs host_cache_bytes. Waits for the step under way. Raises Refused where nothing is stored."""
        carrier = self._carrier("export_prefix")
        SamplingParams(cache_salt=cache_salt)  # checks it
        return carrier.pack(checked_ids(self.encode(prompt, must_fit=False), self._bounds), cache_salt)

    def import_prefix(self, packed: bytes | bytearray | memoryview) -> int:
        """Let requests start from a prefix that `export_prefix` packed; returns its tokens. It goes to the
        host's memory, as if the cache had given it up.

        Needs host_cache_bytes. Waits for the step under way. Raises Refused for what is damaged, or of
        another engine, and nothing has changed then: requests compute it."""
        return self._carrier("import_prefix").unpack(packed)

    def _carrier(self, asked: str) -> Carrier:
        if self.config.host_cache_bytes == 0:
            message = (
                f"{asked} needs ",
                Name("host_cache_bytes"),
                ": prefixes move through the host's memory",
            )
            raise Refused(
                "conflict", message=message, way_out=("open it with ", Name("host_cache_bytes", 2**30))
            )
        form = packed_form(self.config, self.manifest, self._loop.device, self._same_bits)
        return Carrier(self._loop.visit, form)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Piece]:
        """Pieces as they come; who stops reading aborts the request. Refuses before the first piece."""
        pieces: SimpleQueue[Piece] = SimpleQueue()
        request_id = self.submit(prompt, SamplingParams() if params is None else params, pieces.put)
        stream = self._read(pieces, request_id)
        next(stream)  # only a generator that has begun ends the request when it goes
        return stream

    def _read(self, pieces: SimpleQueue[Piece], request_id: int) -> Iterator[Piece]:
        """What comes behind a first piece of nothing."""
        try:
            yield Piece("", [])
            while True:
                self._loop.check_may_wait()
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
        self._loop.check_may_wait()
        requests = self._requests(_as_list(prompts), params)
        done: SimpleQueue[Collector] = SimpleQueue()
        collectors = [Collector(request, done.put) for request in requests]
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
        for index, (prompt, request_params) in enumerate(pairs(prompts, params)):
            try:
                requests.append(self._request(prompt, request_params))
            except Refused as error:
                raise error.at(f"prompts[{index}]") from None
        return requests

    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        arrival: float | None = None,
        output_ids: Sequence[int] = (),
        wants_text: bool = True,
    ) -> Request:
        arrival = time.perf_counter() if arrival is None else arrival  # before the prompt is tokenized
        if not isinstance(params, SamplingParams):
            raise Refused("wrong_type", "params", type(params), way_out="pass a SamplingParams")
        self._loop.check_open()  # before a grammar is compiled
        params = params.checked()
        if params.prompt_logprobs is not None:
            self._check_scoring()
        if params.stop:
            self._tokenizer("stop", " is", "stop_token_ids")
        encode = self._text.encode_words if self._text is not None else None
        ids = self.encode(prompt)
        grammar = self._grammar(params)
        request_id, bounds = next(self._request_ids), self._bounds
        return new_request(request_id, ids, params, bounds, encode, grammar, arrival, output_ids, wants_text)

    def _check_scoring(self) -> None:
        """A compiler that cut the program has the output head inside of a part, for the lines that choose."""
        target = self.manifest.segment("trunk").compiler.split()
        if target:
            message = (Name("prompt_logprobs"), f" are not computed by engines of {target[0]}")
            way_out = "leave it out, or build with --target torch"
            raise Refused("unsupported", "prompt_logprobs", message=message, way_out=way_out)

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        """Compiled in a thread of its own, while steps go on; the caller waits."""
        if params.structured_outputs is None:
            return None
        if self._grammars is None:
            message = (Name("structured_outputs"), " is about text, the engine has no tokenizer")
            way_out = "leave it out, or build from a checkpoint that has one"
            raise Refused("unsupported", "structured_outputs", message=message, way_out=way_out)
        return self._grammars.compile(params.structured_outputs)

    def close(self, drain: bool = False) -> None:
        """Cancel (or with drain: finish) what runs, end the thread and give all memory back: before it
        returns, or from on_piece soon after. Safe to call twice. A fork leaves its parent's engine alone."""
        if os.getpid() != self._pid:
            return
        self._loop.close(drain)
        if self._grammars is not None:
            self._grammars.close()

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


def _progress(total: int, shown: bool) -> Iterator[int]:
    if not shown:
        return iter(range(total))
    from rich.console import Console  # not needed by servers
    from rich.progress import track

    return iter(track(range(total), description="requests", total=total, console=Console(stderr=True)))
