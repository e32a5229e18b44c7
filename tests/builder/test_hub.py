"""build-engine NAME: from a Hub on loopback, by the real huggingface_hub."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import close_session, constants, file_download, get_session, set_client_factory
from huggingface_hub import hf_hub_download as hub_download
from huggingface_hub.utils._http import default_client_factory
from kit import checkpoints
from kit.fake_hub import TOKEN, FakeHub, commit_of
from kit.stages import without_stages

from hemiola.builder import hub as hub_door
from hemiola.builder.build import Options, build
from hemiola.runtime import manifest
from hemiola.runtime.errors import Refused
from hemiola.runtime.progress import FETCHING, HASHING_CHECKPOINT

ROOT = Path(__file__).resolve().parents[2]
NAME = "Own/Tiny-0.1B"
SMALL = {"max_len": 64, "max_rows": 1, "drafts": "none"}
OTHER_FILES = (
    "pytorch_model.bin",
    "tiny.gguf",
    "model.pth",
    "consolidated.safetensors",
    "README.md",
    "vocab.json",
)
Connect = Callable[..., FakeHub]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in two shards, and what repositories have beside one."""
    made = checkpoints.make("qwen3_5", tmp_path_factory.mktemp("hub") / "tiny", shards=2)
    for name in OTHER_FILES:
        (made / name).write_bytes(b"x")
    return made


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Beside an empty cache, without a token."""
    with FakeHub({NAME: folder}) as found:
        template = found.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in {
            "ENDPOINT": found.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": template,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        monkeypatch.chdir(tmp_path)
        yield found


def fetch(name: str = NAME, revision: str | None = None) -> hub_door.Origin:
    origin = hub_door.locate(Path(name), revision, lambda *_: None)
    hub_door.fetch_weights(origin, lambda *_: None)
    return origin


def needed(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {*OTHER_FILES}


def test_a_name_gives_the_engine_of_its_folder_and_what_it_does_not_need_stays_there(
    hub: FakeHub, folder: Path, tmp_path: Path
) -> None:
    reports: list[tuple[str, int, int]] = []
    made = build(Path(NAME), tmp_path / "a", Options(**SMALL), lambda *r: reports.append(r))
    assert (made.repo, made.commit) == (NAME, commit_of(NAME, "main"))
    assert hub.fetched() == needed(folder)
    assert made.sha256 == build(folder, tmp_path / "b", Options(**SMALL)).sha256
    counts = [(done, total) for stage, done, total in reports if stage == FETCHING]
    weights = sum(path.stat().st_size for path in folder.glob("model-*"))
    assert (weights, weights) == counts[-1] and len({total for _, total in counts}) == 2
    assert all(0 < done <= total for done, total in counts)

    hub.asked.clear()
    again = build(Path(NAME), tmp_path / "c", Options(revision="v1", **SMALL))
    assert (again.commit, again.sha256) == (commit_of(NAME, "v1"), made.sha256)
    assert not {name for name in hub.fetched() if name.startswith("model-0")}, "blobs of the cache are used"
    assert manifest.load(tmp_path / "c").commit == again.commit


def test_random_weights_need_no_weights_of_the_hub(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    build(Path(NAME), tmp_path / "engine", Options(random_weights=True, **SMALL))
    assert hub.fetched() == {name for name in needed(folder) if not name.startswith("model-0")}


def test_a_folder_of_the_name_comes_before_the_hub(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "Own").mkdir()
    (tmp_path / NAME).symlink_to(folder)
    made = build(Path(NAME), tmp_path / "engine", Options(**SMALL))
    assert (made.repo, made.commit, hub.asked) == ("", "", [])
    with pytest.raises(Refused, match=f"--revision v1 is for a name on the Hub, but {NAME} is a folder here"):
        build(Path(NAME), tmp_path / "other", Options(revision="v1", **SMALL))


def test_the_command_reads_the_environment_and_refuses_before_it_fetches_weights(
    hub: FakeHub, folder: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    config = (other / "config.json").read_text().replace("Qwen3_5ForCausalLM", "LlamaForCausalLM")
    (other / "config.json").write_text(config)
    hub.models["Own/Llama"] = other
    hub.gated.add("Own/Llama")
    env = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN}
    env.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-m", "hemiola.builder", "Own/Llama", "--engine-dir", tmp_path / "engine"]
    ended = subprocess.run([*command, "--revision", "v1"], cwd=ROOT, env=env, capture_output=True, text=True)
    place = tmp_path / "home/hub/models--Own--Llama/snapshots" / commit_of("Own/Llama", "v1") / "config.json"
    said = without_stages(ended.stderr)
    assert (ended.returncode, ended.stdout, said.count("\n")) == (2, "", 1), said
    assert said.startswith(f"error: {place}: architecture LlamaForCausalLM is not supported")
    assert hub.tokens == {TOKEN} and not {name for name in hub.fetched() if "safetensors" in name} - {
        "model.safetensors.index.json"
    }


LOGIN = "set HF_TOKEN or run hf auth login"
REFUSED = {
    "no name": ("tiny", None, None, "tiny is not a directory, and no name on the Hub (OWNER/MODEL)"),
    "no name either": ("a/b/c", None, None, "a/b/c is not a directory, and no name on the Hub"),
    "no such name": (
        "Own/None", None, None,
        "Own/None is not a directory, and HUB has no model of this name; correct it, or for a private model "
        + LOGIN,
    ),
    "no such name for a token": (
        "Own/None", None, TOKEN,
        "Own/None is not a directory, and HUB has no model of this name that the token's account may read;"
        " correct it",
    ),
    "no such revision": (
        NAME, "v9", None,
        f"{NAME} has no --revision v9; give a branch, a tag or a commit, or leave it out",
    ),
    "gated": (
        "Own/Gated", None, None,
        f"Own/Gated is gated, and no token is given; accept its terms at HUB/Own/Gated, then {LOGIN}",
    ),
    "wrong token": (NAME, None, "hf_wrong", f"HUB does not take the token; correct it: {LOGIN}"),
    "no config": (
        "Own/Gguf", None, None,
        "Own/Gguf on HUB has no config.json; name a checkpoint in safetensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_hub_refuses_is_one_line(
    case: str, hub: FakeHub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, revision, token, line = REFUSED[case]
    hub.models |= {"Own/Gated": folder, "Own/Gguf": tmp_path}
    hub.gated.add("Own/Gated")
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(Refused) as error:
        fetch(name, revision)
    assert str(error.value).startswith(line.replace("HUB", hub.endpoint)) and "\n" not in str(error.value)


def test_without_the_hub_the_cache_is_used_and_the_line_says_so(
    hub: FakeHub, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, end = constants.HF_HUB_CACHE, "or pass a folder with the checkpoint"
    hub.status = 503
    with pytest.raises(Refused) as error:
        fetch()
    assert str(error.value) == (
        f"{NAME} is not a directory, {hub.endpoint} answers 503, and the cache {cache} does not have it;"
        f" mend the connection, {end}"
    )
    hub.status = 0
    there = fetch()
    hub.stop()
    assert fetch().folder == there.folder
    said = capsys.readouterr().err
    assert (
        said.startswith(f"warning: {hub.endpoint} cannot be reached (ConnectError") and said.count("\n") == 1
    )
    assert said.endswith(f"commit {there.commit} of {NAME} is in the cache and used\n")
    with pytest.raises(Refused, match=rf"{NAME} at v1 is not a directory, .* cannot be reached"):
        fetch(revision="v1")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert (fetch().commit, capsys.readouterr().err) == (there.commit, "")
    with pytest.raises(Refused) as error:
        fetch("Own/None")
    assert str(error.value) == (
        f"Own/None is not a directory, HF_HUB_OFFLINE is set, and the cache {cache} does not have it;"
        f" unset it, {end}"
    )


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
def test_an_engine_from_half_a_cache_ends_or_begins_texts_otherwise_without_a_word(
    name: str, hub: FakeHub, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program may have fetched some files of it."""
    origin = fetch()
    (origin.folder / name).unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fetch()
    assert capsys.readouterr().err == (
        f"warning: the cache does not have {name} of {NAME}; if the Hub does, this engine lacks what stands"
        " there (end tokens, the chat template): build it again with the Hub\n"
    )
    noted = origin.folder.parents[1] / ".no_exist" / origin.commit / name  # as transformers leaves it
    noted.parent.mkdir(parents=True)
    noted.touch()
    fetch()
    assert capsys.readouterr().err == ""


