"""What `hemiola dynamo-worker` refuses before it opens an engine: each in one line."""

import os
import socket
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from kit.cluster import free_port

from hemiola.runtime.dynamo import worker

Command = Callable[..., SimpleNamespace]


def refused(hemiola: Command, engine_dir: Path, *options: str) -> str:
    ended = hemiola("dynamo-worker", engine_dir, *options)
    assert ended.status == 2 and ended.out == "" and ended.err.count("\n") == 1, ended
    return ended.err


def test_without_ai_dynamo_the_extra_is_named(
    hemiola: Command, engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    line = refused(hemiola, engine_dir)
    assert "needs ai-dynamo-runtime, which is not installed" in line and "[dynamo]" in line


def test_another_version_of_ai_dynamo_is_refused_by_its_number(
    hemiola: Command, engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(util, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(metadata, "version", lambda name: "1.7.0")
    assert "ai-dynamo-runtime is 1.7.0, workers are written for 1.6" in refused(hemiola, engine_dir)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_workers_that_hand_prompts_over_need_memory_of_the_host_and_nixl(
    hemiola: Command, engine_dir: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(worker, "load_binding", lambda: None)
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    options = ("--disaggregation-mode", mode)
    assert f"--disaggregation-mode {mode} needs --host-cache-bytes" in refused(hemiola, engine_dir, *options)
    line = refused(hemiola, engine_dir, *options, "--host-cache-bytes", "16777216")
    assert f"--disaggregation-mode {mode} needs nixl, which is not installed" in line


def test_a_mode_that_is_none_is_refused_with_those_there_are(hemiola: Command, engine_dir: Path) -> None:
    line = refused(hemiola, engine_dir, "--disaggregation-mode", "both")
    assert "agg" in line and "prefill" in line and "decode" in line


def test_a_system_port_that_is_taken_is_refused_before_the_engine_opens(
    hemiola: Command, engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo's own worker goes on without /health then."""
    monkeypatch.setattr(worker, "load_binding", lambda: None)
    monkeypatch.setenv("DYN_SYSTEM_HOST", "127.0.0.1")
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        monkeypatch.setenv("DYN_SYSTEM_PORT", str(port))
        line = refused(hemiola, engine_dir)
    assert f"DYN_SYSTEM_PORT: cannot listen on 127.0.0.1:{port}" in line and "choose another port" in line


def test_a_store_that_cannot_be_written_is_refused_before_the_engine_opens(
    hemiola: Command, engine_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(worker, "load_binding", lambda: None)
    monkeypatch.setattr(worker, "make_card", Mock(side_effect=AssertionError))
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")
    (tmp_path / "store").touch()
    for name in ("store", "store/below"):
        monkeypatch.setenv("DYN_FILE_KV", str(tmp_path / name))
        line = refused(hemiola, engine_dir)
        assert f"DYN_FILE_KV: {tmp_path / name} cannot be written" in line and "name a folder" in line
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path / "mine"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "cannot be written (Permission denied)" in refused(hemiola, engine_dir)
