"""Options of `hemiola serve` that are no engine's."""

from pydantic import Field

from hemiola.runtime.api import Strict

MAX_PORT = 2**16 - 1
MOST_SECONDS = 2**31 - 1  # that tritonserver counts


class ServerOptions(Strict):
    """Of the server, whatever it serves."""

    host: str = Field(
        default="127.0.0.1",
        description="IPv4 address of all ports but gRPC (see --triton-host), or a name of one; 0.0.0.0: every"
        " interface",
    )
    triton_host: str | None = Field(
        default=None,
        description="address of the HTTP, gRPC and metrics ports, which ask for no key; default: 127.0.0.1"
        " for gRPC; --host for HTTP and metrics, or 127.0.0.1 if the OpenAI API has a key",
    )
    http_port: int = Field(
        default=8000, ge=0, le=MAX_PORT, description="port of HTTP; 0: any free port, here and below"
    )
    grpc_port: int = Field(8001, ge=0, le=MAX_PORT, description="port of gRPC, for hemiola.Client")
    metrics_port: int = Field(8002, ge=0, le=MAX_PORT, description="port of Prometheus metrics")
    start_timeout: float = Field(300, gt=0, description="seconds in which every engine must become ready")
    exit_timeout: int = Field(
        default=30,
        ge=0,
        le=MOST_SECONDS,
        description="seconds that requests in flight have to finish after SIGTERM",
    )
    restart: int = Field(
        5, ge=0, description="maximum of restarts in a row after the server was lost; 0: do not restart"
    )
    hang_timeout: float = Field(  # less than some heartbeats would end engines that are well
        default=30,
        ge=1,
        description="seconds without a heartbeat after which an engine counts as lost; 1 or more",
    )


class OpenaiOptions(Strict):
    """Of the OpenAI-compatible API. Without a port there is none."""

    openai_port: int | None = Field(
        default=None, ge=0, le=MAX_PORT, description="port of the OpenAI-compatible API; default: none"
    )
    openai_api_key: tuple[str, ...] = Field(
        default=(),
        description="key that callers must send; default: the keys in HEMIOLA_OPENAI_API_KEY, separated by"
        " spaces",
    )
    openai_max_requests: int = Field(
        1024, ge=1, description="maximum of requests at once; others get status 429"
    )
    openai_max_body: int = Field(
        16 * 2**20, ge=1, description="maximum of bytes in a body; others get status 413"
    )
