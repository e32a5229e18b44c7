"""A checkpoint by its name on the Hugging Face Hub: the files that a build reads, in the Hub's own cache.

HF_TOKEN and `hf auth login`, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE mean what they mean to huggingface_hub.
Files come one after the other in the main thread, so that Ctrl-C ends a download at once; huggingface_hub
fetches the parts of a large file in parallel.
"""

import errno
import re
import shutil
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import (
    HfApi,
    constants,
    get_session,
    get_token,
    hf_hub_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import HFValidationError, validate_repo_id

from hemiola.builder.checkpoint import INDEX, TOKENIZER_FILES, shard_names
from hemiola.builder.formats.declared import MODELOPT
from hemiola.builder.hashes import hash_files
from hemiola.runtime.errors import Refused, one_line
from hemiola.runtime.progress import FETCHING, HASHING_CHECKPOINT, Report, size

CONFIG = "config.json"
SMALL = (CONFIG, "generation_config.json", MODELOPT, INDEX, *TOKENIZER_FILES)
TELLING = ("generation_config.json", *TOKENIZER_FILES[:2])  # most have them; a build goes on without
MAX_SMALL = 2**27  # bytes of each; the largest known, a tokenizer, has 35 MB
MOST_ANSWER = 2**24  # bytes of an answer that is no file; a description of 10,000 files has 2 MB
READ_S = 60.0  # seconds in which it must have come
TOO_MANY = (408, 429, 500, 502, 503, 504)  # after which huggingface_hub asks again
LONGEST_WAIT = 3  # digits of the seconds that it may be told to wait; huggingface.co counts in 300
SLACK = 2**26  # bytes beyond a file's size after which a download has no end
BLANKS = {ord("\t"): " ", 0xA0: " "}  # they move no cursor
JOINED = ("ETag", "X-Linked-ETag", "X-Repo-Commit")
BY_XET = "X-Xet-Hash"  # the file is fetched by hf_xet, from where the Hub says
PART_OF_A_PATH = re.compile(r'(W/)?"?[\w:;,+=~-][\w.:;,+=~-]{0,199}"?', re.ASCII)
SHA256 = re.compile("[0-9a-f]{64}")
COMMIT = re.compile(r"\w{1,200}", re.ASCII)
LOGIN = "set HF_TOKEN or run hf auth login"
HTTP_ERROR: Any = HfHubHTTPError.__bases__[0]  # of the HTTP client that this huggingface_hub uses


@dataclass(frozen=True)
class Origin:
    """A checkpoint's folder. From the Hub: its name there and the commit, and bytes of files by name, none
    where the Hub could not be asked."""

    folder: Path
    repo: str = ""
    commit: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)


def locate(path: Path, revision: str | None, report: Report) -> Origin:
    """A folder as it is; otherwise what a build reads of the model of this name, but for its weights.

    Raises Refused for what is neither, and for all that keeps a model from being fetched."""
    if path.exists() or path.is_symlink():
        if revision is not None:
            message = f"--revision {revision} is for a name on the Hub, but {path} is a folder here"
            raise Refused("conflict", "revision", revision, message=message, way_out="leave it out")
        return Origin(path)
    repo = _name(path)
    report("asking the Hub", 0, 0)
    with _in_one_line(repo, revision):
        try:
            commit, sizes = _described(repo, revision)
        except (HTTP_ERROR, OSError) as error:
            if not _is_unreachable(error):
                raise
            return _cached(repo, revision, error)
        if CONFIG not in sizes:
            message = f"{repo} on {constants.ENDPOINT} has no {CONFIG}"
            raise Refused("not_found", message=message, way_out="name a checkpoint in safetensors")
        _refuse_large(repo, sizes)
        bar = _bar(report, repo, CONFIG, sizes[CONFIG])
        # the cache keeps what the name means
        named = Path(hf_hub_download(repo, CONFIG, revision=revision, tqdm_class=bar))
        if named.parent.name != commit:
            message = f"{repo} on {constants.ENDPOINT} has just changed"
            raise Refused("failed", message=message, way_out="build again")
        origin = Origin(named.parent, repo, commit, sizes)
        _fetch(origin, SMALL, report)
    return origin


