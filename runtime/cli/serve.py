"""`hemiola serve`"""

import contextlib
import gc
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from hemiola.runtime.cli.options import given, made, options_of, takes
from hemiola.runtime.errors import Refused, shown
from hemiola.runtime.extra import lacking
from hemiola.runtime.options import ServeConfig
from hemiola.runtime.progress import show
from hemiola.runtime.serving import files
from hemiola.runtime.serving.log import STDERR, Handler, say
from hemiola.runtime.serving.options import OpenaiOptions, ServerOptions
from hemiola.runtime.serving.ports import Ports, address_of
from hemiola.runtime.serving.settings import LAUNCHERS, ModelSettings

if TYPE_CHECKING:  # torch is not needed for --help; the extra `serve` may not be there
    from hemiola.runtime.serving.launcher import Server
    from hemiola.runtime.serving.openai.front import Front

SAME_S = 0.2  # `timeout` and terminals tell a process and then its group, which it is in: one wish, twice
LOOPBACK = "127.0.0.1"
API_KEY = "HEMIOLA_OPENAI_API_KEY"


@takes(
    options_of(ServerOptions),
    options_of(OpenaiOptions),
    options_of(ServeConfig),
    options_of(ModelSettings, leave_out=("engine_dir", *LAUNCHERS)),
)
def serve(
    engine: Annotated[list[str] | None, typer.Argument(metavar="ENGINE", hidden=True)] = None,
    engine_dir: Annotated[
        list[Path] | None,
        typer.Option(help="made by build-engine; the same as an argument ENGINE; may be repeated"),
    ] = None,
    models: Annotated[
        Path | None, typer.Option(help="JSON file with several models: name -> engine_dir and options")
    ] = None,
    model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="model name of an engine; repeat it in the order of the engines (default: hemiola)"
        ),
    ] = None,
    tritonserver: Annotated[
        Path | None, typer.Option(help="tritonserver's binary (default: that of nvidia-pytriton)")
    ] = None,
    control_key: Annotated[str, typer.Option(help="key that allows callers to load and unload models")] = "",
    log_verbose: Annotated[bool, typer.Option("--log-verbose", help="show tritonserver's log")] = False,
    **options: Any,
) -> None:
    """Serve engines with a real tritonserver until SIGINT or SIGTERM."""
    from hemiola.runtime.serving.engines import read_models
    from hemiola.runtime.serving.launcher import Server

    engines, settings_of = read_models(models, engine_dirs(engine_dir, engine), model_name or [])
    server_options, openai = made(ServerOptions, options), made(OpenaiOptions, options)
    ports = Ports(server_options.http_port, server_options.grpc_port, server_options.metrics_port)
    _check(openai, ports)
    max_len = given(ServeConfig, options).get("max_len")
    max_lens = {name: settings_of.get(name, {}).get("max_len", max_len) for name in engines}
    plan = FrontPlan(openai, max_lens, server_options.exit_timeout, server_options.host)
    server = Server(
        engines,
        host=triton_host(server_options, plan),
        grpc_host=grpc_host(server_options),
        ports=ports,
        options=given(ServeConfig, options) | given(ModelSettings, options),
        settings_of=settings_of,
        models_file=models,
        control_key=control_key,
        hang_timeout_s=server_options.hang_timeout,
        tritonserver=tritonserver,
        log_verbose=log_verbose,
        start_timeout_s=server_options.start_timeout,
        exit_timeout_s=server_options.exit_timeout,
        show=partial(show, not log_verbose, say, sys.stdout),
    )
    interrupt = once(SAME_S)
    for number in (signal.SIGINT, signal.SIGTERM):  # a script's background job starts with SIGINT ignored
        signal.signal(number, interrupt)
    try:
        _serve(server, plan, server_options.restart)
    except KeyboardInterrupt:  # before it was ready, or for the second time
        sys.exit(130)
    except RuntimeError as error:
        say(f"error: {error}", STDERR)
        sys.exit(1)


def engine_dirs(options: list[Path] | None, arguments: list[str] | None) -> list[Path]:
    """The engines, by --engine-dir or as arguments."""
    if options and arguments:
        message = f"--engine-dir {options[0]} and {shown(arguments[0])} were both given"
        raise Refused("conflict", "engine_dir", message=message, way_out="use one of them")
    if arguments and "" in arguments:
        raise Refused("missing", message="ENGINE is empty", way_out="give a folder")
    return options or [Path(argument) for argument in arguments or []]


def once(seconds: float) -> Callable[[int, object], None]:
    """A handler that raises KeyboardInterrupt; signals so soon after one are that one again."""
    last = -math.inf

    def interrupt(number: int, frame: object) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if last - before > seconds:
            raise KeyboardInterrupt

    return interrupt


