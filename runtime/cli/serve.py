"""`hemiola serve`"""

import gc
import logging
import math
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from hemiola.runtime.cli.options import given, options_of, takes
from hemiola.runtime.config import ServeConfig
from hemiola.runtime.errors import Refused
from hemiola.runtime.serving.launcher import Server, read_models
from hemiola.runtime.serving.log import STDERR, Handler, say
from hemiola.runtime.serving.openai.app import FrontLimits
from hemiola.runtime.serving.openai.front import Front
from hemiola.runtime.serving.openai.model import read_model
from hemiola.runtime.serving.settings import ModelSettings
from hemiola.runtime.serving.tritonserver import Ports

SAME_S = 0.2  # `timeout` and terminals tell a process and then its group, which it is in: one wish, twice
OURS = ("engine_dir", "heartbeat_file", "num_restarts")  # of ModelSettings, the launcher's to say


@takes(options_of(ServeConfig), options_of(ModelSettings, leave_out=OURS))
def serve(
    engine_dir: Annotated[
        list[Path] | None, typer.Option(help="made by build-engine; repeat for several engines")
    ] = None,
    models: Annotated[
        Path | None, typer.Option(help="JSON instead: model name -> its engine_dir and options")
    ] = None,
    model_name: Annotated[
        list[str] | None, typer.Option(help="name of each engine (default: hemiola)")
    ] = None,
    host: Annotated[str, typer.Option(help="address to listen on; 0.0.0.0 is every interface")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="port of HTTP; 0 takes a free one, here and below")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="port of gRPC, for hemiola.Client")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="port of Prometheus metrics")] = 8002,
    openai_port: Annotated[
        int | None, typer.Option(help="port of an OpenAI-compatible API (default: none)")
    ] = None,
    openai_api_key: Annotated[
        list[str] | None,
        typer.Option(help="key that callers must send; repeat for several", envvar="HEMIOLA_OPENAI_API_KEY"),
    ] = None,
    openai_max_requests: Annotated[int, typer.Option(help="most at once; more get status 429")] = 1024,
    openai_max_body: Annotated[int, typer.Option(help="most bytes of a body, else status 413")] = 16 * 2**20,
    tritonserver: Annotated[Path | None, typer.Option(help="the binary (default: nvidia-pytriton's)")] = None,
    start_timeout: Annotated[float, typer.Option(help="seconds until every engine must be ready")] = 300,
    exit_timeout: Annotated[int, typer.Option(help="seconds that streams in flight get at the end")] = 30,
    restart: Annotated[int, typer.Option(help="times in a row that a lost server is started again")] = 0,
    hang_timeout: Annotated[float, typer.Option(help="seconds without a sign of life, then it is lost")] = 30,
    control_key: Annotated[str, typer.Option(help="who sends this key may load and unload models")] = "",
    log_verbose: Annotated[bool, typer.Option("--log-verbose", help="show tritonserver's log")] = False,
    **options: Any,
) -> None:
    """Serve engines with a real tritonserver until SIGINT or SIGTERM."""
    engines, settings_of = read_models(models, engine_dir or [], model_name or [])
    limits = FrontLimits(openai_max_requests, openai_max_body, tuple(openai_api_key or ()))
    max_len = given(ServeConfig, options).get("max_len")
    max_lens = {name: settings_of.get(name, {}).get("max_len", max_len) for name in engines}
    if openai_port and openai_port in (http_port, grpc_port, metrics_port):
        raise Refused(f"--openai-port {openai_port} is the server's own; choose another, or 0 for a free one")
    front = FrontOptions(openai_port, limits, max_lens, exit_timeout)
    server = Server(
        engines,
        host=host,
        ports=Ports(http_port, grpc_port, metrics_port),
        options=given(ServeConfig, options) | given(ModelSettings, options),
        settings_of=settings_of,
        control_key=control_key,
        hang_timeout_s=hang_timeout,
        tritonserver=tritonserver,
        log_verbose=log_verbose,
        start_timeout_s=start_timeout,
        exit_timeout_s=exit_timeout,
    )
    interrupt = once(SAME_S)
    for number in (signal.SIGINT, signal.SIGTERM):  # a script's background job starts with SIGINT ignored
        signal.signal(number, interrupt)
    try:
        _serve(server, front, restart)
    except KeyboardInterrupt:  # before it was ready, or for the second time
        sys.exit(130)
    except RuntimeError as error:
        say(f"error: {error}", STDERR)
        sys.exit(1)


def once(seconds: float) -> Callable[[int, object], None]:
    """A handler that raises KeyboardInterrupt; signals so soon after one are that one again."""
    last = -math.inf

    def interrupt(number: int, frame: object) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if last - before > seconds:
            raise KeyboardInterrupt

    return interrupt


class FrontOptions(NamedTuple):
    """Of an OpenAI-compatible API."""

    port: int | None  # None: there is none
    limits: FrontLimits
    max_lens: Mapping[str, int | str | None]  # by model; no number: as its engine was built
    exit_timeout_s: float

    def front(self, server: Server) -> Front | None:
        if self.port is None:
            return None
        wanted = {name: most for name, most in self.max_lens.items() if isinstance(most, int)}
        models = {name: read_model(name, path, wanted.get(name)) for name, path in server.engines.items()}
        settings = {"limits": self.limits, "exit_timeout_s": self.exit_timeout_s}
        return Front(models, host=server.host, port=self.port, **settings)


def _serve(server: Server, front_options: FrontOptions, restarts: int) -> None:
    start = time.monotonic()
    logging.basicConfig(handlers=[Handler(server.printer)], format="%(message)s")
    server.check()
    front = front_options.front(server)
    engines = ", ".join(f"{name} ({engine_dir})" for name, engine_dir in server.engines.items())
    say(f"starting tritonserver with {engines}")
    with server:
        for name in server.engines:
            say(f"HTTP     {server.http_url}/v2/models/{name}/generate_stream")
        say(f"gRPC     {server.grpc_url}")
        say(f"metrics  {server.metrics_url}")
        if front is not None:
            front.start(server.grpc_url, server.metrics_url)
            say(f"OpenAI   {front.url}")
        gc.collect()
        gc.freeze()  # what stands is left alone: looking at all of it stopped the front for 0.07 s
        say(f"ready after {time.monotonic() - start:.1f} s; Ctrl-C ends it")
        try:
            server.serve(restarts)
        except KeyboardInterrupt:
            say("waiting for streams in flight")
        finally:
            if front is not None:
                front.stop()
    say("stopped")