def _described(repo: str, revision: str | None) -> tuple[str, dict[str, int]]:
    """A model's commit, and bytes of its files by name. huggingface_hub takes an answer as it comes."""
    try:
        timeout = constants.HF_HUB_ETAG_TIMEOUT
        info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=timeout)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    except (TypeError, KeyError, AttributeError) as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
    else:
        commit = info.sha if isinstance(info.sha, str) and COMMIT.fullmatch(info.sha) else ""
        if commit and all(type(size) is int and size >= 0 for size in sizes.values()):
            return commit, sizes
        reason = "its commit or a file size is invalid"
    message = f"{constants.ENDPOINT} gives a malformed description of {repo} ({reason})"
    raise Refused("malformed", message=message, way_out="set HF_ENDPOINT to another Hub")


def fetch_weights(origin: Origin, report: Report) -> None:
    """Those that the index names, if they are not in the cache."""
    if origin.repo:
        with _in_one_line(origin.repo, origin.commit):
            _fetch(origin, shard_names(origin.folder), report)


def _name(path: Path) -> str:
    try:
        if str(path).count("/") == 1:
            validate_repo_id(str(path))
            return str(path)
    except HFValidationError:
        pass
    message = f"{path} is not a directory, and no name on the Hub (OWNER/MODEL)"
    raise Refused(
        "not_found", message=message, way_out="pass a Hugging Face checkpoint folder or such a name"
    )


def _fetch(origin: Origin, names: Sequence[str], report: Report) -> None:
    """Into the cache, with a check of each file's size and content."""
    wanted = {name: origin.sizes[name] for name in names if name in origin.sizes}
    absent = [name for name in wanted if not _in_cache(origin, name)]
    _refuse_full_disk(origin, sum(wanted[name] for name in absent))
    done, total = 0, sum(wanted[name] for name in absent)
    for name, num_bytes in wanted.items():
        bar = _bar(report, origin.repo, name, num_bytes, done, total)
        path = Path(hf_hub_download(origin.repo, name, revision=origin.commit, tqdm_class=bar))
        done += num_bytes if name in absent else 0
        if (size := path.stat().st_size) != num_bytes:
            message = f"{path} has {size} bytes, {num_bytes} on the Hub"
            raise Refused("damaged", message=message, way_out=f"remove {path.resolve()} and build again")
    _refuse_other_content(origin, names, absent, report)


def _refuse_other_content(
    origin: Origin, names: Sequence[str], came: Collection[str], report: Report
) -> None:
    """The Hub calls large files by their sha256, and so does the cache; huggingface_hub compares lengths. A
    file that was there may be of a build that was killed before it looked, or of another program."""
    found = {path: blob for path in (origin.folder / name for name in names) if (blob := _blob(path))}
    for path, sha256 in zip(found, hash_files([*found], HASHING_CHECKPOINT, report), strict=True):
        blob = found[path]
        if sha256 == blob.name:
            continue
        digests = f"(sha256 {sha256[:12]}, expected {blob.name[:12]})"
        if path.name not in came:
            message = f"{path} has other content than the Hub's {digests}"
            raise Refused("damaged", message=message, way_out=f"remove {blob.resolve()} and build again")
        blob.unlink()
        message = (
            f"{path.name} of {origin.repo} came from {constants.ENDPOINT} with other content than it says"
            f" {digests}"
        )
        raise Refused("damaged", message=message, way_out="build again, or set HF_ENDPOINT to another Hub")


def _blob(path: Path) -> Path | None:
    """Where the cache has a file that the Hub calls by its sha256."""
    try:
        blob = path.parent / path.readlink()
    except OSError:  # a file that is not there, or a disk without links
        return None
    return blob if SHA256.fullmatch(blob.name) and blob.is_file() else None


def _refuse_large(repo: str, sizes: Mapping[str, int]) -> None:
    for name in SMALL:
        if (size := sizes.get(name, 0)) > MAX_SMALL:
            message = (
                f"{name} of {repo} on {constants.ENDPOINT} has {size} bytes, at most {MAX_SMALL} are read"
            )
            raise Refused("too_long", message=message, way_out="name another checkpoint")


def _in_cache(origin: Origin, name: str) -> bool:
    return isinstance(try_to_load_from_cache(origin.repo, name, revision=origin.commit), str)


