"""`hf://` and `https://` paths: real clients, servers on loopback, exact ranges, clear errors."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import json
import logging
import shutil
import ssl
import sys
import threading
import unittest.mock
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import absl.logging
import checkpoints
import hub_server
import huggingface_hub
import jax
import numpy as np
import pytest
import safetensors.numpy
import urllib3.connection
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from http_server import Reply, Server, file_server, serve_range
from jax.sharding import PartitionSpec as P
from meshes import abstract_of, over_matrices
from programs import run_alone, run_processes
from remote_checks import TOKEN, assert_no_secret, assert_same, shown

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.cli import main
from orbax_safetensors_layout.format import MAIN_INDEX, MANIFEST
from orbax_safetensors_layout.mapping import read_config
from orbax_safetensors_layout.storage import hub as hub_storage, open_storage, web
from orbax_safetensors_layout.storage.hub import HubStorage

MIB = 1 << 20
TENSORS = checkpoints.llama_like()
QUICK = osl.RetryPolicy(attempts=3, base_seconds=0.001, attempt_seconds=5)
ONCE = osl.RetryPolicy(attempts=1, attempt_seconds=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoints.save(tmp_path_factory.mktemp("remote") / "model", TENSORS, files=3)


@pytest.fixture
def files(folder):
    with file_server(folder) as server:
        yield server


def planned(path, tree=None, **kwargs):
    """Names of files without their folders, and the ranges that the plan tells."""
    ranges = osl.plan_load(path, tree, **kwargs).ranges()
    return sorted((file.rpartition("/")[2], start, stop) for file, start, stop in ranges)


def failure(path, **kwargs):
    with pytest.raises(osl.SafetensorsLayoutError) as caught:
        osl.load(path, options=osl.ReadOptions(retries=ONCE), **kwargs)
    assert_no_secret(shown(caught.value))
    return caught.value


@pytest.mark.parametrize("spec", [P(("x", "y")), P(None, ("x", "y")), P("x", "y")], ids=str)
def test_sharded_load_from_the_hub_equals_the_one_from_disk(hub, folder, spec):
    hub.add("org/model", folder)
    tree = abstract_of(TENSORS, over_matrices(spec))
    loaded = osl.load("hf://org/model", tree)
    expected = osl.load(folder, tree)
    assert_same(loaded, TENSORS)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: a.sharding == b.sharding and a.dtype == b.dtype, loaded, expected)
    )


def test_hub_is_asked_for_the_ranges_of_the_plan_alone(hub, folder):
    hub.add("org/model", folder)
    only = "model.layers.1.*"
    plan = planned("hf://org/model", only=only)
    hub.hub.log.clear()
    hub.cdn.log.clear()
    assert_same(
        osl.load("hf://org/model", only=only),
        {name: values for name, values in TENSORS.items() if ".layers.1." in name},
    )
    names = {hub.digest(file): file.name for file in folder.iterdir()}
    ranges = [(names[path.rpartition("/")[2]], a, b) for path, a, b in hub.cdn.ranges()]
    assert sorted(r for r in ranges if r[1] > 0) == plan
    # The headers of the files that hold these tensors, each with the request that finds the file.
    assert {r[0] for r in ranges if r[1] == 0} == {file for file, _, _ in plan}
    asked = [request for request, _ in hub.hub.log if "/resolve/" in request.path]
    # And the index, which is redirected to the cache.
    assert len(asked) == len({file for file, _, _ in plan}) + 2
    assert all(request.range for request in asked)


def test_web_server_is_asked_for_the_ranges_of_the_plan_alone(files, folder):
    path = f"{files.url}/files"
    tree = abstract_of(TENSORS, over_matrices(P("x", "y")))
    plan = planned(path, tree)
    files.log.clear()
    assert_same(osl.load(path, tree), TENSORS)
    ranges = [(name.rpartition("/")[2], a, b) for name, a, b in files.ranges()]
    assert sorted(r for r in ranges if r[1] > 0) == plan
    heads = [name for name, start, _ in ranges if start == 0]
    assert sorted(heads) == sorted([MAIN_INDEX, *{file for file, _, _ in plan}])


def test_a_web_folder_is_asked_for_the_names_that_the_formats_have():
    assert set(web.PROBED) == {MAIN_INDEX, MANIFEST, "model.safetensors"}


def test_processes_read_their_own_bytes_from_the_hub(hub, tmp_path):
    tensors = {f"w{n}": checkpoints.random_tensor((64, 1024), np.float32, n) for n in range(4)}
    checkpoints.save(tmp_path / "model", tensors, files=2)
    hub.add("org/model", tmp_path / "model")
    results = run_processes(
        "hub_load.py", processes=2, devices=2, names=list(tensors), shape=(64, 1024)
    )
    for name, values in tensors.items():
        shards = [hashlib.sha256(part.tobytes()).hexdigest() for part in np.split(values, 4)]
        assert results[0][name] + results[1][name] == shards
    ranges = [r for r in hub.cdn.ranges() if r[1] > 0]
    assert sum(stop - start for _, start, stop in ranges) == sum(t.nbytes for t in tensors.values())
    assert len(ranges) == len(set(ranges)) == 2 * len(tensors)


@pytest.mark.parametrize("whole", ["model", "model/model.safetensors"])
def test_a_single_file_on_the_web(tmp_path, whole):
    checkpoints.save(tmp_path / "model", TENSORS)
    with file_server(tmp_path) as server:
        path = f"{server.url}/files/{whole}"
        assert_same(osl.load(path), TENSORS)
        assert osl.is_safetensors_checkpoint(path)
        assert not osl.is_safetensors_checkpoint(f"{server.url}/files/other")
        assert osl.metadata(path)["model.norm.weight"].file.startswith(server.url)
        with pytest.raises(osl.CheckpointNotFoundError, match=r"no such file|does not exist"):
            osl.load(f"{server.url}/files/model/other.safetensors")


def test_what_a_process_saved_in_pieces_loads_from_the_web_and_the_hub(hub, tmp_path):
    tree = {"w": jax.device_put(np.arange(64.0, dtype=np.float32)), "step": 3}
    osl.save(tmp_path / "saved", tree, options=osl.WriteOptions(layout="sharded"))
    hub.add("org/state", tmp_path / "saved")
    with file_server(tmp_path) as server:
        for path in ("hf://org/state", f"{server.url}/files/saved"):
            loaded = osl.load(path)
            assert loaded["step"] == 3
            np.testing.assert_array_equal(loaded["w"], tree["w"])


def test_connections_are_kept(files, folder):
    options = osl.ReadOptions(request_bytes=8192, concurrency=4)
    assert_same(osl.load(f"{files.url}/files", options=options), TENSORS)
    assert len(files.log) > 20
    # Those of the threads that read, and of the probes and the headers before.
    assert files.connections <= 4 + 3


def test_one_commit_is_read_whatever_is_pushed_meanwhile(hub, folder, tmp_path):
    first = hub.add("org/model", folder)
    other = checkpoints.save(tmp_path / "other", checkpoints.llama_like(seed=1), files=3)
    storage, path = open_storage("hf://org/model")
    with storage:
        name = f"{path}/model-00001-of-00003.safetensors"
        size = storage.size(name)
        hub.add("org/model", other)
        buffer = bytearray(size)
        storage.read_into(name, 0, [memoryview(buffer)])
    assert buffer == (folder / "model-00001-of-00003.safetensors").read_bytes()
    assert_same(osl.load("hf://org/model"), checkpoints.llama_like(seed=1))
    assert_same(osl.load(f"hf://org/model@{first}"), TENSORS)


def test_revisions_types_folders_and_files(hub, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "repo/a b/ü")
    hub.add("org/model", tmp_path / "repo", revision="refs/pr/7")
    hub.add("org/data", tmp_path / "repo", repo_type="datasets", revision="my/branch")
    inside = "a b/ü"
    for path in (
        f"hf://org/model@refs/pr/7/{inside}",
        f"hf://models/org/model@refs%2Fpr%2F7/{inside}/",
        f"hf://datasets/org/data@my%2Fbranch/{inside}",
    ):
        assert_same(osl.load(path), TENSORS)
    url = f"hf://org/model@refs/pr/7/{inside}/model-00001-of-00003.safetensors"
    assert set(osl.load(url)) == set(list(TENSORS)[::3])
    assert "Give a checkpoint below it: a b/ü." in str(failure("hf://org/model@refs/pr/7"))


@pytest.mark.parametrize(
    "path", ["hf://", "hf:///x", "hf://org/model@", "hf://@main", "hf://me:pass@host/x"]
)
def test_a_path_that_names_no_repository(path):
    with pytest.raises(osl.StorageError, match="cannot open the path") as refused:
        HubStorage(path)
    assert "pass" not in str(refused.value)
    assert not osl.is_safetensors_checkpoint(path)


@pytest.mark.parametrize("path", ["hf://org/model", "https://host/model", "gs://bucket/model"])
def test_a_url_that_pathlib_has_changed(path):
    with pytest.raises(osl.StorageError, match=r"lacks a slash.*as a string"):
        osl.load(Path(path))


def test_a_renamed_repository_is_found(hub, folder):
    hub.add("org/new", folder)
    hub.moved["models/org/old"] = "models/org/new"
    assert_same(osl.load("hf://org/old"), TENSORS)


def test_a_repository_of_more_files_than_its_summary_has(hub, folder, monkeypatch):
    hub.add("org/model", folder)
    monkeypatch.setattr(hub_storage, "_MOST_SUMMED_UP", 2)
    assert_same(osl.load("hf://org/model"), TENSORS)
    assert any("/tree/" in request.path for request, _ in hub.hub.log)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("rfilename", [None, 5, True, "\ud800", [], {"a": 1}]),
        ("size", [-1, 1.5, "x", True, 10**30, [1]]),
        ("lfs", [{"size": 1, "pointerSize": 1, "sha256": 5}, 5, [1]]),
        ("sha", [True, 5, "\ud800", ["x"]]),
        ("siblings", [5, {"a": 1}, [None]]),
        ("lastModified", [5, "x", "0001-99-99T00:00:00.000Z"]),
    ],
)
def test_a_malformed_listing_is_one_storage_error(hub, folder, monkeypatch, field, values):
    hub.add("org/model", folder)
    info = hub_server._info
    for value in values:

        def answer(*args, value=value):
            listing = info(*args)
            if field in listing:
                return listing | {field: value}
            return listing | {"siblings": [listing["siblings"][0] | {field: value}]}

        monkeypatch.setattr(hub_server, "_info", answer)
        error = failure("hf://org/model")
        assert type(error) is osl.StorageError, (value, error)
        assert "listing the repository failed" in str(error)


@pytest.mark.parametrize("said", ["no size", "null"])
def test_sizes_that_a_mirror_does_not_list_are_asked_for(hub, folder, tmp_path, monkeypatch, said):
    def unsized(*args):
        listing = info(*args)
        for sibling in listing["siblings"]:
            sibling["size"] = None
            if said == "no size":
                del sibling["size"]
        return listing

    model = shutil.copytree(folder, tmp_path / "model")
    files = {"config.json": b'{"a": 1}', "merges.txt": b"", "vocab.json": b"{}" * MIB}
    for name, data in files.items():
        (model / name).write_bytes(data)
    hub.add("org/model", model)
    info = hub_server._info
    monkeypatch.setattr(hub_server, "_info", unsized)
    assert_same(osl.load("hf://org/model"), TENSORS)
    osl.convert("hf://org/model", tmp_path / "copy", format="hf")
    assert {name: (tmp_path / "copy" / name).read_bytes() for name in files} == files
    tree = abstract_of(TENSORS, over_matrices(P("x", "y")))
    for _ in range(2):
        hub.cdn.log.clear()
        options = osl.ReadOptions(cache=tmp_path / "cache")
        loaded = osl.load("hf://org/model", tree, options=options)
        assert_same(jax.device_get(loaded), TENSORS)
    assert hub.cdn.ranges() == []


def test_signatures_that_expire_are_fetched_again(hub, folder):
    hub.add("org/model", folder)
    hub.uses = 2
    options = osl.ReadOptions(request_bytes=16384, retries=ONCE)
    assert_same(osl.load("hf://org/model", options=options), TENSORS)
    assert sum(status == 403 for _, status in hub.cdn.log) > 3


def test_tokens_go_to_the_hub_and_nowhere_else(hub, folder, monkeypatch):
    hub.add("org/private", folder, readers=frozenset([TOKEN]))
    error = failure("hf://org/private")
    assert isinstance(error, osl.CheckpointNotFoundError)
    assert "HF_TOKEN" in error.hint
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert_same(osl.load("hf://org/private"), TENSORS)
    assert {r.authorization for r, status in hub.hub.log if status in (206, 302)} == {
        f"Bearer {TOKEN}"
    }
    assert {request.authorization for request, _ in hub.cdn.log} == {None}


def test_a_gated_repository_tells_what_to_do(hub, folder, monkeypatch):
    hub.add("org/gated", folder, readers=frozenset(["another"]), gated=True)
    for token in ("", TOKEN):
        monkeypatch.setenv("HF_TOKEN", token)
        error = failure("hf://org/gated")
        assert error.message == "access denied"
        assert f"Accept its conditions at {hub.hub.url}/org/gated" in error.hint


def test_unknown_repository_revision_and_file(hub, folder):
    hub.add("org/model", folder)
    for path, message in {
        "hf://org/nothing": "the hub has no such repository, or does not show it",
        "hf://org/model@v9": "the repository has no revision 'v9'",
        "hf://org/model/model-9.safetensors": "the path does not exist",
    }.items():
        error = failure(path)
        assert isinstance(error, osl.CheckpointNotFoundError)
        assert message in error.message
        assert ("%2F" in (error.hint or "")) == ("@" in path)
        assert not osl.is_safetensors_checkpoint(path)


def test_an_endpoint_that_is_none_is_told_at_once(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "huggingface.example")
    error = failure("hf://org/model")
    assert error.message == "HF_ENDPOINT is not an http or https URL"
    assert error.found == "huggingface.example"


def test_offline_mode_is_respected(hub, folder):
    hub.add("org/model", folder)
    told = run_alone("hub_offline.py", environment={"HF_HUB_OFFLINE": "1"})
    assert "offline mode is set" in told
    assert "Unset HF_HUB_OFFLINE" in told
    assert not hub.hub.log


def test_offline_mode_that_begins_later_is_respected(hub, folder, monkeypatch):
    hub.add("org/model", folder)
    storage, path = open_storage("hf://org/model")
    with storage:
        assert MAIN_INDEX in storage.list(path)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(osl.StorageError, match="offline mode is set"):
            storage.read_into(f"{path}/{MAIN_INDEX}", 0, [memoryview(bytearray(8))])


def test_without_huggingface_hub_the_error_tells_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax_safetensors_layout.storage.hub", None)
    with pytest.raises(osl.StorageError, match=r"pip install --upgrade huggingface_hub"):
        osl.load("hf://org/model")


@pytest.mark.parametrize(
    ("path", "how"),
    [("hf://org/model", "hf upload org/model FOLDER"), ("https://127.0.0.1/x", "upload that by")],
)
def test_remote_paths_cannot_be_written_to(path, how):
    storage, text = open_storage(path)
    with storage:
        for write in (
            lambda: storage.create(f"{text}/f", 1, durable=False),
            lambda: storage.make_folder(text),
            lambda: storage.remove(text),
        ):
            with pytest.raises(osl.StorageError, match="cannot be written to") as caught:
                write()
            assert how in caught.value.hint


def test_credentials_of_a_url_are_sent_and_never_shown(folder):
    def answer(request):
        if request.authorization != "Basic bWU6cGFzcyB3b3Jk" or request.query != {"sig": "s3cr"}:
            return Reply(403, {})
        path = folder / request.path[1:]
        return serve_range(request, path, {}) if path.is_file() else Reply(404, {})

    with Server(answer) as server:
        host = server.url.removeprefix("http://")
        path = f"http://me:pass%20word@{host}?sig=s3cr"
        assert_same(osl.load(path), TENSORS)
        error = failure(f"http://me:wrong@{host}/model.safetensors?sig=s3cr")
        assert (error.message, error.file) == ("access denied", f"http://{host}/model.safetensors")
        assert "me:" not in str(error)
        assert "does not exist" in failure(f"http://me:pass%20word@{host}/x?sig=s3cr").message


def test_what_may_not_stand_in_a_url_is_quoted(folder):
    """In a query, and in redirects, of which servers send what they like."""

    def answer(request):
        if request.query != {"sig": "a bü"}:
            return Reply(403, {})
        if request.path.startswith("/from"):
            target = f"/ü b{request.path.removeprefix('/from')}?sig=a bü"
            return Reply(302, {"Location": target.encode().decode("latin-1")})
        path = folder / request.path.removeprefix("/%C3%BC%20b/")
        return serve_range(request, path, {}) if path.is_file() else Reply(404, {})

    with Server(answer) as server:
        for folder_name in ("from", "ü b"):
            assert_same(osl.load(f"{server.url}/{folder_name}?sig=a bü"), TENSORS)


def served_under_names(root, names):
    """Put one tensor in each file below a folder; return them by their names."""
    tensors = {name: np.full(3, number, np.int32) for number, name in enumerate(names)}
    for name, values in tensors.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        safetensors.numpy.save_file({name: values}, root / name)
    index = {"weight_map": {name: name for name in names}}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def test_file_names_of_an_index_are_quoted_and_the_path_as_it_was_given_is_not(tmp_path):
    names = ["a#1", "a?v=1", "100%", "a%31", "b c;d&e+f=ü", "%2e%2e/g", "h/i"]
    root = tmp_path / "a b"
    tensors = served_under_names(root, [f"{name}.safetensors" for name in names])
    with file_server(tmp_path) as server:
        for given in ("a%20b", "%61%20b/", "a b//"):
            assert_same(osl.load(f"{server.url}/files/{given}?sig=1"), tensors)
        for name, values in tensors.items():
            path = f"{server.url}/files/a%20b/{urllib.parse.quote(name)}"
            assert_same(osl.load(path), {name: values})


def test_an_index_of_missing_files_beside_a_model_is_left_out(tmp_path):
    checkpoints.save(tmp_path, TENSORS)
    index = {"weight_map": dict.fromkeys(TENSORS, "model-00001-of-00002.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with file_server(tmp_path) as server:
        assert_same(osl.load(f"{server.url}/files"), TENSORS)


@pytest.mark.parametrize("name", ["%2e%2e/private/x", "%2E./%2e%2e%2fprivate/x", "%2e%2e%5cx"])
def test_a_file_name_of_an_index_leads_nowhere_but_below_its_folder(tmp_path, name):
    """Of servers that decode all that is quoted before they look for the file."""
    (tmp_path / "public").mkdir()
    checkpoints.save(tmp_path / "private", {"w": np.ones(3)})
    index = {"weight_map": {"w": f"{name}.safetensors"}}
    (tmp_path / "public/model.safetensors.index.json").write_text(json.dumps(index))
    with file_server(tmp_path / "public") as server:
        asked = failure(f"{server.url}/files")
        assert asked.file.endswith(f"{name}.safetensors"), asked
        paths = {urllib.parse.unquote(request.path) for request, _ in server.log}
    assert f"/files/{name}.safetensors" in paths
    assert not any(".." in path for path in paths)


def test_a_request_that_connects_while_all_are_broken_off_is_broken_off_too(monkeypatch):
    connecting, interrupted = threading.Event(), threading.Event()

    def connect(connection):
        connecting.set()
        assert interrupted.wait(60)
        connection.sock = unittest.mock.Mock(sendall=lambda _: pytest.fail("sent"))

    monkeypatch.setattr(urllib3.connection.HTTPConnection, "connect", connect)
    storage, path = open_storage("http://127.0.0.1:9/model.safetensors", retries=ONCE)
    with storage, ThreadPoolExecutor(1) as pool:
        pending = pool.submit(storage.size, path)
        assert connecting.wait(60)
        storage.interrupt()
        interrupted.set()
        with pytest.raises(osl.StorageError, match="cancelled"):
            pending.result(60)


def test_credentials_do_not_follow_a_redirect_to_another_host(files):
    def answer(request):
        return Reply(302, {"Location": f"{files.url}{request.path}?token=secret"})

    with Server(answer) as server:
        path = server.url.replace("http://", "http://me:pw@") + "/files"
        assert_same(osl.load(path), TENSORS)
        assert all(request.authorization for request, _ in server.log)
        assert not any(request.authorization for request, _ in files.log)
        files.faults = lambda request: "403"
        assert failure(path).message == "access denied"


@pytest.mark.parametrize("target", ["/files/again", "ftp://host/file", "http://[", ""])
def test_redirects_that_lead_nowhere(target):
    with Server(lambda request: Reply(302, {"Location": target})) as server:
        assert "redirect" in str(failure(f"{server.url}/model.safetensors").found)


def test_a_redirect_leads_to_no_unencrypted_http_of_another_machine(monkeypatch):
    monkeypatch.delenv(web.ALLOW_HTTP, raising=False)
    target = {"Location": "http://other.invalid/model.safetensors"}
    with Server(lambda request: Reply(302, target)) as server:
        found = str(failure(f"{server.url}/model.safetensors").found)
    assert found == "a redirect to unencrypted http at other.invalid"


def test_unencrypted_http_to_other_machines_is_asked_for(files, monkeypatch):
    with pytest.raises(osl.StorageError, match="unencrypted http:// paths of other machines"):
        osl.load("http://example.org/model")
    # As a proxy the server is asked for whole URLs.
    monkeypatch.setenv(web.ALLOW_HTTP, "1")
    monkeypatch.setenv("http_proxy", files.url.replace("http://", "http://me:pw@"))
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert_same(osl.load("http://example.org/files"), TENSORS)
    assert {host for host, _ in files.hosts} == {"example.org"}
    monkeypatch.setenv("http_proxy", "http://me:pr0xysecret@[bad")
    with pytest.raises(osl.StorageError, match="proxy of the environment is not a URL") as caught:
        osl.load("http://example.org/files")
    assert "pr0xysecret" not in shown(caught.value)


def certificate(folder: Path) -> Path:
    """A certificate for 127.0.0.1 that signs itself, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .add_extension(x509.BasicConstraints(True, None), True)
        .sign(key, hashes.SHA256())
    )
    file = folder / "certificate.pem"
    file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    return file


