"""What a tritonserver needs before it starts: its parts, its interpreter, a model repository."""

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Mapping
from importlib import metadata, util
from pathlib import Path
from typing import NamedTuple

import hemiola
from hemiola.runtime.errors import Refused
from hemiola.runtime.extra import install
from hemiola.runtime.serving import arrival
from hemiola.runtime.serving.home import Home
from hemiola.runtime.serving.model_folder import find_model_folder
from hemiola.runtime.serving.options import MOST_SECONDS
from hemiola.runtime.serving.place import ANYWHERE, group_of
from hemiola.runtime.serving.ports import Ports
from hemiola.runtime.serving.settings import FILE as SETTINGS_FILE

KEY_HEADER = "hemiola-key"
LATER_S = 60  # than our exit timeout is its own: of what it cuts, it says nothing that helps
UNSENDABLE = 2**15  # characters; gRPC takes headers of 16 KB at most, our guard of HTTP lines of 8,000 bytes
# Asks the kernel to kill the server if we end without stopping it, and becomes the server.
LAUNCH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class Triton(NamedTuple):
    """A tritonserver and what its Python backend needs for this interpreter."""

    server: Path
    backend: Path  # the folder of libtriton_python.so
    stub: Path


class Switches(NamedTuple):
    """What a tritonserver is started with, besides its folders and ports."""

    engines: Collection[str]
    grpc_host: str
    control_key: str  # who has it may load and unload models; "": nobody
    exit_timeout_s: int
    log_verbose: bool


def command_line(triton: Triton, home: Home, ports: Ports, switches: Switches) -> list[str]:
    key = switches.control_key
    return [
        str(triton.server),
        f"--model-repository={home.path}/models",
        f"--backend-directory={home.path}/backends",
        f"--backend-config=python,shm-region-prefix-name={home.shm_prefix}",
        "--disable-auto-complete-config",
        *locked(key),
        *(["--model-control-mode=explicit"] if key else []),
        *([f"--load-model={name}" for name in switches.engines] if key else []),
        f"--http-address=unix:{home.doors / 'http'}",
        f"--http-port={ports.http}",
        f"--grpc-address={switches.grpc_host}",
        f"--grpc-port={ports.grpc}",
        f"--http-header-forward-pattern={arrival.NAME}",
        f"--metrics-address=unix:{home.doors / 'metrics'}",
        f"--metrics-port={ports.metrics}",
        f"--exit-timeout-secs={min(switches.exit_timeout_s + LATER_S, MOST_SECONDS)}",
        f"--log-verbose={int(switches.log_verbose)}",
    ]


def find_triton(server: Path | None = None) -> Triton:
    """The nvidia-pytriton wheel's tritonserver, or the given one; refuses what would crash or hang."""
    if server is None:
        package = util.find_spec("pytriton")  # found, not imported: that takes a second
        if package is None or not package.submodule_search_locations:
            message = "tritonserver is not installed"
            raise Refused(
                "not_found", message=message, way_out=f"{install('serve')} or pass --tritonserver PATH"
            )
        server = Path(package.submodule_search_locations[0]) / "tritonserver/bin/tritonserver"
    if not os.access(server, os.X_OK) or not server.is_file():
        message = f"{server} is not an executable file"
        raise Refused("not_found", message=message, way_out="pass --tritonserver PATH/bin/tritonserver")
    home = server.resolve().parent.parent
    backend = home / "backends/python"
    if not (backend / "libtriton_python.so").is_file():
        message = f"{backend} has no libtriton_python.so"
        raise Refused("not_found", message=message, way_out="pass a tritonserver with the Python backend")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    stubs = home / "python_backend_stubs"
    stub = (stubs / python if stubs.is_dir() else backend) / "triton_python_backend_stub"
    if not stub.is_file():
        have = ", ".join(sorted(path.name for path in stubs.glob("*"))) if stubs.is_dir() else "none"
        message = f"{home} has no stub for Python {python} (it has {have})"
        raise Refused("unsupported", message=message, way_out="use one of these Pythons")
    return Triton(server, backend, stub)


