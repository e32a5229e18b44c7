"""Runs an LLM as a worker of Dynamo until SIGTERM or SIGINT."""

import asyncio
import errno
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import util
from pathlib import Path
from typing import Any

from hemiola.runtime import manifest as manifests
from hemiola.runtime.dynamo.binding import Binding, load_binding
from hemiola.runtime.dynamo.card import make_card
from hemiola.runtime.dynamo.engine import DynamoEngine, WorkerBounds
from hemiola.runtime.dynamo.handover import Handover
from hemiola.runtime.dynamo.options import WorkerOptions
from hemiola.runtime.errors import Failed, Name, Refused, one_line
from hemiola.runtime.extra import install
from hemiola.runtime.llm import LLM

ENDPOINT = "generate"
MODES = {"agg": "Aggregated", "prefill": "Prefill", "decode": "Decode"}
Say = Callable[[str], None]


class _Loss:
    """Why the engine is lost. Dynamo then ends the worker as it does for SIGTERM: it is found no more."""

    reason = ""

    def __call__(self, reason: str) -> None:
        self.reason = reason
        os.kill(os.getpid(), signal.SIGTERM)


def run_worker(engine_dir: Path, worker: WorkerOptions, options: Mapping[str, Any], say: Say) -> None:
    """Raises Refused or Failed. A lost engine ends the process at once, with status 1: it may hang."""
    binding, lost = load_binding(), _Loss()
    _check_system_port()
    store = _store(worker)
    hand_over = partial(Handover, own=worker) if _hands_over(worker, options) else None
    card = make_card(engine_dir, manifests.load(engine_dir))
    open_llm = partial(LLM, engine_dir, progress=True, **options)
    register = partial(_register, binding, card, worker, say)
    bounds = WorkerBounds(worker.min_priority, worker.hang_timeout, worker.max_queue)
    engine = DynamoEngine(open_llm, register, binding.errors, bounds, lost, hand_over, store)
    try:
        asyncio.run(_run(binding, engine, card, worker))
    except Exception as error:
        raise engine.error or Failed(f"Dynamo's worker ended: {one_line(error)}") from None
    finally:
        if lost.reason:
            print(f"error: {lost.reason}", file=sys.stderr, flush=True)
            os._exit(1)
    say("stopped")


def _check_system_port() -> None:
    """Raises Refused where it is taken: Dynamo's worker would run without its /health."""
    host, port = os.environ.get("DYN_SYSTEM_HOST", "0.0.0.0"), os.environ.get("DYN_SYSTEM_PORT", "")
    if not port.isdecimal() or not 0 < int(port) < 2**15:
        return  # Dynamo says what it thinks of that
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host.strip("[]"), int(port)), family=family).close()
    except OSError as error:
        message = f"DYN_SYSTEM_PORT: cannot listen on {host}:{port} ({one_line(error)})"
        raise Refused("in_use", message=message, way_out="choose another port") from None


def _store(worker: WorkerOptions) -> Path | None:
    """The folder of discovery by files. Raises Refused where it cannot be written: an engine may take minutes
    to open before Dynamo says so."""
    backend = worker.discovery_backend or os.environ.get("DYN_DISCOVERY_BACKEND")
    folder = os.environ.get("DYN_FILE_KV")
    if backend != "file" or not folder:
        return None
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        message = f"DYN_FILE_KV: {folder} cannot be written ({error.strerror})"
        raise Refused("in_use", message=message, way_out="name a folder of yours") from None
    return Path(folder)


def _hands_over(worker: WorkerOptions, options: Mapping[str, Any]) -> bool:
    """Raises Refused where prefixes have no way from one worker to another."""
    mode = worker.disaggregation_mode
    if mode == "agg":
        return False
    if not options.get("host_cache_bytes"):
        message = (
            Name("disaggregation_mode", mode),
            " needs ",
            Name("host_cache_bytes"),
            ", which prefixes pass",
        )
        raise Refused(
            "conflict",
            "disaggregation_mode",
            message=message,
            way_out=("add ", Name("host_cache_bytes", 2**30)),
        )
    if util.find_spec("nixl") is None:
        message = (Name("disaggregation_mode", mode), " needs nixl, which is not installed")
        raise Refused("not_found", "disaggregation_mode", message=message, way_out=install("nixl"))
    return True


async def _run(binding: Binding, engine: DynamoEngine, card: Path, worker: WorkerOptions) -> None:
    backend = binding.backend
    runtime = backend.RuntimeConfig(worker.discovery_backend, worker.request_plane, worker.event_plane)
    config = backend.WorkerConfig(
        namespace=worker.namespace,
        component=worker.component,
        endpoint=ENDPOINT,
        model_name=str(card),
        served_model_name=worker.model_name,
        model_input=binding.tokens,
        endpoint_types="chat,completions",
        tool_call_parser=worker.tool_call_parser,
        reasoning_parser=worker.reasoning_parser,
        disaggregation_mode=getattr(backend.DisaggregationMode, MODES[worker.disaggregation_mode]),
        runtime=runtime,
    )
    await backend.Worker(engine, config, asyncio.get_running_loop()).run()


def _register(binding: Binding, card: Path, worker: WorkerOptions, say: Say, llm: LLM) -> object:
    """What frontends learn of the worker."""
    config, backend = llm.config, binding.backend
    say(f"open: {worker.model_name} joins as {worker.namespace}.{worker.component}.{ENDPOINT}")
    sizes = backend.LlmRegistration(
        context_length=config.max_len,
        kv_cache_block_size=config.page_len,
        total_kv_blocks=llm.load().num_pages,
        max_num_seqs=config.max_rows,
        max_num_batched_tokens=config.max_step_tokens,
    )
    return backend.EngineConfig(model=str(card), served_model_name=worker.model_name, llm=sizes)