def test_https(folder, tmp_path, monkeypatch):
    file = certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(file)
    with file_server(folder, tls=tls) as server:
        path = f"{server.url}/files"
        assert path.startswith("https://")
        with pytest.raises(osl.StorageError, match=r"after 1 attempt.*CERTIFICATE_VERIFY_FAILED"):
            osl.load(path)
        monkeypatch.setenv("SSL_CERT_FILE", str(file))
        assert_same(osl.load(path), TENSORS)


def test_a_server_without_ranges_is_told_from_one_with(folder):
    def answer(request):
        path = folder / request.path[1:]
        if not path.is_file():
            return Reply(404, {})
        return serve_range(request._replace(range=None), path, {})

    with Server(answer) as server:
        error = failure(server.url)  # the small index is taken, whole files are not
        assert "does not serve bytes" in error.message
        assert "a server that knows ranges" in error.hint


def test_long_headers_take_a_second_request(tmp_path, hub):
    tensors = {f"a{number}" * 40: np.zeros(1, np.float32) for number in range(4000)}
    checkpoints.save(tmp_path / "model", tensors)
    hub.add("org/model", tmp_path / "model")
    with file_server(tmp_path) as server:
        for path in ("hf://org/model", f"{server.url}/files/model"):
            assert set(osl.metadata(path)) == set(tensors)
        heads = [r for r in server.ranges() if r[0].endswith("model.safetensors")]
        assert [start for _, start, _ in heads] == [0, 256 * 1024]


