"""A server that behaves like the Hugging Face hub, and one like its CDN, for `huggingface_hub`."""

from __future__ import annotations

import base64
import contextlib
import fnmatch
import hashlib
import json
import re
import shutil
import tempfile
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from http_server import Reply, Request, Server, serve_range

_API = re.compile(
    r"/api/(?P<type>models|datasets|spaces)/(?P<repo>[^/]+/[^/]+)"
    r"(/(?P<what>revision|tree|refs)(/(?P<revision>[^/]+)(/(?P<path>.*))?)?)?"
)
# Small files of git are redirected, on the same host, to a cache.
CACHE = "/api/resolve-cache"
_RESOLVE = re.compile(
    rf"(?P<cache>{CACHE}/models)?/((?P<type>datasets|spaces)/)?(?P<repo>[^/]+/[^/]+)/resolve/"
    r"(?P<revision>[^/]+)/(?P<path>.+)"
)


# What changes repositories: these are answered to tokens of `Hub.writers` alone.
_WRITE = re.compile(
    r"/api/repos/(?P<repos>create|delete)|/api/(?P<yaml>validate-yaml)|/uploads/(?P<blob>[0-9a-f]+)"
    r"|/api/models/(?P<repo>[^/]+/[^/]+)/(?P<what>preupload|commit|branch)/(?P<revision>[^/]+)"
    r"|/(?P<lfs>[^/]+/[^/]+)\.git/info/lfs/objects/batch"
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
        writers: Tokens that may write.
        uploads: Files that were sent by LFS, by SHA-256.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.moved: dict[str, str] = {}
        self.uses = 1_000_000
        self._blobs: dict[str, Path] = {}
        self._signatures: dict[str, int] = {}
        self.writers: set[str] = set()
        self.ignores: set[str] = set()  # left out of commits, whatever is asked
        self.uploads: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._root = tempfile.TemporaryDirectory()
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
        self._root.cleanup()

    def _answer_write(self, request: Request, match: re.Match[str]) -> Reply:
        token = (request.authorization or "").removeprefix("Bearer ")
        if match["blob"]:  # signed, so without a token
            if hashlib.sha256(request.body).hexdigest() != match["blob"]:
                return Reply(400, {})
            self.uploads[match["blob"]] = request.body
            return Reply(200, {})
        if token not in self.writers:
            return _error(403 if token else 401, "", "You may not write here.")
        if match["yaml"]:
            return _json({"errors": [], "warnings": []})
        if match["repos"]:
            return self._change_repos(match["repos"], json.loads(request.body), token)
        repo = self.repo(f"models/{match['repo'] or match['lfs']}")
        if repo is None:
            return _error(404, "RepoNotFound", "Repository not found")
        if match["lfs"]:
            objects = []
            for wanted in json.loads(request.body)["objects"]:
                href = {"href": f"{self.hub.url}/uploads/{wanted['oid']}"}
                more = {} if wanted["oid"] in self.uploads else {"actions": {"upload": href}}
                objects.append({**wanted, **more})
            return _json({"transfer": "basic", "objects": objects})
        revision = urllib.parse.unquote(match["revision"])
        if match["what"] == "branch":
            if request.method == "DELETE":
                return _json({}) if repo.refs.pop(revision, None) else _error(404, "", "No branch")
            if revision in repo.refs:
                return _error(409, "", "Reference already exists")
            repo.refs[revision] = repo.refs["main"]
            return _json({})
        if revision not in repo.refs:
            return _error(404, "RevisionNotFound", "Invalid rev id")
        if match["what"] == "preupload":
            asked = json.loads(request.body)["files"]
            modes = ["lfs" if f["path"].endswith(".safetensors") else "regular" for f in asked]
            own = repo.commits[repo.refs[revision]] / ".gitignore"
            hosted = own.read_text() if own.is_file() else ""
            ignored = json.loads(request.body).get("gitIgnore", hosted).split()
            ignored += self.ignores
            files = [
                {
                    "path": f["path"],
                    "uploadMode": mode,
                    "shouldIgnore": any(fnmatch.fnmatch(f["path"], name) for name in ignored),
                }
                for f, mode in zip(asked, modes, strict=True)
            ]
            return _json({"files": files})
        with self._lock:
            return self._commit(repo, f"models/{match['repo']}", revision, request.body)

    def _change_repos(self, what: str, asked: dict, token: str) -> Reply:
        name = f"models/{asked.get('organization') or 'user'}/{asked['name']}"
        if what == "delete":
            return _json({}) if self.repos.pop(name, None) else _error(404, "RepoNotFound", "")
        if name in self.repos:
            return _error(409, "", "You already created this model repo")
        folder = Path(self._root.name) / f"new{len(self.repos)}"
        folder.mkdir()
        (folder / ".gitattributes").write_text("*.safetensors filter=lfs\n")
        is_private = asked.get("private") or asked.get("visibility") == "private"  # by version
        readers = frozenset({token}) if is_private else None
        self.add(name.removeprefix("models/"), folder, readers=readers)
        return _json({"url": f"{self.hub.url}/{name.removeprefix('models/')}"})

    def _commit(self, repo: Repo, name: str, revision: str, body: bytes) -> Reply:
        lines = [json.loads(line) for line in body.splitlines()]
        header = lines.pop(0)["value"]
        head = repo.refs[revision]
        if header.get("parentCommit", head) != head:
            return _error(412, "", "A commit has happened since. Please refresh and try again.")
        folder = Path(self._root.name) / f"commit{len(repo.commits)}-{len(self.repos)}"
        shutil.copytree(repo.commits[head], folder)
        for line in lines:
            value = line["value"]
            path = folder / value["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            if line["key"] == "deletedFile":
                path.unlink()
            elif line["key"] == "file":
                path.write_bytes(base64.b64decode(value["content"]))
            elif value["oid"] not in self.uploads:
                return _error(400, "", f"LFS pointer to a file that does not exist: {path.name}")
            else:
                path.write_bytes(self.uploads[value["oid"]])
        commit = hashlib.sha1(body).hexdigest()
        repo.commits[commit] = folder
        repo.refs[revision] = commit
        url = f"{self.hub.url}/{name.removeprefix('models/')}/commit/{commit}"
        return _json({"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""})

    def _answer_hub(self, request: Request) -> Reply:
        if written := _WRITE.fullmatch(request.path):
            return self._answer_write(request, written)
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
        if is_api and match["what"] == "refs":
            return _json(_refs(repo))
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


def _json(body: object) -> Reply:
    return Reply(200, {"Content-Type": "application/json"}, json.dumps(body).encode())


def _error(status: int, code: str, message: str) -> Reply:
    return Reply(status, {"X-Error-Code": code, "X-Error-Message": message})


def _attributes(path: Path) -> dict[str, object]:
    data = path.read_bytes()
    oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # as git has it
    attributes = {"type": "file", "size": len(data), "oid": oid}
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


def _refs(repo: Repo) -> dict:
    branches = [
        {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit}
        for name, commit in repo.refs.items()
    ]
    return {"branches": branches, "converts": [], "tags": [], "pullRequests": []}


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
