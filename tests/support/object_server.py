"""Object stores on loopback, in a process of their own: `with object_server("s3") as server`.

`s3` is moto's server. `gs` is `gcp-storage-emulator`, which has the JSON API that epath speaks; the
XML API, which obstore speaks, stands here in front of its storage. In front of both a recorder logs
each request, and fails where it is told to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.client
import itertools
import json
import logging
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
import xml.sax.saxutils
from collections.abc import Callable, Iterator
from email.utils import formatdate
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

from faults import Fault, Faults

BUCKET = "bucket"
_CONTROL = "/-/"
_JSON_PATHS = ("/storage/", "/upload/", "/download/", "/batch", "/b/")


class ObjectServer:
    """A running server.

    Attributes:
        kind: "s3" or "gs".
        url: Its address.
        environment: What makes clients use it.
    """

    def __init__(self, kind: str, port: int) -> None:
        self.kind = kind
        self.url = f"http://127.0.0.1:{port}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "not-a-real-secret",
            "AWS_REGION": "us-east-1",
        }
        if kind == "gs":
            self.environment = {"STORAGE_EMULATOR_HOST": self.url}

    def fail(self, *faults: Fault) -> None:
        """Sets what goes wrong from now on, in place of what was set before."""
        body = json.dumps([dataclasses.asdict(fault) for fault in faults]).encode()
        _fetch(f"{self.url}{_CONTROL}faults", body)

    def take_log(self) -> list[dict[str, Any]]:
        """The requests since the last call: method, key, query, first, last, status, nbytes."""
        report: list[dict[str, Any]] = json.loads(_fetch(f"{self.url}{_CONTROL}log", b""))
        return report

    def uploads(self) -> int:
        """Multi-part uploads that were begun and neither completed nor aborted."""
        text = _fetch(f"{self.url}/{BUCKET}?uploads").decode()
        return text.count("<Upload>")

    def put(self, key: str, data: bytes) -> None:
        """Stores an object behind the client's back."""
        _fetch(f"{self.url}/{BUCKET}/{urllib.parse.quote(key)}", data, "PUT")

    def get(self, key: str) -> bytes:
        """An object."""
        return _fetch(f"{self.url}/{BUCKET}/{urllib.parse.quote(key)}")

    def delete(self, key: str) -> None:
        """Deletes an object behind the client's back."""
        _fetch(f"{self.url}/{BUCKET}/{urllib.parse.quote(key)}", None, "DELETE")

    def keys(self, prefix: str = "") -> list[str]:
        """Keys of all objects below a prefix."""
        query = urllib.parse.urlencode({"list-type": "2", "prefix": prefix})
        text = _fetch(f"{self.url}/{BUCKET}?{query}").decode()
        return [
            xml.sax.saxutils.unescape(key) for key in re.findall(r"<Key>(.*?)</Key>", text, re.S)
        ]