def test_a_body_that_breaks_is_read_on_from_there(tmp_path):
    tensors = {"w": checkpoints.random_tensor((6 * MIB,), np.uint8)}
    checkpoints.save(tmp_path, tensors)
    faults = iter(["truncated"] * 2)
    options = osl.ReadOptions(retries=ONCE, request_bytes=8 * MIB)
    with file_server(tmp_path) as server:
        server.faults = lambda request: next(faults, None) if request.range[0] > 0 else None
        assert_same(osl.load(f"{server.url}/files", options=options), tensors)
        starts = [request.range[0] for request, _ in server.log if request.range[0] > 0]
        assert len(starts) == 3
        assert starts == sorted(set(starts))


def test_a_body_that_breaks_among_small_buffers(tmp_path):
    data = np.random.default_rng(0).bytes(5 * MIB)
    (tmp_path / "f.safetensors").write_bytes(data)
    faults = iter(["truncated", "reset in body"])
    with file_server(tmp_path) as server:
        storage, path = open_storage(f"{server.url}/files/f.safetensors", retries=QUICK)
        with storage:
            storage.size(path)
            server.faults = lambda request: next(faults, None)
            rows = [bytearray(1000) for _ in range(5000)]
            storage.read_into(path, 7, [memoryview(row) for row in rows])
        assert b"".join(rows) == data[7 : 7 + 5_000_000]


