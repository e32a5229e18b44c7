"""An engine opens on the device that it was built for, and says how to build another."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from hemiola.runtime.arch import VISIBLE, visible_from
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


class Gpu(NamedTuple):
    name: str
    total_memory: int


X, Y = Gpu("NVIDIA X", 80 * 2**30), Gpu("NVIDIA X", 40 * 2**30)


@pytest.mark.parametrize(
    ("gpus", "reached", "said"),
    [
        ([X], True, "engine was built with --tp 2, for as many GPUs, but torch finds 1 here; open it where"),
        (
            [X, Y],
            True,
            "needs 2 equal GPUs, but GPU 0 is NVIDIA X with 80.0 GiB and GPU 1 is NVIDIA X with 40.0",
        ),
        (
            [X, X],
            False,
            "needs GPUs that reach each other's memory, but GPU 0 cannot reach GPU 1; name others",
        ),
        ([X, X, Y], True, ""),
    ],
    ids=["one", "unequal", "apart", "two and another"],
)
def test_ranks_have_equal_gpus_that_reach_each_other(
    monkeypatch: pytest.MonkeyPatch, gpus: list[Gpu], reached: bool, said: str
) -> None:
    pretend(monkeypatch, (9, 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: reached)
    if not said:
        assert find_device(HERE, "sm_90", 2) == torch.device("cuda", 0)
        return
    with pytest.raises(Refused) as caught:
        find_device(HERE, "sm_90", 2)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_follower_sees_its_own_gpu_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all others, whose memory it reaches."""
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [visible_from(rank) for rank in (0, 1, 3)] == ["0,1,2,3", "1,2,3,0", "3,0,1,2"]
    monkeypatch.setenv(VISIBLE, "5, GPU-1f")
    assert visible_from(1) == "GPU-1f,5"
