"""`hemiola serve`: a real tritonserver with one model per engine, from preflight to a clean end."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Mapping, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import NamedTuple

import hemiola
from hemiola.runtime import manifest
from hemiola.runtime.errors import Refused

# Asks the kernel to kill the server if we end without stopping it, and becomes the server.
LAUNCH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
HELP = {"http": "--http-port", "grpc": "--grpc-port", "metrics": "--metrics-port"}


class Triton(NamedTuple):
    """A tritonserver and what its Python backend needs for this interpreter."""

    server: Path
    backend: Path  # the folder of libtriton_python.so
    stub: Path


class Ports(NamedTuple):
    """0 means any free one."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002


ANY_PORTS = Ports(0, 0, 0)


def find_triton(server: Path | None = None) -> Triton:
    """The nvidia-pytriton wheel's tritonserver, or the given one; refuses what could only crash or hang later."""
    if server is None:
        package = util.find_spec("pytriton")  # found, not imported: that takes a second
        if package is None or not package.submodule_search_locations:
            raise Refused("tritonserver is not installed; pip install 'hemiola[serve]' or pass --tritonserver PATH")
        server = Path(package.submodule_search_locations[0]) / "tritonserver/bin/tritonserver"
    if not os.access(server, os.X_OK) or not server.is_file():
        raise Refused(f"{server} is not an executable file; pass --tritonserver PATH/bin/tritonserver")
    home = server.resolve().parent.parent
    backend = home / "backends/python"
    if not (backend / "libtriton_python.so").is_file():
        raise Refused(f"{backend} has no libtriton_python.so; pass a tritonserver with the Python backend")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    stubs = home / "python_backend_stubs"
    stub = (stubs / python if stubs.is_dir() else backend) / "triton_python_backend_stub"
    if not stub.is_file():
        have = ", ".join(sorted(path.name for path in stubs.glob("*"))) if stubs.is_dir() else "none"
        raise Refused(f"{home} has no Python backend stub for Python {python} (it has {have}); use one of these Pythons")
    return Triton(server, backend, stub)


def check_python(triton: Triton, environment: Mapping[str, str]) -> None:
    """The interpreter that the Python backend will embed must be this one, complete, with numpy 1."""
    numpy = metadata.version("numpy")
    if int(numpy.split(".")[0]) >= 2:
        raise Refused(f"numpy is {numpy}, tritonserver's Python backend needs numpy < 2; pip install 'numpy<2'")
    found = shutil.which("python3", path=environment["PATH"])
    if found is None or not os.path.samefile(found, sys.executable):
        raise Refused(f"python3 beside {sys.executable} is {found}, another interpreter; run hemiola from a venv")
    linked = subprocess.run(["ldd", str(triton.stub)], env=dict(environment), capture_output=True, text=True)
    missing = re.findall(r"(\S+) => not found", linked.stdout)
    if missing:
        names = ", ".join(missing)
        raise Refused(f"{triton.stub} does not find {names}; install it (Debian: apt install libpython3-dev) or add its folder to LD_LIBRARY_PATH")


def server_environment() -> dict[str, str]:
    """This environment, with this interpreter and its libpython first."""
    first = {"PATH": str(Path(sys.executable).parent), "LD_LIBRARY_PATH": str(sysconfig.get_config_var("LIBDIR"))}
    environment = dict(os.environ)
    for name, value in first.items():
        environment[name] = os.pathsep.join([value, *filter(None, [os.environ.get(name)])])
    return environment


def choose_ports(host: str, wanted: Ports) -> Ports:
    """Free ports, each checked by binding it; refuses one that is taken."""
    held: list[socket.socket] = []
    try:
        for name, port in wanted._asdict().items():
            held.append(_bind(host, port, name))
        return Ports(*(bound.getsockname()[1] for bound in held))
    finally:
        for bound in held:
            bound.close()


def _bind(host: str, port: int, name: str) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise Refused(f"{name} port {port} on {host} cannot be used ({reason}); pass {HELP[name]} with a free one, or 0") from None
    return bound


def write_repository(home: Path, triton: Triton, engines: Mapping[str, Path], options: Mapping[str, object]) -> None:
    """home/models for --model-repository, home/backends for --backend-directory, home/python to start in."""
    backend = home / "backends/python"
    backend.mkdir(parents=True)
    # Symlinks, because the libraries find each other beside their real place.
    for file in (triton.backend / "libtriton_python.so", triton.backend / "triton_python_backend_utils.py", triton.stub):
        (backend / file.name).symlink_to(file.resolve())
    # The backend's interpreter ignores PYTHONPATH, but its sys.path begins with the folder the server was started in.
    (home / "python").mkdir()
    (home / "python/hemiola").symlink_to(Path(hemiola.__file__).resolve().parent)
    source = find_model()
    template = (source / "config.pbtxt").read_text()
    added = "".join(_parameter(name, json.dumps(value)) for name, value in options.items())
    for name, engine_dir in engines.items():
        model = home / "models" / name
        model.mkdir(parents=True)
        (model / "1").symlink_to(source / "1")
        filled = template.replace('"${engine_dir}"', _quote(str(engine_dir.resolve())))
        (model / "config.pbtxt").write_text(filled + added)


def find_model() -> Path:
    """model_repo/hemiola of the checkout or of the installed package."""
    for home in hemiola.__path__:
        if (Path(home) / "model_repo/hemiola/config.pbtxt").is_file():
            return Path(home).resolve() / "model_repo/hemiola"
    raise Refused(f"no model_repo/hemiola in {list(hemiola.__path__)}; install hemiola again")


