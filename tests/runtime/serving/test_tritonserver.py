"""Everything that would let tritonserver crash or hang is refused before it starts."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from kit.refused import code_and_field

from hemiola.runtime.errors import Refused
from hemiola.runtime.serving import tritonserver
from hemiola.runtime.serving.ports import ANY_PORTS, Ports, address_of, choose_ports
from hemiola.runtime.serving.tritonserver import (
    check_python,
    find_model_folder,
    find_triton,
    server_environment,
    write_repository,
)

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A tritonserver as the wheel has it, with empty files."""
    for name in (
        "backends/python/libtriton_python.so",
        f"python_backend_stubs/{PYTHON}/triton_python_backend_stub",
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    (tmp_path / "python_backend_stubs/2.7").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/tritonserver").touch(mode=0o755)
    return tmp_path


def test_the_wheels_tritonserver_is_found_whole() -> None:
    triton = find_triton()
    assert os.access(triton.server, os.X_OK) and os.access(triton.stub, os.X_OK)
    check_python(triton, server_environment())


def test_a_tritonserver_of_ones_own(home: Path) -> None:
    assert find_triton(home / "bin/tritonserver").stub.parent.name == PYTHON


def test_a_container_has_its_stub_in_the_backend(home: Path) -> None:
    stub = home / "backends/python/triton_python_backend_stub"
    stub.touch()
    shutil.rmtree(home / "python_backend_stubs")
    assert find_triton(home / "bin/tritonserver").stub == stub


def test_what_is_missing_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = home / "bin/tritonserver"
    shutil.rmtree(home / "python_backend_stubs" / PYTHON)
    with pytest.raises(Refused, match=rf"has no stub for Python {PYTHON} \(it has 2\.7\)"):
        find_triton(server)
    shutil.rmtree(home / "backends")
    with pytest.raises(Refused, match=r"has no libtriton_python\.so"):
        find_triton(server)
    with pytest.raises(Refused, match="nothing is not an executable file"):
        find_triton(home / "nothing")
    monkeypatch.setattr(tritonserver.util, "find_spec", lambda name: None)
    with pytest.raises(Refused, match=r"pip install -e '.*\[serve\]'"):
        find_triton()


def test_numpy_2_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tritonserver.metadata, "version", lambda name: "2.3.1")
    with pytest.raises(Refused, match=r"numpy is 2\.3\.1, .* pip install 'numpy<2'"):
        check_python(find_triton(home / "bin/tritonserver"), server_environment())


def test_another_python3_beside_this_one_is_refused(home: Path, tmp_path: Path) -> None:
    other = tmp_path / "other/python3"
    other.parent.mkdir()
    other.touch(mode=0o755)
    environment = server_environment() | {"PATH": str(other.parent)}
    with pytest.raises(Refused, match=r"other/python3, another interpreter"):
        check_python(find_triton(home / "bin/tritonserver"), environment)


def test_a_missing_libpython_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "\tlibpython3.11.so.1.0 => not found\n\tlibc.so.6 => /lib/libc.so.6 (0x1)\n"
    monkeypatch.setattr(tritonserver.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=said))
    with pytest.raises(Refused, match=r"does not find libpython3\.11\.so\.1\.0; install it"):
        check_python(find_triton(home / "bin/tritonserver"), server_environment())


def test_ports_are_free_and_different() -> None:
    host = "127.77.7.7"  # where no neighbour takes a port between two looks
    ports = choose_ports(host, ANY_PORTS)
    assert len(set(ports)) == 3 and all(ports)
    assert choose_ports(host, ports) == ports
    wrong = [
        (ports, "in_use", "metrics_port"),
        (Ports(ports.http, ports.http, 0), "in_use", "grpc_port"),
        (Ports(70000, 0, 0), "out_of_range", "http_port"),
    ]
    with socket.create_server((host, ports.metrics)):
        for asked, code, field in wrong:
            assert code_and_field(lambda asked=asked: choose_ports(host, asked)) == (code, field)


def test_an_address_is_itself_and_a_name_is_its_address() -> None:
    assert address_of("localhost") == "127.0.0.1"
    for address in ("127.0.0.1", "127.77.7.7", "0.0.0.0"):
        assert address_of(address) == address


def test_the_repository_holds_each_engine_under_its_name(home: Path, tmp_path: Path) -> None:
    models = {
        "a": {"engine_dir": 'quote" and \\ é', "max_len": "auto"},
        "b": {"engine_dir": "b", "max_rows": 4},
    }
    out = tmp_path / "out"
    write_repository(out, find_triton(home / "bin/tritonserver"), models)
    for name, settings in models.items():
        folder = out / "models" / name
        assert json.loads((folder / "1/model.json").read_text()) == settings
        assert (folder / "1/model.py").samefile(find_model_folder() / "1/model.py")
        assert (folder / "config.pbtxt").samefile(find_model_folder() / "config.pbtxt")
    assert (out / "backends/python/libtriton_python.so").is_symlink(), "its RPATH starts from its real place"


@pytest.mark.parametrize("key", ["", "SECRET"])
def test_a_load_over_http_is_answered_500_where_nobody_may_load(key: str) -> None:
    over_http, *over_grpc = tritonserver.locked(key)
    assert over_http.startswith("--http-restricted-api=shared-memory,trace,logging,model-repository:")
    of_models = [option for option in over_grpc if "=model-repository:" in option]
    assert of_models == ([f"--grpc-restricted-protocol=model-repository:hemiola-key={key}"] if key else [])


def test_the_backends_python_imports_this_hemiola(home: Path, tmp_path: Path) -> None:
    """It runs isolated, without PYTHONPATH, in the folder where the server was started."""
    write_repository(tmp_path / "out", find_triton(home / "bin/tritonserver"), {})
    code = "import sys; sys.path.insert(0, ''); import hemiola.runtime.errors as e; print(e.__file__)"
    command = [sys.executable, "-I", "-c", code]
    found = subprocess.run(command, cwd=tmp_path / "out/python", capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).samefile(sys.modules["hemiola.runtime.errors"].__file__)