def _fetch(url: str, body: bytes | None = None, method: str | None = None) -> bytes:
    method = method or ("GET" if body is None else "POST")
    # moto lets nobody without a signature replace what somebody with one has stored.
    scope = "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request"
    headers = {
        "x-osl-test": "1",
        "Content-Type": "application/octet-stream",
        "Authorization": f"{scope}, SignedHeaders=host, Signature=none",
    }
    request = urllib.request.Request(url, body, headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as response:
        data: bytes = response.read()
    return data


@contextlib.contextmanager
def object_server(kind: str) -> Iterator[ObjectServer]:
    """Runs a server with one bucket, `BUCKET`."""
    command = [sys.executable, str(Path(__file__)), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield ObjectServer(kind, int(process.stdout.readline()))
        finally:
            process.kill()


@contextlib.contextmanager
def configured(server: ObjectServer) -> Iterator[None]:
    """Clients that are made in the block use the server, whatever the environment says."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "GOOGLE_", "STORAGE_EMULATOR", "AZURE_"))
    }
    with mock.patch.dict(os.environ, kept | server.environment, clear=True):
        yield


# What follows runs in the server's process.

Start = Callable[[str, list[tuple[str, str]]], Any]
Answer = tuple[str, list[tuple[str, str]], bytes]


class Recorder:
    """Logs what passes, and makes some of it fail."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._log: list[dict[str, Any]] = []
        self._faults = Faults()

    def __call__(self, environ: dict[str, Any], start: Start) -> list[bytes]:
        path = environ["PATH_INFO"]
        if path.startswith(_CONTROL):
            return self._control(path.removeprefix(_CONTROL), environ, start)
        if "HTTP_X_OSL_TEST" in environ:
            return self._answer(environ, start)[1]
        key = path.removeprefix(f"/{BUCKET}").removeprefix("/")
        fault = self._faults.take(environ["REQUEST_METHOD"], key)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", environ.get("HTTP_RANGE", ""))
        entry = {
            "method": environ["REQUEST_METHOD"],
            "key": key,
            "query": environ["QUERY_STRING"],
            "first": int(asked[1]) if asked else None,
            "last": int(asked[2]) if asked else None,
            "nbytes": int(environ.get("CONTENT_LENGTH") or 0),
            "fault": fault and fault.kind,
        }
        with self._lock:
            self._log.append(entry)
        if fault is not None:
            return self._fail(fault, environ, start)
        status, body = self._answer(environ, start)
        entry["status"] = int(status.split()[0])
        return body

    def _answer(self, environ: dict[str, Any], start: Start) -> tuple[str, list[bytes]]:
        said: list[Any] = []
        body = b"".join(self._app(environ, lambda *args: said.append(args)))
        start(said[0][0], said[0][1])
        return said[0][0], [body]

    def _fail(self, fault: Fault, environ: dict[str, Any], start: Start) -> list[bytes]:
        kind = fault.kind
        if kind == "status":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            body = f"<Error><Code>Fault</Code><Message>{fault.status}</Message></Error>".encode()
            start(f"{fault.status} Fault", [("Content-Length", str(len(body)))])
            return [body]
        if kind == "reset":
            connection = environ["werkzeug.socket"]
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            connection.shutdown(socket.SHUT_RDWR)
            raise ConnectionError("reset on purpose")
        if kind == "delay":
            time.sleep(fault.seconds)
            return self._answer(environ, start)[1]
        said: list[Any] = []
        body = b"".join(self._app(environ, lambda *args: said.append(args)))
        status, headers = said[0][:2]
        if kind == "range":
            headers = [
                (name, "bytes 7-8/9" if name.lower() == "content-range" else value)
                for name, value in headers
            ]
        headers = [h for h in headers if h[0].lower() != "content-length"]
        start(status, [*headers, ("Content-Length", str(len(body))), ("Connection", "close")])
        return [body[: len(body) // 2] if kind == "truncate" else body]

    def _control(self, name: str, environ: dict[str, Any], start: Start) -> list[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        with self._lock:
            answer = b"{}"
            if name == "faults":
                self._faults = Faults(json.loads(body))
            else:
                answer = json.dumps(self._log).encode()
                self._log = []
        start("200 OK", [("Content-Length", str(len(answer)))])
        return [answer]


class XmlApi:
    """Google's XML API, as far as obstore uses it, over the emulator's storage.

    Preconditions and generations, which the emulator ignores, hold here.
    """

    def __init__(self, storage: Any, json_port: int) -> None:
        self._storage = storage
        self._json_port = json_port
        self._lock = threading.RLock()
        self._uploads: dict[str, tuple[str, str, dict[int, bytes]]] = {}
        self._numbers = itertools.count(1)

    def __call__(self, environ: dict[str, Any], start: Start) -> list[bytes]:
        size = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(size)
        if environ["PATH_INFO"].startswith(_JSON_PATHS):
            return self._json(environ, body, start)
        _, bucket, *rest = environ["PATH_INFO"].encode("latin-1").decode().split("/", 2)
        query = dict(urllib.parse.parse_qsl(environ["QUERY_STRING"], keep_blank_values=True))
        key = rest[0] if rest else ""
        with self._lock:
            if bucket not in self._storage.buckets:
                answer = _error("404 Not Found", "NoSuchBucket")
            elif key:
                answer = self._object(bucket, key, query, body, environ)
            else:
                answer = self._list(bucket, query)
        status, headers, data = answer
        start(status, [*headers, ("Content-Length", str(len(data)))])
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else data]

    def _json(self, environ: dict[str, Any], body: bytes, start: Start) -> list[bytes]:
        """Passes a request on to the emulator."""
        kept = {
            name.removeprefix("HTTP_").replace("_", "-"): value
            for name, value in environ.items()
            if name.startswith("HTTP_") and name not in ("HTTP_CONNECTION", "HTTP_ACCEPT_ENCODING")
        }
        kept |= {"Content-Type": environ["CONTENT_TYPE"]} if environ.get("CONTENT_TYPE") else {}
        emulator = http.client.HTTPConnection("127.0.0.1", self._json_port, timeout=60)
        with contextlib.closing(emulator):
            emulator.request(environ["REQUEST_METHOD"], environ["REQUEST_URI"], body, kept)
            response = emulator.getresponse()
            data = response.read()
        passed = [
            (name, value)
            for name, value in response.getheaders()
            if name.lower() not in ("connection", "transfer-encoding")
        ]
        start(f"{response.status} {response.reason}", passed)
        return [data]

    def _object(
        self, bucket: str, key: str, query: dict[str, str], body: bytes, environ: dict[str, Any]
    ) -> Answer:
        method = environ["REQUEST_METHOD"]
        if method == "POST" and "uploads" in query:
            upload = f"upload-{next(self._numbers)}"
            self._uploads[upload] = (bucket, key, {})
            text = f"<InitiateMultipartUploadResult><Bucket>{bucket}</Bucket><Key>{key}</Key>"
            return _xml(f"{text}<UploadId>{upload}</UploadId></InitiateMultipartUploadResult>")
        if "uploadId" in query:
            return self._upload(method, query, body)
        source = environ.get("HTTP_X_GOOG_COPY_SOURCE")
        if method == "PUT" and source:
            _, from_bucket, from_key = urllib.parse.unquote("/" + source.lstrip("/")).split("/", 2)
            source_data = self._data(from_bucket, from_key)
            if source_data is None:
                return _error("404 Not Found", "NoSuchKey")
            self._store(bucket, key, source_data)
            return _xml("<CopyObjectResult></CopyObjectResult>")
        data = self._data(bucket, key)
        if method == "PUT":
            generation = environ.get("HTTP_X_GOOG_IF_GENERATION_MATCH")
            now = "0" if data is None else self._storage.objects[bucket][key]["generation"]
            if generation is not None and generation != now:
                return _error("412 Precondition Failed", "PreconditionFailed")
            self._store(bucket, key, body)
            return "200 OK", self._describe(bucket, key), b""
        if data is None:
            return _error("404 Not Found", "NoSuchKey")
        if method == "DELETE":
            self._storage.delete_file(bucket, key)
            return "204 No Content", [], b""
        return self._get(bucket, key, data, query, environ)

    def _get(
        self,
        bucket: str,
        key: str,
        data: bytes,
        query: dict[str, str],
        environ: dict[str, Any],
    ) -> Answer:
        headers = self._describe(bucket, key)
        described = dict(headers)
        etag = environ.get("HTTP_IF_MATCH")
        if etag is not None and etag != described["ETag"]:
            return _error("412 Precondition Failed", "PreconditionFailed")
        generation = query.get("generation", described["x-goog-generation"])
        if generation != described["x-goog-generation"]:
            return _error("404 Not Found", "NoSuchKey")
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", environ.get("HTTP_RANGE", ""))
        if asked is None:
            return "200 OK", headers, data
        first, last = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
        if first >= len(data):
            return _error("416 Range Not Satisfiable", "InvalidRange")
        headers.append(("Content-Range", f"bytes {first}-{last}/{len(data)}"))
        return "206 Partial Content", headers, data[first : last + 1]

    def _upload(self, method: str, query: dict[str, str], body: bytes) -> Answer:
        if query["uploadId"] not in self._uploads:
            return _error("404 Not Found", "NoSuchUpload")
        bucket, key, parts = self._uploads[query["uploadId"]]
        if method == "PUT":
            parts[int(query["partNumber"])] = body
            return "200 OK", [("ETag", f'"{hashlib.md5(body).hexdigest()}"')], b""
        del self._uploads[query["uploadId"]]
        if method == "DELETE":
            return "204 No Content", [], b""
        listed = [int(n) for n in re.findall(r"<PartNumber>(\d+)</PartNumber>", body.decode())]
        assert listed == sorted(listed)
        assert all(len(parts[number]) >= 5 << 20 for number in listed[:-1])
        self._store(bucket, key, b"".join(parts[number] for number in listed))
        tag = dict(self._describe(bucket, key))["ETag"]
        text = f"<CompleteMultipartUploadResult><ETag>{xml.sax.saxutils.escape(tag)}</ETag>"
        _, headers, data = _xml(f"{text}</CompleteMultipartUploadResult>")
        return "200 OK", [*headers, *self._describe(bucket, key)], data

    def _list(self, bucket: str, query: dict[str, str]) -> Answer:
        if "uploads" in query:
            return _xml("<Upload></Upload>" * len(self._uploads))
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        objects, folders = [], set()
        for key in sorted(self._storage.objects.get(bucket, {})):
            if not key.startswith(prefix):
                continue
            head, separator, _ = key[len(prefix) :].partition(delimiter or "\0")
            if separator and delimiter:
                folders.add(prefix + head + separator)
                continue
            described = dict(self._describe(bucket, key))
            objects.append(
                f"<Contents><Key>{xml.sax.saxutils.escape(key)}</Key>"
                f"<LastModified>{self._storage.objects[bucket][key]['updated']}</LastModified>"
                f"<ETag>{xml.sax.saxutils.escape(described['ETag'])}</ETag>"
                f"<Size>{len(self._data(bucket, key) or b'')}</Size></Contents>"
            )
        items = [f"<CommonPrefixes><Prefix>{p}</Prefix></CommonPrefixes>" for p in sorted(folders)]
        text = "".join([*objects, *items])
        return _xml(f"<ListBucketResult><Name>{bucket}</Name>{text}</ListBucketResult>")

    def _store(self, bucket: str, key: str, data: bytes) -> None:
        from gcp_storage_emulator.handlers import objects

        # The emulator's own way, so that the JSON API tells the same.
        resource = objects._make_object_resource(
            "http://localhost", bucket, key, "application/octet-stream", str(len(data))
        )
        self._storage.create_file(bucket, key, data, objects._checksums(data, resource))

    def _data(self, bucket: str, key: str) -> bytes | None:
        if key not in self._storage.objects.get(bucket, {}):
            return None
        data: bytes = self._storage.get_file(bucket, key)
        return data

    def _describe(self, bucket: str, key: str) -> list[tuple[str, str]]:
        resource = self._storage.objects[bucket][key]
        return [
            ("ETag", f'"{resource["md5Hash"]}"'),
            ("x-goog-generation", resource["generation"]),
            ("Last-Modified", formatdate(int(resource["generation"]) / 1e9, usegmt=True)),
            ("Content-Type", "application/octet-stream"),
        ]


def _xml(text: str) -> Answer:
    data = f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode()
    return "200 OK", [("Content-Type", "application/xml")], data


def _error(status: str, code: str) -> Answer:
    return status, *_xml(f"<Error><Code>{code}</Code><Message>{code}</Message></Error>")[1:]


def _s3_app() -> Any:
    from moto.server import DomainDispatcherApplication, create_backend_app

    os.environ["MOTO_S3_CUSTOM_ENDPOINTS"] = ""
    app = DomainDispatcherApplication(create_backend_app)
    return app


def _gs_app() -> Any:
    from gcp_storage_emulator.handlers.buckets import create_bucket
    from gcp_storage_emulator.server import RequestHandler
    from gcp_storage_emulator.storage import Storage

    storage = Storage(use_memory_fs=True)
    create_bucket(BUCKET, storage)
    json_api = ThreadingHTTPServer(("127.0.0.1", 0), partial(RequestHandler, storage))
    threading.Thread(target=json_api.serve_forever, daemon=True).start()
    return XmlApi(storage, json_api.server_address[1])


def _serve(kind: str) -> None:
    from werkzeug.serving import WSGIRequestHandler, make_server

    logging.disable(logging.CRITICAL)
    app = _s3_app() if kind == "s3" else _gs_app()

    class Handler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

    server = make_server("127.0.0.1", 0, Recorder(app), threaded=True, request_handler=Handler)
    port = server.server_address[1]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    if kind == "s3":
        _fetch(f"http://127.0.0.1:{port}/{BUCKET}", b"", "PUT")
    print(port, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    _serve(sys.argv[1])
