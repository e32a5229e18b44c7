"""An engine opens on the device that it was built for, and says how to build another."""

from pathlib import Path

import pytest
import torch

from hemiola.runtime.device.find import find_device
from hemiola.runtime.errors import Refused

HERE = Path("engine")
ELSEWHERE = (
    "open it on a machine with such a GPU, or run build-engine CHECKPOINT --engine-dir ANOTHER --arch "
)


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    """A GPU of this compute capability, or none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA X")


def refusal(arch: str) -> str:
    with pytest.raises(Refused) as caught:
        find_device(HERE, arch)
    return str(caught.value)


@pytest.mark.parametrize("capability", [None, (9, 0)])
def test_an_engine_for_a_cpu_opens_everywhere(
    capability: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, capability)
    assert find_device(HERE, "cpu") == torch.device("cpu")


def test_an_engine_for_a_gpu_needs_one_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (9, 0))
    assert find_device(HERE, "sm_90") == torch.device("cuda", 0)
    pretend(monkeypatch, None)
    assert refusal("sm_90") == (
        "engine was built for sm_90 (compute capability 9.0), but torch finds no CUDA device here;"
        f" {ELSEWHERE}cpu"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "no CUDA device here (CUDA_VISIBLE_DEVICES is '7'); open it" in refusal("sm_90")
    for found, arch in (((12, 1), "sm_121"), ((8, 6), "sm_86")):
        pretend(monkeypatch, found)
        assert refusal("sm_90") == (
            f"engine was built for sm_90 (compute capability 9.0), but NVIDIA X has {found[0]}.{found[1]};"
            f" {ELSEWHERE}{arch}"
        )


def test_a_gpu_that_nothing_is_built_for_leaves_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (7, 0))
    assert refusal("sm_90").endswith(f"but NVIDIA X has 7.0; {ELSEWHERE}cpu")


@pytest.mark.parametrize("arch", ["sm_90", "sm_89,sm_120"])
@pytest.mark.parametrize("capability", [None, (8, 0)])
def test_the_way_out_does_not_replace_the_engine(
    arch: str, capability: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is whole, and opens elsewhere."""
    pretend(monkeypatch, capability)
    said = refusal(arch)
    assert f"--engine-dir {HERE}" not in said and "--engine-dir ANOTHER" in said


def test_an_architecture_of_a_later_version_is_named() -> None:
    assert refusal("sm_130").startswith("engine was built for sm_130, known are cpu, sm_80,")
