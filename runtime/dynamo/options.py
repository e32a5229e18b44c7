"""Options of `hemiola dynamo-worker` that are no engine's."""

from typing import Literal

from pydantic import Field

from hemiola.runtime.api import Strict


class WorkerOptions(Strict):
    """Of the worker. Names are Dynamo's; what is not given is as Dynamo's environment variables say."""

    model_name: str = Field(
        default="hemiola", min_length=1, description="name of the model; workers of one name are replicas"
    )
    namespace: str = Field(default="dynamo", min_length=1, description="Dynamo's namespace")
    component: str = Field(default="hemiola", min_length=1, description="Dynamo's component")
    discovery_backend: Literal["etcd", "file", "kubernetes", "mem"] | None = Field(
        default=None,
        description="where workers and frontends find each other (default: DYN_DISCOVERY_BACKEND, or etcd);"
        " file: in the folder DYN_FILE_KV",
    )
    request_plane: Literal["tcp", "nats"] | None = Field(
        default=None, description="how requests travel (default: DYN_REQUEST_PLANE, or tcp)"
    )
    event_plane: Literal["zmq", "nats"] | None = Field(
        default=None, description="how events of the cache travel (default: DYN_EVENT_PLANE, or zmq)"
    )
    disaggregation_mode: Literal["agg", "prefill", "decode"] = Field(
        default="agg",
        description="prefill: compute prompts; decode: fetch computed prompts and answer; agg: do both."
        " prefill and decode need --host-cache-bytes, and a --component of their own",
    )
    peer_host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="address of this machine from which decode workers fetch; prefill only",
    )
    peer_port: int = Field(default=0, ge=0, le=65535, description="port of --peer-host; 0: any free port")
    tool_call_parser: str | None = Field(
        default=None, description="the frontend's parser of tool calls, by Dynamo's name"
    )
    reasoning_parser: str | None = Field(
        default=None, description="the frontend's parser of thoughts, by Dynamo's name"
    )
    max_queue: int = Field(
        default=256, ge=0, description="requests that may wait for a row; more are refused"
    )
    min_priority: int = Field(
        default=0,
        le=0,  # who asks for none has 0
        description="smallest priority number that callers may send; Dynamo's are the negatives of ours",
    )
    hang_timeout: float = Field(
        default=60, ge=1, description="seconds without progress after which the engine counts as lost"
    )
