"""One network, compiled by TensorRT or TensorRT-RTX; `trt` is either module.

As a program of its own this compiles one part for TensorRT-RTX: `alone` says why. It imports nothing of ours.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

Shapes = Mapping[str, Sequence[Sequence[int]]]  # of an input with dynamic sizes: least, best, most
SAME_ADDRESSES, ASK = 0x0040000, 0xFFFFFFFF  # of personality(2)


class NotBuilt(Exception):
    """What the compiler could not do, `read` or `compile`, and what it logged."""

    def __init__(self, what: str, errors: list[str]) -> None:
        super().__init__(what, errors)
        self.what, self.errors = what, errors


class Built(NamedTuple):
    engine: bytes
    has_same_bytes: bool  # another build would give these bytes again


@cache
def log_of(trt: Any) -> Any:
    """The one logger of a process, TensorRT takes no second. It keeps errors, which the API only logs."""

    class Kept(trt.ILogger):
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: object, message: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                self.errors.append(" ".join(message.split()))

    return Kept()


def build(
    trt: Any, model: bytes, profiles: Sequence[Shapes], configure: Callable[[Any], None], path: str = ""
) -> bytes:
    """One engine of a strongly typed network. `path`: beside the files of external weights."""
    log = log_of(trt)
    log.errors.clear()
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse(model, path) if path else not parser.parse(model):
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        raise NotBuilt("read", [f"{error.node_operator()}: {error.desc()}" for error in errors])
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)
    configure(config)
    for shapes in profiles:
        profile = builder.create_optimization_profile()
        for name, sizes in shapes.items():
            profile.set_shape(name, *sizes)
        config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise NotBuilt("compile", log.errors)
    return bytes(engine)


def alone(trt: Any, model: bytes, profiles: Sequence[Shapes], archs: Sequence[str]) -> Built:
    """The same for TensorRT-RTX, in a fresh process with fixed addresses.

    It orders what is inside an engine by addresses of its own memory: only so two builds have the same bytes.
    What fells it fells nobody else.
    """
    told = {"module": trt.__name__, "site": str(Path(trt.__file__).parents[1])}
    asked = json.dumps(told | {"profiles": profiles, "archs": archs}).encode()
    # fixed arguments and variables, too: they lie in its memory
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    kept["CUDA_VISIBLE_DEVICES"] = ""  # it needs none
    with TemporaryFile() as file:  # of a pipe it would read pieces as they come, into memory that they choose
        file.write(asked + b"\n" + model)
        file.seek(0)
        done = subprocess.run([sys.executable, "-I", __file__], stdin=file, env=kept, capture_output=True)
    head, _, engine = done.stdout.partition(b"\n")
    if done.returncode or not head:
        raise NotBuilt("compile", [_last_words(done)])
    report = json.loads(head)
    if report["errors"]:
        raise NotBuilt(report["what"], report["errors"])
    return Built(engine, report["has_same_bytes"])


def _last_words(done: subprocess.CompletedProcess[bytes]) -> str:
    end = f"died of signal {-done.returncode}" if done.returncode < 0 else f"ended with {done.returncode}"
    if done.returncode == -signal.SIGKILL:
        end += ", perhaps of too little memory"
    lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    return f"it {end}: {' '.join(lines[-1].split())}" if lines else f"it {end}"


def main() -> None:
    """In a process of its own: what `alone` asks on standard input, on standard output."""
    personality = ctypes.CDLL(None).personality
    if len(sys.argv) == 1 and personality(SAME_ADDRESSES) != -1:
        os.execv(sys.executable, [sys.executable, "-I", __file__, "again"])  # it holds from the next start on
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asked ends this
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints
    asked, model = json.loads(sys.stdin.buffer.readline()), sys.stdin.buffer.read()
    sys.path.insert(0, asked["site"])
    trt = import_module(asked["module"])

    def configure(config: Any) -> None:
        config.num_compute_capabilities = len(asked["archs"])
        for i, arch in enumerate(asked["archs"]):
            config.set_compute_capability(getattr(trt.ComputeCapability, arch.replace("sm_", "SM")), i)

    report: dict[str, object] = {
        "what": "",
        "errors": [],
        "has_same_bytes": bool(personality(ASK) & SAME_ADDRESSES),
    }
    engine = b""
    try:
        engine = build(trt, model, asked["profiles"], configure)
    except NotBuilt as failure:
        report |= {"what": failure.what, "errors": failure.errors or ["it gives no reason"]}
    out.write(json.dumps(report).encode() + b"\n" + engine)
    out.close()


if __name__ == "__main__":
    main()
