"""A server that behaves like the Hugging Face hub, and one like its CDN, for `huggingface_hub`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from http_server import Reply, Request, Server, serve_range

_API = re.compile(
    r"/api/(?P<type>models|datasets|spaces)/(?P<repo>[^/]+/[^/]+)"
    r"(/(?P<what>revision|tree)/(?P<revision>[^/]+)(/(?P<path>.*))?)?"
)
# Small files of git are redirected, on the same host, to a cache.
CACHE = "/api/resolve-cache"
_RESOLVE = re.compile(
    rf"(?P<cache>{CACHE}/models)?/((?P<type>datasets|spaces)/)?(?P<repo>[^/]+/[^/]+)/resolve/"
    r"(?P<revision>[^/]+)/(?P<path>.+)"
)


class Repo(NamedTuple):
    """A repository: its commits are folders; `readers` are tokens, None where all may read."""

    commits: dict[str, Path]
    refs: dict[str, str]
    readers: frozenset[str] | None = None
    gated: bool = False


class Hub:
    """The hub and its CDN.

    Attributes:
        hub: The server with the API, which redirects to files of the CDN.
        cdn: The server with the files, by URLs whose signatures expire.
        uses: After how many requests a signature expires.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.moved: dict[str, str] = {}
        self.uses = 1_000_000
        self._blobs: dict[str, Path] = {}
        self._signatures: dict[str, int] = {}
        self.hub = Server(self._answer_hub)
        self.cdn = Server(self._answer_cdn)

    def add(
        self,
        name: str,
        folder: Path,
        *,
        repo_type: str = "models",
        revision: str = "main",
        readers: frozenset[str] | None = None,
        gated: bool = False,
    ) -> str:
        """Commits a folder to a branch; the commit's hash."""
        repo = self.repo(f"{repo_type}/{name}") or Repo({}, {}, readers, gated)
        commit = hashlib.sha1(f"{name} {len(repo.commits)} {folder}".encode()).hexdigest()
        repo.commits[commit] = folder
        repo.refs[revision] = commit
        self.repos[f"{repo_type}/{name}"] = repo
        return commit

    def repo(self, name: str) -> Repo | None:
        """A repository by its type and its name."""
        return self.repos.get(name)

    def digest(self, file: Path) -> str:
        """The name of a file's blob."""
        return hashlib.sha256(file.read_bytes()).hexdigest()

    def close(self) -> None:
        self.hub.close()
        self.cdn.close()

    def _answer_hub(self, request: Request) -> Reply:
        match = _API.fullmatch(request.path) or _RESOLVE.fullmatch(request.path)
        if match is None:
            return Reply(404, {})
        name = f"{match['type'] or 'models'}/{match['repo']}"
        if name in self.moved:
            location = request.path.replace(*(n.split("/", 1)[1] for n in (name, self.moved[name])))
            return Reply(307, {"Location": location})
        token = (request.authorization or "").removeprefix("Bearer ")
        repo = self.repo(name)
        denied = repo is not None and repo.readers is not None and token not in repo.readers
        is_api = match.re is _API
        if repo is None or (denied and not repo.gated):
            return _error(404 if token else 401, "RepoNotFound", "Repository not found")
        if denied and not is_api:
            return _error(403 if token else 401, "GatedRepo", f"Access to {name} is restricted.")
        revision = urllib.parse.unquote(match["revision"] or "main")
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            return _error(404, "RevisionNotFound", "Invalid rev id")
        folder = repo.commits[commit]
        if not is_api:
            path = folder / urllib.parse.unquote(match["path"])
            reply = self._resolve(request, path, commit)
            if reply.status == 206 and match["type"] is None and not match["cache"]:
                return Reply(307, {"Location": f"{CACHE}/models{request.path}"})
            return reply
        is_tree = match["what"] == "tree"
        body = _tree(folder, match["path"]) if is_tree else _info(name, commit, folder)
        return Reply(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def _resolve(self, request: Request, path: Path, commit: str) -> Reply:
        if not path.is_file():
            return _error(404, "EntryNotFound", "Entry not found")
        attributes, headers = _attributes(path), {"X-Repo-Commit": commit}
        if "lfs" not in attributes:
            return serve_range(request, path, {**headers, "ETag": f'"{attributes["oid"]}"'})
        digest = self.digest(path)
        self._blobs[digest] = path
        signature = f"secret{len(self._signatures)}"
        self._signatures[signature] = self.uses
        headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(attributes["size"])}
        location = f"{self.cdn.url}/blobs/{digest}?X-Amz-Signature={signature}&X-Amz-Expires=1"
        return Reply(302, {**headers, "Location": location}, b"Found. Redirecting.")

    def _answer_cdn(self, request: Request) -> Reply:
        signature = request.query.get("X-Amz-Signature", "")
        if not self._signatures.get(signature):
            return Reply(403, {}, b"<Error><Code>AccessDenied</Code>Request has expired</Error>")
        self._signatures[signature] -= 1
        digest = request.path.removeprefix("/blobs/")
        return serve_range(request, self._blobs[digest], {"ETag": f'"{digest[:32]}"'})


def _error(status: int, code: str, message: str) -> Reply:
    return Reply(status, {"X-Error-Code": code, "X-Error-Message": message})


def _attributes(path: Path) -> dict[str, object]:
    data = path.read_bytes()
    attributes = {"type": "file", "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
    if path.suffix == ".safetensors":
        digest = hashlib.sha256(data).hexdigest()
        attributes["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 134}
    return attributes


def _files(folder: Path) -> Iterator[tuple[str, dict]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), _attributes(path)


def _tree(folder: Path, sub: str | None) -> list[dict]:
    inside = f"{sub}/" if sub else ""
    return [
        {"path": name, **attributes}
        for name, attributes in _files(folder)
        if name.startswith(inside)
    ]


def _info(name: str, commit: str, folder: Path) -> dict:
    siblings = []
    for file, attributes in _files(folder):
        sibling = {"rfilename": file, "size": attributes["size"], "blobId": attributes["oid"]}
        if lfs := attributes.get("lfs"):
            sibling["lfs"] = {"sha256": lfs["oid"], "size": lfs["size"], "pointerSize": 134}
        siblings.append(sibling)
    return {
        "id": name.partition("/")[2],
        "sha": commit,
        "siblings": siblings,
        "lastModified": "2025-11-21T10:00:00.000Z",
        "private": False,
        "gated": False,
        "downloads": 0,
        "likes": 0,
        "tags": [],
    }


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()
    try:
        yield hub
    finally:
        hub.close()