def _parameter(name: str, value: str) -> str:
    return f"parameters {{ key: {_quote(name)} value {{ string_value: {_quote(value)} }} }}\n"


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def name_engines(engine_dirs: Sequence[Path], names: Sequence[str]) -> dict[str, Path]:
    """Pairs --engine-dir with --model-name, in order; a single engine is called hemiola."""
    if not names and len(engine_dirs) == 1:
        names = ["hemiola"]
    if len(names) != len(engine_dirs):
        raise Refused(f"{len(engine_dirs)} --engine-dir but {len(names)} --model-name; give each engine a name")
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
            raise Refused(f"model name {name!r} cannot be a path in a URL; use letters, digits, '_', '-' and '.'")
    if len(set(names)) != len(names):
        raise Refused(f"model names {', '.join(names)} are not all different; give each engine its own")
    return dict(zip(names, engine_dirs, strict=True))


class Server:
    """A running tritonserver, as a context manager: ready when entered, drained and cleaned up when left."""

    def __init__(
        self,
        engines: Mapping[str, Path],  # model name -> engine directory
        *,
        host: str = "127.0.0.1",
        ports: Ports = ANY_PORTS,
        options: Mapping[str, object] | None = None,  # of LLM, the same for every engine
        tritonserver: Path | None = None,
        log_verbose: bool = False,
        start_timeout_s: float = 300,
        exit_timeout_s: int = 30,
    ) -> None:
        self.engines = dict(engines)
        self.host = host
        self._wanted = ports
        self._options = options or {}
        self._tritonserver = tritonserver
        self._log_verbose = log_verbose
        self._start_timeout_s = start_timeout_s
        self._exit_timeout_s = exit_timeout_s
        self._process: subprocess.Popen[str] | None = None
        self._home: Path | None = None

    @property
    def http_url(self) -> str:
        return f"http://{self._reachable}:{self.ports.http}"

    @property
    def grpc_url(self) -> str:
        return f"{self._reachable}:{self.ports.grpc}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self._reachable}:{self.ports.metrics}/metrics"

    @property
    def _reachable(self) -> str:
        return "127.0.0.1" if self.host == "0.0.0.0" else self.host

    def __enter__(self) -> "Server":
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when every model answers; raises Refused with the reason when one will not."""
        for engine_dir in self.engines.values():
            manifest.load(engine_dir)
        triton = find_triton(self._tritonserver)
        environment = server_environment()
        check_python(triton, environment)
        self.ports = choose_ports(self.host, self._wanted)
        self._home = Path(tempfile.mkdtemp(prefix="hemiola-serve-"))
        write_repository(self._home, triton, self.engines, self._options)
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(os.getpid()), *self._command(triton)],
            env=environment,
            cwd=self._home / "python",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for us; we forward it once
        )
        self._log = Log(self._process, self._log_verbose)
        self._await_ready()

    def _command(self, triton: Triton) -> list[str]:
        return [
            str(triton.server),
            f"--model-repository={self._home}/models",
            f"--backend-directory={self._home}/backends",
            f"--backend-config=python,shm-region-prefix-name={self._shm_prefix}",
            "--disable-auto-complete-config",
            f"--http-address={self.host}",
            f"--http-port={self.ports.http}",
            f"--grpc-address={self.host}",
            f"--grpc-port={self.ports.grpc}",
            f"--metrics-address={self.host}",
            f"--metrics-port={self.ports.metrics}",
            f"--exit-timeout-secs={self._exit_timeout_s}",
            f"--log-verbose={int(self._log_verbose)}",
        ]

    @property
    def _shm_prefix(self) -> str:
        return f"{self._home.name}-" if self._home else ""

    def _await_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._start_timeout_s
        while not self._is_ready():
            if self._process.poll() is not None:
                raise Refused(f"tritonserver did not start: {self._log.reason()}")
            if time.monotonic() > deadline:
                raise Refused(
                    f"tritonserver was not ready after {self._start_timeout_s:g} s (--start-timeout): {self._log.reason()}"
                )
            time.sleep(0.05)
        self._log.ready = True

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.http_url}/v2/health/ready", timeout=1) as answer:
                return answer.status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def wait(self) -> int:
        """Until the server ends by itself; its exit status."""
        assert self._process is not None
        return self._process.wait()

    def stop(self) -> None:
        """Streams in flight may finish for exit_timeout_s; raises RuntimeError when the server did not end well."""
        if self._process is None:
            return
        try:
            self._process.terminate()
            status = self._process.wait(self._exit_timeout_s + 10)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            self.kill()
        if status != 0:
            raise RuntimeError(f"tritonserver ended with {status}, not 0, within {self._exit_timeout_s} s of being asked")

    def kill(self) -> None:
        """At once, whatever is in flight; leaves no process, shared memory or files behind."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # the stub can outlive the server
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._home is not None:
            for region in Path("/dev/shm").glob(f"{self._shm_prefix}*"):
                region.unlink(missing_ok=True)
            shutil.rmtree(self._home)
            self._home = None


class Log:
    """The server's output, read in a thread: the errors among it are passed on once it is ready, all of it if verbose."""

    def __init__(self, process: "subprocess.Popen[str]", verbose: bool) -> None:
        self.ready = False
        self._lines: deque[str] = deque(maxlen=200)
        self._process = process
        self._verbose = verbose
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            if self._verbose or (self.ready and not re.match(r"[IW]\d{4} |Signal \(", line)):
                sys.stderr.write(line)

    def reason(self) -> str:
        """Why it did not start: what a model said, else the last error, else the last line."""
        lines = [line.strip() for line in self._lines if line.strip()]
        for pattern in (r"TritonModelException: (.*?)(?:\\n|\"?$)", r"E\d{4} .*?\] (.*)"):
            found = [match.group(1) for line in lines if (match := re.search(pattern, line))]
            if found:
                return found[-1]
        return lines[-1] if lines else "it said nothing"