def _refuse_full_disk(origin: Origin, num_bytes: int) -> None:
    free = shutil.disk_usage(origin.folder).free
    if num_bytes > free:
        message = (
            f"{origin.repo} needs {size(num_bytes)} more in {constants.HF_HUB_CACHE}, {size(free)} are free"
        )
        raise Refused("exhausted", message=message, way_out="make room, or set HF_HOME to a larger disk")


def _cached(repo: str, revision: str | None, error: Exception) -> Origin:
    """What earlier downloads have left, where the Hub cannot be asked."""
    config_file = try_to_load_from_cache(repo, CONFIG, revision=revision)
    offline = isinstance(error, OfflineModeIsEnabled)
    why = "HF_HUB_OFFLINE is set" if offline else _unreachable(error)
    if not isinstance(config_file, str):
        what = f"{repo} at {revision}" if revision else repo
        message = f"{what} is not a directory, {why}, and the cache {constants.HF_HUB_CACHE} does not have it"
        way_out = "unset it" if offline else "mend the connection"
        raise Refused(
            "not_found", message=message, way_out=f"{way_out}, or pass a folder with the checkpoint"
        )
    folder = Path(config_file).parent
    commit = folder.name
    if not offline:
        print(f"warning: {why}; commit {commit} of {repo} is in the cache and used", file=sys.stderr)
    # None: nobody has asked for it; what the Hub does not have, the cache may know
    if names := [name for name in TELLING if try_to_load_from_cache(repo, name, revision=commit) is None]:
        print(
            f"warning: the cache does not have {' and '.join(names)} of {repo}; if the Hub does, this engine"
            " lacks what stands there (end tokens, the chat template): build it again with the Hub",
            file=sys.stderr,
        )
    return Origin(folder, repo, commit)


def _is_unreachable(error: Exception) -> bool:
    """Whether there was no answer, or none that says anything of the model."""
    return not isinstance(error, HfHubHTTPError) or error.response.status_code >= 500


def _unreachable(error: Exception) -> str:
    if isinstance(error, HfHubHTTPError):
        return f"{constants.ENDPOINT} answers {error.response.status_code}"
    return f"{constants.ENDPOINT} cannot be reached ({type(error).__name__}: {one_line(error)})"


def _check_response(response: Any) -> None:
    """Before huggingface_hub believes it."""
    _check_headers(response)
    if f"{constants.ENDPOINT}/" != constants.HUGGINGFACE_CO_URL_HOME:
        response.headers.pop(BY_XET, None)  # its answers are not checked here, and a folder is a store to it
    if response.status_code in TOO_MANY:
        _check_wait(response)
    response.read = partial(_read, response)  # files are not read whole: their bar counts


def _check_headers(response: Any) -> None:
    """huggingface_hub joins some to paths of its cache as they come, so a Hub could name any file, and logs
    others."""
    for header, value in response.headers.items():
        if not value.translate(BLANKS).isprintable():
            raise _malformed(f"says {header} {value[:60]!r}, which has control characters")
    for header in JOINED if response.request.method == "HEAD" else ():
        value = response.headers.get(header)
        if value is not None and not PART_OF_A_PATH.fullmatch(value):
            raise _malformed(f"says {header} {value[:60]}, which is no part of a file's name")


def _check_wait(response: Any) -> None:
    """huggingface_hub sleeps for as long as it is told. It reads no dates."""
    after, limits = (response.headers.get(name, "") for name in ("Retry-After", "ratelimit"))
    seconds = re.findall(r"^\s*(\d+)\s*$", after) + re.findall(r";\s*t\s*=\s*(\d+)", limits)
    if longest := [number for number in seconds if len(number) > LONGEST_WAIT]:
        message = f"{constants.ENDPOINT} asks to come back in {longest[0][:60]} s"
        raise Refused("failed", message=message, way_out="build again then; files that have come are kept")


def _read(response: Any) -> bytes:
    """What is read whole has a size and an end."""
    if hasattr(response, "_content"):
        return response.content
    content, end = bytearray(), time.monotonic() + READ_S
    for part in response.iter_bytes(2**16):
        content += part
        if len(content) > MOST_ANSWER:
            raise _malformed(f"answers more than {MOST_ANSWER} bytes")
        if time.monotonic() > end:
            raise _malformed(f"has not ended its answer in {READ_S:.0f} s")
    response._content = bytes(content)  # where its own `read` puts it
    return response.content