def check_python(triton: Triton, environment: Mapping[str, str]) -> None:
    """The interpreter that the Python backend will embed must be this one, complete, with numpy 1."""
    numpy = metadata.version("numpy")
    if int(numpy.split(".")[0]) >= 2:
        message = f"numpy is {numpy}, tritonserver's Python backend needs numpy < 2"
        raise Refused("unsupported", message=message, way_out="pip install 'numpy<2'")
    python = shutil.which("python3", path=environment["PATH"])
    if python is None or not os.path.samefile(python, sys.executable):
        message = f"python3 beside {sys.executable} is {python}, another interpreter"
        raise Refused("unsupported", message=message, way_out="run hemiola from a venv")
    linked = subprocess.run(["ldd", str(triton.stub)], env=dict(environment), capture_output=True, text=True)
    missing = re.findall(r"(\S+) => not found", linked.stdout)
    if missing:
        message = f"{triton.stub} does not find {', '.join(missing)}"
        way_out = "install it (Debian: apt install libpython3-dev) or add its folder to LD_LIBRARY_PATH"
        raise Refused("not_found", message=message, way_out=way_out)


def locked(control_key: str) -> list[str]:
    """Options: nobody reaches into the server's memory and files, and only the key's owner loads models.

    Over gRPC: a load that came over HTTP holds one of its threads, and loses what that thread's event streams
    have to say meanwhile, their ends included.

    Everybody on the machine can read a command line, and who may register shared memory reaches what the user
    has there. So nobody's key is one that no request can bring.
    """
    names, nobody = "shared-memory,trace,logging", f"{KEY_HEADER}={secrets.token_hex(UNSENDABLE // 2)}"
    own = f"--grpc-restricted-protocol=model-repository:{KEY_HEADER}={control_key}"
    return [
        f"--http-restricted-api={names},model-repository:{nobody}",
        f"--grpc-restricted-protocol={names}:{nobody}",
        *([own] if control_key else []),
    ]


def server_environment() -> dict[str, str]:
    """This environment, with this interpreter and its libpython first."""
    libraries = str(sysconfig.get_config_var("LIBDIR"))
    first = {"PATH": str(Path(sys.executable).parent), "LD_LIBRARY_PATH": libraries}
    environment = dict(os.environ)
    for name, value in first.items():
        environment[name] = os.pathsep.join([value, *filter(None, [os.environ.get(name)])])
    return environment


def write_repository(home: Path, triton: Triton, models: Mapping[str, Mapping[str, object]]) -> None:
    """home/models for --model-repository, home/backends for --backend-directory, home/python to start in.

    models: the settings of each (settings.py), `device` among them where it is a GPU.
    """
    backend = home / "backends/python"
    backend.mkdir(parents=True)
    # Symlinks, because the libraries find each other beside their real place.
    parts = [triton.backend / name for name in ("libtriton_python.so", "triton_python_backend_utils.py")]
    for file in [*parts, triton.stub]:
        (backend / file.name).symlink_to(file.resolve())
    # The backend's interpreter ignores PYTHONPATH, but its sys.path begins with the server's folder.
    (home / "python").mkdir()
    (home / "python/hemiola").symlink_to(Path(hemiola.__file__).resolve().parent)
    source = find_model_folder()
    for name, settings in models.items():
        model = home / "models" / name
        (model / "1").mkdir(parents=True)
        (model / "1/model.py").symlink_to(source / "1/model.py")
        _write_config(source / "config.pbtxt", model / "config.pbtxt", settings.get("device"))
        (model / "1" / SETTINGS_FILE).write_text(json.dumps(settings, indent=2))


def _write_config(source: Path, target: Path, device: object) -> None:
    if device is None:
        target.symlink_to(source)
        return
    config = source.read_text()
    assert ANYWHERE in config, source
    target.write_text(config.replace(ANYWHERE, group_of(device)))