def test_a_failure_elsewhere_breaks_off_what_waits(tmp_path):
    """A server that keeps silent for a minute does not hold up the error of another file."""
    tensors = {f"w{n}": checkpoints.random_tensor((1000,), np.uint8, n) for n in range(2)}
    checkpoints.save(tmp_path, tensors, files=2)
    waiting = threading.Event()

    def faults(request):
        if not request.range or request.range[0] == 0:
            return None
        if "00001" in request.path:
            waiting.set()
            return "stall"
        waiting.wait(60)
        return "404"

    with file_server(tmp_path) as server:
        server.faults = faults
        with pytest.raises(osl.StorageError, match="replaced or removed"):
            osl.load(f"{server.url}/files", options=osl.ReadOptions(concurrency=2))


def test_a_header_that_fails_breaks_off_the_others(tmp_path):
    tensors = {f"w{n}": checkpoints.random_tensor((1000,), np.uint8, n) for n in range(2)}
    checkpoints.save(tmp_path, tensors, files=2)
    waiting = threading.Event()

    def faults(request):
        if "00001" in request.path:
            waiting.wait(60)
            return "403"
        if "00002" in request.path:
            waiting.set()
            return "stall"
        return None

    with file_server(tmp_path) as server:
        server.faults = faults
        with pytest.raises(osl.StorageError, match="access denied"):
            osl.metadata(f"{server.url}/files")


