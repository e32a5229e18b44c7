"""Which GPU a served engine gets, and what Triton's instance groups may not ask for."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from hemiola.runtime.errors import Refused
from hemiola.runtime.outline import FILE
from hemiola.runtime.serving import launcher
from hemiola.runtime.serving.launcher import Server
from hemiola.runtime.serving.place import (
    FRACTION,
    VISIBLE,
    check_instances,
    check_place,
    choose_gpu,
    ranks_of,
    share_memory,
    take_place,
)
from hemiola.runtime.serving.tritonserver import find_triton, write_repository


def checked(
    monkeypatch: pytest.MonkeyPatch, archs: dict[str, str], num_gpus: int = 2, **settings_of: dict
) -> dict[str, dict]:
    """Settings of models with engines for these architectures, as their processes get them."""
    monkeypatch.setattr(launcher.outline, "load", lambda path: SimpleNamespace(arch=archs[path.name], tp=1))
    monkeypatch.setattr(launcher, "check_sizes", lambda *_: None)  # such a manifest has none
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    server = Server({name: Path(name) for name in archs}, settings_of=settings_of)
    server.check()
    return server._settings


def test_an_engine_for_a_gpu_is_an_instance_of_that_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    archs = {"a": "sm_90", "b": "sm_90,sm_80", "c": "cpu"}
    found = checked(monkeypatch, archs, b={"device": 1})
    write_repository(tmp_path / "home", find_triton(), found)
    for name, kind, gpus in (("a", "GPU", [0]), ("b", "GPU", [1]), ("c", "MODEL", [])):
        text = (tmp_path / f"home/models/{name}/config.pbtxt").read_text()
        (group,) = text_format.Parse(text, model_config_pb2.ModelConfig()).instance_group
        assert model_config_pb2.ModelInstanceGroup.Kind.Name(group.kind) == f"KIND_{kind}"
        assert (group.count, list(group.gpus)) == (1, gpus)


def test_engines_that_open_at_once_on_one_gpu_do_not_each_take_half_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = {"b": {"device": 1}, "d": {"memory_fraction": 0.9}}
    found = checked(monkeypatch, dict.fromkeys("abcd", "sm_90"), **own)
    shares = {name: (one["device"], round(one["memory_fraction"], 3)) for name, one in found.items()}
    assert shares == {"a": (0, 0.167), "b": (1, 0.5), "c": (0, 0.167), "d": (0, 0.9)}


@pytest.mark.parametrize(
    ("arch", "num_gpus", "device", "reason"),
    [
        (
            "sm_90",
            0,
            None,
            "a was built for sm_90 and is to run on GPU 0, but 0 GPUs .* --engine-dir ANOTHER --arch cpu",
        ),
        (
            "sm_90",
            2,
            2,
            r"run on GPU 2, but 2 GPUs are visible here \(CUDA_VISIBLE_DEVICES is '4,5'\); choose",
        ),
        ("cpu", 2, 0, "device is 0, but a was built for cpu; leave it out"),
        ("sm_90", 2, -1, "device is -1; give at least 0"),
    ],
)
def test_a_gpu_that_there_is_not_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, arch: str, num_gpus: int, device: int | None, reason: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(Refused, match=reason):
        checked(monkeypatch, {"a": arch}, num_gpus, **({} if device is None else {"a": {"device": device}}))


@pytest.mark.parametrize(
    ("named", "number", "device", "seen"),
    [(None, 2, None, "2"), ("3, GPU-1f", 1, None, "GPU-1f"), ("3,5", 1, 1, "5")],
)
def test_an_engine_sees_the_gpu_of_its_instance_alone(
    monkeypatch: pytest.MonkeyPatch, named: str | None, number: int, device: int | None, seen: str
) -> None:
    monkeypatch.setenv(VISIBLE, named or "")  # put back afterwards
    if named is None:
        monkeypatch.delenv(VISIBLE)
    take_place("MODEL", 0, None)
    assert os.environ.get(VISIBLE) == named
    take_place("GPU", number, device)
    assert os.environ[VISIBLE] == seen


@pytest.mark.parametrize(("named", "seen"), [(None, "2,3"), ("7,6,GPU-1f, 4", "GPU-1f,4")])
def test_an_engine_of_two_ranks_sees_two_gpus(
    monkeypatch: pytest.MonkeyPatch, named: str | None, seen: str
) -> None:
    monkeypatch.setenv(VISIBLE, named or "")
    if named is None:
        monkeypatch.delenv(VISIBLE)
    take_place("GPU", 2, None, 2)
    assert os.environ[VISIBLE] == seen
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 2, raising=False)
    check_place("e", "sm_90", "GPU", 2)


@pytest.mark.parametrize(
    ("content", "num"),
    [('{"tp": 4}', 4), ("{}", 1), ('{"tp": null}', 1), ('{"tp": 1000000000}', 1), ("[" * 100_000, 1)],
)
def test_ranks_are_counted_before_an_engine_opens(tmp_path: Path, content: str, num: int) -> None:
    """Of what is no engine nobody knows; opening refuses it."""
    (tmp_path / FILE).write_text(content)
    assert ranks_of(str(tmp_path)) == num and ranks_of(str(tmp_path / "none")) == 1


@pytest.mark.parametrize("kind", ["pipe", "sparse"])
def test_a_manifest_that_is_a_pipe_or_endless_is_read(tmp_path: Path, kind: str) -> None:
    path, found = tmp_path / FILE, []
    if kind == "pipe":
        os.mkfifo(path)
    else:
        with path.open("wb") as file:
            file.truncate(2**42)
    counting = threading.Thread(target=lambda: found.append(ranks_of(str(tmp_path))), daemon=True)
    counting.start()
    counting.join(60)
    if counting.is_alive():
        os.close(os.open(path, os.O_RDWR))
    assert found == [1]


def test_engines_that_share_some_of_their_gpus_share_memory() -> None:
    models: list[dict[str, Any]] = [{"device": 0}, {"device": 1}, {"device": 3}, {"device": None}]
    share_memory(models, [2, 2, 1, 1])
    assert [found["memory_fraction"] / FRACTION for found in models] == [0.5, 0.5, 1.0, 1.0]


def test_a_server_with_too_few_gpus_for_the_ranks_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert choose_gpu(Path("e"), "sm_90", 2, 2) == 2
    with pytest.raises(
        Refused, match=r"GPUs 3 to 4 \(--tp 2\), but 4 GPUs are visible here.* a lower device"
    ):
        choose_gpu(Path("e"), "sm_90", 3, 2)
    with pytest.raises(Refused, match=r"GPUs 0 to 7 \(--tp 8\).* rebuild with a lower --tp"):
        choose_gpu(Path("e"), "sm_90", None, 8)


@pytest.mark.parametrize(
    ("kind", "device", "reason"),
    [
        ("GPU", 0, r"device is 0, but .* KIND_GPU 1; .* gpus: \[ 0 \]"),
        ("MODEL", 1, r"device is 1, but .* KIND_MODEL 1; .* KIND_GPU count: 1 gpus: \[ 1 \]"),
    ],
)
def test_settings_and_instance_that_contradict_each_other_are_refused(
    kind: str, device: int, reason: str
) -> None:
    with pytest.raises(Refused, match=reason):
        take_place(kind, 1, device)


@pytest.mark.parametrize(("count", "gpus"), [(2, []), (2, [1]), (1, [0, 1]), (0, [])])
def test_an_engine_is_one_instance(count: int, gpus: list[int]) -> None:
    check_instances([{"count": 1, "gpus": gpus[:1]}])
    with pytest.raises(
        Refused, match=f"asks for {count * max(1, len(gpus))} instances, and an engine has one"
    ):
        check_instances([{"count": count, "gpus": gpus}])


@pytest.mark.parametrize(
    ("arch", "kind", "num_gpus", "reason"),
    [
        ("cpu", "GPU", 1, "e was built for cpu, but its instance_group is KIND_GPU; write KIND_MODEL"),
        ("sm_90", "CPU", 1, "e was built for sm_90, but its instance_group is KIND_CPU; write KIND_GPU"),
        ("sm_90", "GPU", 4, "CUDA was called before CUDA_VISIBLE_DEVICES could name the engine's GPU"),
    ],
)
def test_an_engine_that_is_not_where_its_instance_is_is_refused(
    monkeypatch: pytest.MonkeyPatch, arch: str, kind: str, num_gpus: int, reason: str
) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: num_gpus, raising=False)
    for right, own in (("cpu", "CPU"), ("cpu", "MODEL"), ("sm_90", "MODEL")):
        check_place("e", right, own)
    with pytest.raises(Refused, match=reason):
        check_place("e", arch, kind)
