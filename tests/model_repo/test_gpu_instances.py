"""Instances of KIND_GPU in a real tritonserver, which a CUDA runtime of ours tells of two GPUs.

No engine can run on these.
"""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from hemiola.runtime import manifest
from hemiola.runtime.errors import Refused
from hemiola.runtime.serving import tritonserver
from hemiola.runtime.serving.launcher import Server

FAKE = Path(__file__).resolve().parents[1] / "kit/fake_cudart.c"

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_serving.py has real ones"),
]


@pytest.fixture
def engine_dir(engine_dirs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That says it is for GPUs, where two are said to be."""
    library = tmp_path / "libfake_cudart.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, FAKE], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("FAKE_GPUS", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    shutil.copytree(engine_dirs["hemiola"], tmp_path / "engine")
    manifest.load(tmp_path / "engine").model_copy(update={"arch": "sm_90"}).write(tmp_path / "engine")
    return tmp_path / "engine"


def reason(engine_dir: Path, device: int) -> str:
    server = Server({"hemiola": engine_dir}, options={"device": device}, start_timeout_s=600)
    with pytest.raises(Refused) as caught, server:
        pass
    return str(caught.value)


def test_an_instance_sees_the_gpu_that_it_was_given(engine_dir: Path) -> None:
    said = reason(engine_dir, 1)
    assert "was built for sm_90" in said and "(CUDA_VISIBLE_DEVICES is '1')" in said, said


def test_an_instance_on_each_gpu_is_refused(engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = "instance_group [ { kind: KIND_GPU gpus: [ 0, 1 ] } ]"
    monkeypatch.setattr(tritonserver, "group_of", lambda device: both)
    assert "instance_group asks for 2 instances, and an engine has one" in reason(engine_dir, 0)


def test_a_gpu_that_only_torch_knows_is_refused_by_triton(
    engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_GPUS", "1")
    assert "invalid or unsupported gpu id 1" in reason(engine_dir, 1)