def _check(openai: OpenaiOptions, ports: Ports) -> None:
    """Refuses what would be dropped in silence, and ports that are one."""
    if openai.openai_port is None:
        for name in openai.model_fields_set:
            message = f"--{name.replace('_', '-')} is given, but no --openai-port: there is no OpenAI API"
            raise Refused("missing", "openai_port", message=message, way_out="add --openai-port")
    if "" in openai.openai_api_key:
        message = "--openai-api-key is empty, callers would need none"
        raise Refused("missing", "openai_api_key", message=message, way_out="give one, or leave it out")
    if openai.openai_port and openai.openai_port in ports:
        message = f"--openai-port {openai.openai_port} is the server's own"
        raise Refused("in_use", "openai_port", message=message, way_out="choose another, or 0 for a free one")


class FrontPlan(NamedTuple):
    """An OpenAI-compatible API, if one is wanted."""

    options: OpenaiOptions
    max_lens: Mapping[str, int | str | None]  # by model; no number: as its engine was built
    exit_timeout_s: float
    host: str = LOOPBACK

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The environment's may be there for other servers: alone, it asks for no API."""
        keys = os.environ.get(API_KEY)
        if self.options.openai_api_key or keys is None:
            return self.options.openai_api_key
        if not keys.split():  # a secret that did not arrive would open the API to all
            message = f"{API_KEY} is empty, callers would need no key"
            raise Refused("missing", "openai_api_key", message=message, way_out="give one there, or unset it")
        return tuple(keys.split())

    def front(self, server: "Server") -> "Front | None":
        asked = self.options
        if asked.openai_port is None:
            return None
        try:
            from hemiola.runtime.serving.openai.app import FrontLimits
            from hemiola.runtime.serving.openai.front import Front
        except ModuleNotFoundError as error:
            raise Refused("not_found", "openai_port", message=lacking("--openai-port", error)) from None
        from hemiola.runtime.serving.openai.model import read_model

        limits = FrontLimits(asked.openai_max_requests, asked.openai_max_body, self.api_keys)
        wanted = {name: max_len for name, max_len in self.max_lens.items() if isinstance(max_len, int)}
        models = {name: read_model(name, path, wanted.get(name)) for name, path in server.engines.items()}
        settings = {"limits": limits, "exit_timeout_s": self.exit_timeout_s}
        return Front(models, host=address_of(self.host), port=asked.openai_port, **settings)


def triton_host(options: ServerOptions, plan: FrontPlan) -> str:
    """Triton's doors ask for no key: where the OpenAI API does, they stay on this machine by default."""
    if options.triton_host is not None:
        return options.triton_host
    return LOOPBACK if plan.options.openai_port is not None and plan.api_keys else options.host


def grpc_host(options: ServerOptions) -> str:
    """A request at that door can end the server (docs/security.md): others reach it only if asked for."""
    return LOOPBACK if options.triton_host is None else options.triton_host


def doors(server: "Server", front: "Front | None", api_keys: tuple[str, ...]) -> list[str]:
    """Who reaches each door, and with what."""
    doors = [(server.host, server.ports.http, "HTTP", "no key")]
    doors += [(server.grpc_host, server.ports.grpc, "gRPC", "no key")]
    doors += [(server.host, server.ports.metrics, "metrics", "no key")]
    if front is not None:
        key = "a key for /v1, none for /health and /metrics" if api_keys else "no key"
        doors.append((front.host, front.port, "OpenAI", key))
    return [f"door     {host}:{port} {name}: {reached_by(host)}, {key}" for host, port, name, key in doors]


def reached_by(host: str) -> str:
    if host.startswith("127."):
        return "this machine only"
    return "every network of this machine" if host == "0.0.0.0" else "the network of this address"


def _serve(server: "Server", plan: FrontPlan, restarts: int) -> None:
    start = time.monotonic()
    logging.basicConfig(handlers=[Handler(server.printer)], format="%(message)s")
    files.raise_limit()
    server.check()
    front = plan.front(server)
    engines = ", ".join(f"{name} ({engine_dir})" for name, engine_dir in server.engines.items())
    say(f"starting tritonserver with {engines}")
    with contextlib.ExitStack() as stack:
        if front is not None:
            server.fronts.append(front)
            stack.push(lambda kind, *_: front.stop() if kind is None else front.close())
        stack.enter_context(server)
        for name in server.engines:
            say(f"HTTP     {server.http_url}/v2/models/{name}/generate_stream")
        say(f"gRPC     {server.grpc_url}")
        say(f"metrics  {server.metrics_url}")
        if front is not None:
            front.start(server.grpc_url, server.metrics_url, server.door_key)
            say(f"OpenAI   {front.url}")
        for line in doors(server, front, plan.api_keys if front is not None else ()):
            say(line)
        gc.collect()
        gc.freeze()  # what stands is left alone: looking at all of it stopped the front for 0.07 s
        say(f"ready after {time.monotonic() - start:.1f} s; Ctrl-C ends it")
        try:
            server.serve(restarts)
        except KeyboardInterrupt:
            server.refuse()  # all doors at once: it is left now, and drains
            say("waiting for streams in flight")
    say("stopped")