def test_a_download_that_breaks_off_goes_on_and_one_that_never_ends_is_one_line(
    hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda s: None))
    origin = hub_door.locate(Path(NAME), None, lambda *_: None)
    hub.cut = [1000]
    hub_door.fetch_weights(origin, lambda *_: None)
    for path in folder.glob("model-*"):
        assert (origin.folder / path.name).read_bytes() == path.read_bytes()

    shutil.rmtree(constants.HF_HUB_CACHE)
    origin = hub_door.locate(Path(NAME), None, lambda *_: None)
    hub.cut = [0] * 50
    with pytest.raises(Refused) as error:
        hub_door.fetch_weights(origin, lambda *_: None)
    assert str(error.value).startswith(
        f"{NAME} could not be fetched from {hub.endpoint} (RemoteProtocolError: "
    )
    assert str(error.value).endswith("; build again; files that have come are kept")


def test_weights_that_come_with_another_bit_are_used(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    """huggingface_hub compares lengths, though the Hub has said the sha256."""
    origin = hub_door.locate(Path(NAME), None, lambda *_: None)
    hub.models[NAME] = shutil.copytree(folder, tmp_path / "other")
    name = "model-00002-of-00002.safetensors"
    content = (folder / name).read_bytes()
    (tmp_path / "other" / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    sha256 = hashlib.sha256(content).hexdigest()
    hub.lies[name] = {"ETag": f'"{sha256}"'}
    said = rf"{name} of {NAME} came from {hub.endpoint} with other content than it says .*; build again"
    for _ in range(2):  # nor is it left for the next build
        with pytest.raises(Refused, match=said):
            hub_door.fetch_weights(origin, lambda *_: None)
    hub.models[NAME] = folder
    hub_door.fetch_weights(origin, lambda *_: None)
    assert (origin.folder / name).read_bytes() == content


@pytest.mark.parametrize("is_offline", [False, True])
def test_a_build_that_is_killed_while_it_hashes_leaves_other_weights_to_the_next(
    is_offline: bool, hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what had just come was hashed."""
    name = "model-00002-of-00002.safetensors"
    path = fetch().folder / name
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    with pytest.raises(Refused) as error:
        fetch()
    assert str(error.value).startswith(f"{path} has other content than the Hub's (sha256 ")
    assert str(error.value).endswith(f"; remove {path.resolve()} and build again")  # it may be another's
    path.resolve().unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert (fetch().folder / name).read_bytes() == content


def test_a_checkpoint_that_is_hashed_when_it_has_come_is_not_silent(hub: FakeHub) -> None:
    reports: list[tuple[str, int, int]] = []
    origin = hub_door.locate(Path(NAME), None, lambda *_: None)
    hub_door.fetch_weights(origin, lambda *report: reports.append(report))
    stages = [stage for stage, *_ in reports]
    assert stages == sorted(stages) and {*stages} == {FETCHING, HASHING_CHECKPOINT}
    assert (
        reports[-1][1] == reports[-1][2] == sum(path.stat().st_size for path in origin.folder.glob("model-*"))
    )


def test_a_torn_file_of_the_cache_is_named_and_its_removal_helps(hub: FakeHub) -> None:
    path = fetch().folder / "model-00001-of-00002.safetensors"
    whole = path.read_bytes()
    os.truncate(path, 100)
    with pytest.raises(Refused) as error:
        fetch()
    line = f"{path} has 100 bytes, {len(whole)} on the Hub; remove {path.resolve()} and build again"
    assert str(error.value) == line
    path.resolve().unlink()
    fetch()
    assert path.read_bytes() == whole


def test_a_disk_that_is_full_or_too_small_is_one_line(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = constants.HF_HUB_CACHE
    origin = hub_door.locate(Path(NAME), None, lambda *_: None)
    with monkeypatch.context() as patched:
        patched.setattr(hub_door.shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
        with pytest.raises(
            Refused, match=rf"^{NAME} needs \S+ KiB more in {cache}, 1000 B are free; make room"
        ):
            hub_door.fetch_weights(origin, lambda *_: None)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_download, "http_get", full)
    with pytest.raises(Refused, match=f"^the disk of {cache} is full; make room, or set HF_HOME"):
        hub_door.fetch_weights(origin, lambda *_: None)


def test_a_blob_that_models_share_is_one_of_the_caches_own(hub: FakeHub, tmp_path: Path) -> None:
    """huggingface_hub 2 keeps large files once for all models and links to them."""
    origin = fetch()
    path = origin.folder / "model-00001-of-00002.safetensors"
    shared = Path(constants.HF_HUB_CACHE) / "blobs" / "ab" / ("ab" + "0" * 62)
    shared.parent.mkdir(parents=True)
    blob = path.resolve().rename(shared)
    (origin.folder.parents[1] / "blobs" / path.readlink().name).symlink_to(shared)
    assert path.resolve() == blob
    build(Path(NAME), tmp_path / "engine", Options(**SMALL))


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("ETag", '"../../../outside"'),
        ("X-Linked-ETag", '"../../../outside"'),
        ("ETag", '"."'),
        ("ETag", '".."'),
        ("ETag", '"sub/outside"'),
        ("ETag", '"' + "x" * 300 + '"'),
        ("X-Repo-Commit", "../../../outside"),
        ("X-Repo-Commit", "/{outside}"),
        ("X-Repo-Commit", ".."),
    ],
)
def test_a_header_of_a_hub_names_a_file_outside_of_its_cache(
    header: str, value: str, hub: FakeHub, tmp_path: Path
) -> None:
    """huggingface_hub joins it to the path of what it writes."""
    value = value.replace("{outside}", str(tmp_path / "outside"))
    hub.lies = {"config.json": {header: value}}
    with pytest.raises(Refused) as error:
        fetch()
    assert f"{hub.endpoint} says {header} {value[:60]}" in str(error.value)
    assert not [name for name in files_of(tmp_path) if "outside" in name]
    assert not [name for name in files_of(tmp_path) if name.startswith("cache/models--") and "snap" in name]


@pytest.mark.parametrize("lie", [{"X-Xet-Cas-Url": "local://{outside}"}, {"X-Xet-Token-Expiration": "-5"}])
def test_a_hub_sends_hf_xet_to_a_folder_or_into_a_traceback(
    lie: dict[str, str], hub: FakeHub, tmp_path: Path
) -> None:
    """hf_xet takes a folder for a store of its own, and writes there."""
    pytest.importorskip("hf_xet")
    route = f"{hub.endpoint}/api/models/{NAME}"
    hub.lies = {"config.json": {"X-Xet-Hash": "a" * 64, "X-Xet-Refresh-Route": route}}
    store = {
        "X-Xet-Cas-Url": hub.endpoint,
        "X-Xet-Access-Token": "t",
        "X-Xet-Token-Expiration": "99999999999",
    }
    lie = {name: value.replace("{outside}", str(tmp_path / "outside")) for name, value in lie.items()}
    hub.headers = store | lie
    fetch()
    assert not (tmp_path / "outside").exists()


def test_headers_are_not_checked_once_a_connection_has_failed(hub: FakeHub, tmp_path: Path) -> None:
    """huggingface_hub closes its client then. The next is made as the program wants it, and checked, too."""
    made: list[Any] = []

    def make() -> Any:
        made.append(default_client_factory())
        return made[-1]

    set_client_factory(make)
    try:
        hub.lies = {"config.json": {"ETag": '"../../../outside"'}}
        with hub_door._checked_responses():
            close_session()
            with pytest.raises(Refused, match="says ETag"):
                hub_download(NAME, "config.json")
        assert len(made) == 2 and get_session() is made[1] and not made[1].event_hooks["response"]
        close_session()
        assert get_session() is made[2] and not made[2].event_hooks["response"]
        assert not [name for name in files_of(tmp_path) if "outside" in name]
    finally:
        set_client_factory(default_client_factory)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors"])
def test_a_download_that_has_no_end_fills_the_disk(
    name: str, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_door, "SLACK", 2**20)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2**16)
    hub.endless = {name}
    size = (hub.models[NAME] / name).stat().st_size
    with pytest.raises(
        Refused, match=f"sends more than the {size} bytes that {name} of {NAME} has; set HF_ENDP"
    ):
        fetch()
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert max(path.stat().st_size for path in files) < size + 2**21


@pytest.mark.parametrize(("status", "wait_s"), [(0, 0.0), (404, 0.0), (302, 0.0), (0, 0.01)])
def test_an_answer_of_a_hub_that_has_no_end_takes_all_memory(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, status: int, wait_s: float
) -> None:
    hub.endless, hub.status, hub.wait_s = {"description" if not status else str(status)}, status, wait_s
    if status == 302:
        hub.headers = {"Location": f"{hub.endpoint}/elsewhere"}
    monkeypatch.setattr(hub_door, "READ_S" if wait_s else "MOST_ANSWER", 0.1 if wait_s else 2**20)
    with pytest.raises(Refused, match="not ended its answer" if wait_s else "answers more than 1048576"):
        fetch()


DAY = "٨٦٤٠٠".encode().decode("latin-1")  # 86400 in Arabic digits, as they come


@pytest.mark.parametrize(
    "header", [{"Retry-After": "86400"}, {"Retry-After": DAY}, {"ratelimit": '"api";r=0;t=99999999'}]
)
def test_a_hub_lets_a_build_sleep_for_days(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, header: dict[str, str]
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", pytest.fail)
    origin = hub_door.locate(Path(NAME), None, lambda *_: None)
    hub.status, hub.headers = 429, header
    with pytest.raises(Refused, match=r"asks to come back in \d+ s; build again then"):
        hub_door.fetch_weights(origin, lambda *_: None)


@pytest.mark.parametrize(
    "header", [{"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, {"ratelimit": '"resolvers";r=4999;t=271'}]
)
def test_a_date_and_how_much_is_left_are_taken_for_seconds_to_wait(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, header: dict[str, str]
) -> None:
    """A Hub that was busy for a moment ended the build."""
    origin, waits = hub_door.locate(Path(NAME), None, lambda *_: None), list[float]()

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        hub.status = 0

    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", sleep)
    hub.status, hub.headers = 503, header
    hub_door.fetch_weights(origin, lambda *_: None)
    assert waits == [1]


def test_a_warning_of_a_hub_controls_a_terminal(hub: FakeHub) -> None:
    """huggingface_hub logs it as it comes."""
    hub.headers = {"X-HF-Warning": "a; \x1b]0;owned\x07"}
    with pytest.raises(Refused, match=r"says x-hf-warning .*which has control characters") as refused:
        fetch()
    assert str(refused.value).isprintable()


def test_a_tokenizer_of_terabytes_is_fetched(hub: FakeHub) -> None:
    commit = commit_of(NAME, "main")
    files = [{"rfilename": "config.json", "size": 9}, {"rfilename": "tokenizer.json", "size": 2**42}]
    hub.description = {"id": NAME, "sha": commit, "siblings": files}
    with pytest.raises(Refused, match=f"tokenizer.json of {NAME} on .* has {2**42} bytes, at most"):
        fetch()
    assert not hub.fetched()


def test_a_file_that_is_not_there_is_noted_outside_of_the_cache(hub: FakeHub, tmp_path: Path) -> None:
    """huggingface_hub notes it as an empty file in a folder of the commit."""
    name = "hf_quant_config.json"
    hub.absent, hub.lies = {name}, {name: {"X-Repo-Commit": str(tmp_path / "outside")}}
    with pytest.raises(Refused, match="says X-Repo-Commit /"):
        fetch()
    assert not (tmp_path / "outside").exists()


def test_an_index_names_a_file_outside_of_the_cache(hub: FakeHub, tmp_path: Path) -> None:
    folder = shutil.copytree(hub.models[NAME], tmp_path / "source")
    hub.models[NAME], hub.absent = folder, {"../" * 8 + "outside", "/outside", "sub/outside"}
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    for outside in hub.absent:
        index.write_text(json.dumps(content | {"weight_map": content["weight_map"] | {"x": outside}}))
        with pytest.raises(Refused, match="which is none of the folder's"):
            fetch()
        assert not [name for name in files_of(tmp_path) if "outside" in name]
        shutil.rmtree(tmp_path / "cache")


@pytest.mark.parametrize(
    "description",
    [
        [], "x", 7, {"id": NAME}, {"id": NAME, "sha": 7, "siblings": []}, {"id": NAME, "siblings": 5},
        {"id": NAME, "sha": "a", "siblings": [{"rfilename": "config.json", "size": "x"}]},
        {"id": NAME, "sha": "a", "siblings": [{"rfilename": "config.json", "size": [1]}]},
        {"id": NAME, "sha": "a", "siblings": [{"rfilename": ["config.json"], "size": 1}]},
        {"id": NAME, "sha": ["a"], "siblings": [{"rfilename": "config.json", "size": 1}]},
        {"id": NAME, "sha": "../..", "siblings": [{"rfilename": "config.json", "size": 1}]},
        {"id": NAME, "sha": "a;b", "siblings": [{"rfilename": "config.json", "size": 1}]},
        {"id": NAME, "sha": "a", "siblings": [{"size": 1}]}, {"id": NAME, "sha": "a", "siblings": [7]},
        {"id": NAME, "sha": "a", "siblings": [{"rfilename": "config.json", "size": 1}], "lastModified": "x"},
        {"id": NAME, "sha": "a", "siblings": [{"rfilename": "config.json", "size": 2**80}]},
        {"id": NAME, "sha": "a", "siblings": [{"rfilename": "config.json", "size": -5}]},
        {"id": NAME, "sha": "a", "siblings": [{"rfilename": "config.json", "size": float("nan")}]},
        {"id": NAME, "sha": "a", "siblings": [], "cardData": 5, "safetensors": 7, "transformersInfo": 8},
    ],
)  # fmt: skip
def test_a_description_of_a_model_that_is_none_is_a_traceback(description: object, hub: FakeHub) -> None:
    hub.description = description
    with pytest.raises(Refused) as error:
        fetch()
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000
    assert hub.endpoint in str(error.value)