def test_a_final_error_names_url_range_attempts_and_cause(files):
    path = f"{files.url}/files"
    files.faults = lambda request: "503" if request.range and request.range[0] > 0 else None
    with pytest.raises(osl.StorageError) as caught:
        osl.load(f"{path}?sig=secret", options=osl.ReadOptions(retries=QUICK, concurrency=1))
    error = caught.value
    assert error.file.startswith(f"{path}/model-0000")
    assert "reading bytes [" in error.message
    assert "failed after 3 attempts" in error.message
    assert error.found == "status 503 from 127.0.0.1"
    assert error.tensor in TENSORS
    assert_no_secret(str(error))


def test_no_log_shows_a_secret(hub, folder, monkeypatch, caplog):
    """All that this package, the hub's client and what it stands on have to say."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_DEBUG", True)
    huggingface_hub.logging.enable_propagation()
    before = huggingface_hub.logging.get_verbosity(), absl.logging.get_verbosity()
    huggingface_hub.logging.set_verbosity_debug()
    absl.logging.set_verbosity(2)
    caplog.set_level(logging.DEBUG)
    try:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        hub.add("org/private", folder, readers=frozenset([TOKEN]))
        hub.uses = 2
        faults = iter(["503", "reset"])
        hub.cdn.faults = lambda request: next(faults, None)
        options = osl.ReadOptions(request_bytes=16384, retries=QUICK)
        assert_same(osl.load("hf://org/private", options=options), TENSORS)
        hub.cdn.faults = lambda request: "403"
        failure("hf://org/private")
        with file_server(folder) as server:
            path = server.url.replace("//", "//me:pass%20word@") + "/files{}?sig=secret"
            assert_same(osl.load(path.format("")), TENSORS)
            failure(path.format("/other"))
            server.faults = lambda request: "500"
            failure(path.format(""))
    finally:
        huggingface_hub.logging.disable_propagation()
        huggingface_hub.logging.set_verbosity(before[0])
        absl.logging.set_verbosity(before[1])
    assert "authenticated: True" in caplog.text
    assert "status 503" in caplog.text
    assert_no_secret(caplog.text)


def test_the_command_line_shows_no_secret(files, capsys):
    path = files.url.replace("//", "//me:pass%20word@") + "/files{}?sig=secret"
    for arguments in (
        ["inspect", path.format("")],
        ["verify", path.format("")],
        ["inspect", path.format("/other")],
        ["plan", path.format("/other"), "--mesh", "x=2"],
        ["convert", path.format("/other"), "/nonexistent/target"],
        ["consolidate", path.format("")],
    ):
        main(arguments)
        told = "".join(capsys.readouterr())
        try:
            main([*arguments, "--debug"])
        except osl.SafetensorsLayoutError as error:
            told += shown(error)
        assert told
        assert_no_secret(told + "".join(capsys.readouterr()))


def test_nothing_is_cached_on_disk(hub, folder, tmp_path, monkeypatch):
    hub.add("org/model", folder)
    before = sorted(tmp_path.rglob("*"))
    run_alone("hub_load_all.py", environment={"HF_HOME": str(tmp_path)})
    assert not [file for file in tmp_path.rglob("*safetensors*") if file not in before]


def test_orbax_reaches_the_hub_through_its_own_path_layer(hub, folder):
    """`etils.epath` has `hf://` from fsspec, in which huggingface_hub registers itself."""
    hub.add("org/model", folder)
    printed = run_alone("hub_orbax.py")
    assert json.loads(printed.splitlines()[-1]) == [sorted(TENSORS)] * 5


def test_a_models_configuration_is_read_from_the_hub(hub, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model/config.json").write_text('{"model_type": "llama"}')
    hub.add("org/model", tmp_path / "model")
    assert read_config("hf://org/model") == {"model_type": "llama"}


@pytest.mark.parametrize("status", [200, 403, 404])
def test_a_server_with_a_page_for_what_is_missing(tmp_path, status):
    """A file of bytes has its dtypes in the manifest beside it, if there is one."""
    tensors = {"w": np.arange(9, dtype=np.uint8)}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    page = b"<html>this page has moved</html>"
    with file_server(tmp_path) as server:
        files = server.answer

        def answer(request):
            if request.path.endswith(".safetensors"):
                return files(request)
            return Reply(status, {"Content-Type": "text/html"}, page)

        server.answer = answer
        loaded = osl.load(f"{server.url}/files/model.safetensors")
    assert_same(loaded, tensors)


@pytest.mark.parametrize("host", ["127.evil.example", "127.0.0.1.example"])
def test_a_name_that_begins_like_this_machine_is_another(host, monkeypatch):
    monkeypatch.delenv("ORBAX_SAFETENSORS_ALLOW_HTTP", raising=False)
    with pytest.raises(osl.SafetensorsLayoutError, match="ORBAX_SAFETENSORS_ALLOW_HTTP"):
        osl.load(f"http://{host}/model.safetensors")


def test_a_proxy_of_another_kind_is_told_at_once(monkeypatch):
    monkeypatch.setenv("https_proxy", "socks5://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(osl.StorageError, match="socks5://"):
        osl.load("https://host.example/model.safetensors")
