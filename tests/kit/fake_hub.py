"""A Hub on loopback: what huggingface_hub asks of the real one to find, list and fetch a model.

Small files come from /resolve itself, safetensors by a redirect to another host."""

import hashlib
import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import TracebackType
from urllib.parse import unquote, urlsplit

TOKEN = "hf_right"


def commit_of(repo: str, revision: str) -> str:
    return hashlib.sha1(f"{repo}@{revision}".encode()).hexdigest()


@dataclass
class FakeHub:
    """Models are folders by name; each has the same files at each of its revisions."""

    models: dict[str, Path]
    revisions: tuple[str, ...] = ("main", "v1")
    gated: set[str] = field(default_factory=set)  # names of models that need TOKEN
    status: int = 0  # that every question gets, if not 0
    cut: list[int] = field(default_factory=list)  # bytes after which the next downloads end
    lies: dict[str, dict[str, str]] = field(default_factory=dict)  # headers of what is resolved, by name
    endless: set[str] = field(default_factory=set)  # files whose content never ends
    absent: set[str] = field(default_factory=set)  # files that are listed and not there
    headers: dict[str, str] = field(default_factory=dict)  # of every answer
    wait_s: float = 0.0  # after each piece of what has no end
    description: object = None  # what it says of a model, if not what there is
    asked: list[tuple[str, str]] = field(default_factory=list)  # method and path
    tokens: set[str | None] = field(default_factory=set)  # that came

    def __enter__(self) -> "FakeHub":
        hub = self

        class Handler(_Handler):
            own = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def fetched(self) -> set[str]:
        """Files whose content was sent."""
        return {
            path.rpartition("/")[2] for method, path in self.asked if method == "GET" and "/api/" not in path
        }


class _Handler(BaseHTTPRequestHandler):
    own: FakeHub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.own.asked.append((self.command, path))
        token = (self.headers["Authorization"] or "").removeprefix("Bearer ") or None
        if self.own.endless & {str(self.own.status), "description"} and "/api/" in path:
            return self._go_on({}, b" " * 2**16, self.own.status or 200)
        if self.own.status:
            return self._send(self.own.status)
        if token not in (None, TOKEN):
            return self._send(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        parts = path.strip("/").split("/")
        if parts[0] == "api" and parts[1] != "models":
            return self._send(404)  # what huggingface_hub asks for itself
        if parts[0] == "api":
            return self._describe("/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main", token)
        if parts[0] == "storage":
            return self._content(self.own.models["/".join(parts[1:3])] / parts[3], {})
        return self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]), token)

    def _describe(self, repo: str, revision: str, token: str | None) -> None:
        self.own.tokens.add(token)
        folder, commit = self._found(repo, revision)
        if folder is None:
            return
        files = [{"rfilename": p.name, "size": p.stat().st_size} for p in sorted(folder.iterdir())]
        files += [{"rfilename": name, "size": 1} for name in sorted(self.own.absent)]
        described = {"id": repo, "sha": commit, "siblings": files}
        content = json.dumps(described if self.own.description is None else self.own.description).encode()
        self._send(200, {"Content-Type": "application/json"}, content)

    def _resolve(self, repo: str, revision: str, name: str, token: str | None) -> None:
        self.own.tokens.add(token)
        folder, commit = self._found(repo, revision)
        if folder is None:
            return
        if repo in self.own.gated and token != TOKEN:
            return self._send(403 if token else 401, {"X-Error-Code": "GatedRepo"})
        lies = self.own.lies.get(name, {})
        if name in self.own.absent:
            return self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit} | lies)
        path = folder / name
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(path.read_bytes()).hexdigest()}"'}
        headers |= lies
        if path.suffix == ".safetensors":
            linked = {"X-Linked-ETag": headers["ETag"], "X-Linked-Size": str(path.stat().st_size)}
            storage = self.own.endpoint.replace("127.0.0.1", "localhost")  # another host: it gets no token
            self._send(302, headers | linked | {"Location": f"{storage}/storage/{repo}/{name}"})
        else:
            self._content(path, headers)

    def _found(self, repo: str, revision: str) -> tuple[Path | None, str]:
        folder = self.own.models.get(repo)
        commits = {commit_of(repo, known): known for known in self.own.revisions}
        known = {**{name: commit for commit, name in commits.items()}, **{c: c for c in commits}}
        if folder is None:
            self._send(404, {"X-Error-Code": "RepoNotFound"})
        elif revision not in known:
            folder = None
            self._send(404, {"X-Error-Code": "RevisionNotFound"})
        return folder, known.get(revision, "")

    def _content(self, path: Path, headers: dict[str, str]) -> None:
        content = path.read_bytes()
        if path.name in self.own.endless and self.command == "GET":
            return self._go_on(headers, content)
        begin = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        ranged = {"Content-Range": f"bytes {begin}-{len(content) - 1}/{len(content)}"} if begin else {}
        self._send(206 if begin else 200, headers | ranged, content[begin:])

    def _go_on(self, headers: dict[str, str], content: bytes, status: int = 200) -> None:
        """Until the other side has enough."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(OSError):
            while True:
                self.wfile.write(content)
                time.sleep(self.own.wait_s)

    def _send(self, status: int, headers: dict[str, str] | None = None, content: bytes = b"") -> None:
        self.send_response(status)
        for name, value in ((headers or {}) | self.own.headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.own.cut and len(content) > self.own.cut[0]:
            content = content[: self.own.cut.pop(0)]
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""