def _malformed(what: str) -> Refused:
    message = one_line(f"{constants.ENDPOINT} {what}")
    return Refused("malformed", message=message, way_out="set HF_ENDPOINT to another Hub")


@contextmanager
def _checked_responses() -> Iterator[None]:
    """Of all that is asked meanwhile. huggingface_hub has one client, and closes it where a connection fails:
    the next is checked, too."""
    checked: list[Any] = []

    def check_next() -> None:
        client: Any = get_session()
        close = client.close

        def close_and_go_on() -> None:
            close()
            check_next()

        client.event_hooks["response"].append(_check_response)
        client.close = close_and_go_on
        checked.append(client)

    check_next()
    try:
        yield
    finally:
        for client in checked:
            client.event_hooks["response"].remove(_check_response)
            del client.close


@contextmanager
def _in_one_line(repo: str, revision: str | None) -> Iterator[None]:
    """What huggingface_hub raises."""
    try:
        with _checked_responses():
            yield
    except Refused:
        raise
    except (HTTP_ERROR, OSError, RuntimeError, ValueError) as error:  # hf_xet's, and what is no JSON
        raise _refused(repo, revision, error) from None


def _refused(repo: str, revision: str | None, error: Exception) -> Refused:
    hub, has_token = constants.ENDPOINT, get_token() is not None
    match error:
        case GatedRepoError():
            why = "the token's account has no access to it" if has_token else "no token is given"
            way_out = f"accept its terms at {hub}/{repo}" + ("" if has_token else f", then {LOGIN}")
            return Refused("unsupported", message=f"{repo} is gated, and {why}", way_out=way_out)
        case RepositoryNotFoundError():
            sees = " that the token's account may read" if has_token else ""
            message = f"{repo} is not a directory, and {hub} has no model of this name{sees}"
            way_out = "correct it" + ("" if has_token else f", or for a private model {LOGIN}")
            return Refused("not_found", message=message, way_out=way_out)
        case RevisionNotFoundError():
            way_out = "give a branch, a tag or a commit, or leave it out"
            message = f"{repo} has no --revision {revision}"
            return Refused("not_found", "revision", revision, message=message, way_out=way_out)
        case HfHubHTTPError() if error.response.status_code == 401:
            message = f"{hub} does not take the token"
            return Refused("unsupported", message=message, way_out=f"correct it: {LOGIN}")
        case HfHubHTTPError():
            message = f"{hub} answers {error.response.status_code} for {repo}"
            return Refused(
                "failed", message=message, way_out="build again later; files that have come are kept"
            )
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
        message = f"the disk of {constants.HF_HUB_CACHE} is full"
        return Refused("exhausted", message=message, way_out="make room, or set HF_HOME to a larger disk")
    cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else None
    why = cause if isinstance(cause, Exception) else error
    message = f"{repo} could not be fetched from {hub} ({type(why).__name__}: {one_line(why)})"
    return Refused("failed", message=message, way_out="build again; files that have come are kept")


def _bar(report: Report, repo: str, name: str, file_bytes: int, done: int = 0, total: int = 0) -> Any:
    """A class that huggingface_hub takes for tqdm's: it reports bytes of one file, behind `done` others, and
    ends a download that does not end by itself: huggingface_hub would fill the disk."""

    class Bar:
        def __init__(self, *_: object, initial: int = 0, **__: object) -> None:
            self.num_bytes = initial

        def update(self, n: float | None = 1) -> None:
            self.num_bytes += int(n or 0)
            if self.num_bytes > file_bytes + SLACK:
                message = (
                    f"{constants.ENDPOINT} sends more than the {file_bytes} bytes that {name} of {repo} has"
                )
                raise Refused("malformed", message=message, way_out="set HF_ENDPOINT to another Hub")
            if total:
                report(FETCHING, done + self.num_bytes, total)

        def ignore(self, *_: object, **__: object) -> None:
            """Speeds, and bytes on the way of files that are compressed there."""

        update_transfer = set_postfix_str = set_transfer_postfix_str = close = __exit__ = ignore

        def __enter__(self) -> "Bar":
            return self

    return Bar
