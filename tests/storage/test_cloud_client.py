"""Where clients of object stores get their endpoints and keys, and what their errors mean."""

from __future__ import annotations

import datetime
import os
from types import SimpleNamespace
from unittest import mock

import obstore
import pytest
from obstore import exceptions
from remote_checks import shown

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.storage import open_storage
from orbax_safetensors_layout.storage.cloud_client import classify, open_client

POLICY = osl.RetryPolicy(attempts=3, total_seconds=9, attempt_seconds=4)


@pytest.fixture(autouse=True)
def environment(tmp_path):
    """An empty one but for JAX, which may begin here, and an empty home."""
    kept = {name: os.environ[name] for name in os.environ if name.startswith(("JAX_", "XLA_"))}
    with mock.patch.dict(os.environ, {"HOME": str(tmp_path), **kept}, clear=True):
        yield os.environ


def client(scheme="s3"):
    return open_client(scheme, "bucket", POLICY, retrying=True)


def config(scheme="s3"):
    """Return what the client is told besides what it finds in the environment itself."""
    return dict(client(scheme).config)


FILES = {
    "credentials": """
[default]
aws_access_key_id = default-id
aws_secret_access_key = default-key
[other]
aws_access_key_id = other-id
aws_secret_access_key = other-key
aws_session_token = other-token
""",
    "config": """
[default]
region = eu-west-1
[profile other]
region = eu-west-2
endpoint_url = http://localhost:1
output = json
""",
}


@pytest.fixture
def home(tmp_path):
    (tmp_path / ".aws").mkdir()
    for name, text in FILES.items():
        (tmp_path / ".aws" / name).write_text(text)
    return tmp_path


def test_keys_of_the_default_profile(home):
    settings = config()
    assert (settings["access_key_id"], settings["region"]) == ("default-id", "eu-west-1")


def test_keys_of_another_profile(home, environment):
    environment["AWS_PROFILE"] = "other"
    settings = config()
    assert (settings["access_key_id"], settings["session_token"]) == ("other-id", "other-token")
    assert (settings["region"], settings["endpoint"]) == ("eu-west-2", "http://localhost:1")


def test_files_elsewhere(home, environment, tmp_path):
    (home / ".aws" / "credentials").rename(tmp_path / "keys")
    environment["AWS_SHARED_CREDENTIALS_FILE"] = str(tmp_path / "keys")
    assert config()["access_key_id"] == "default-id"


def test_the_environment_goes_before_the_files(home, environment):
    environment.update(AWS_ACCESS_KEY_ID="id", AWS_SECRET_ACCESS_KEY="key", AWS_REGION="eu-north-1")
    assert not {"access_key_id", "secret_access_key", "session_token", "region"} & set(config())


def test_a_default_of_the_environment_goes_before_the_files(home, environment):
    environment["AWS_PROFILE"] = "other"
    environment.update(AWS_DEFAULT_REGION="eu-north-1", AWS_ENDPOINT="http://localhost:2")
    assert not {"region", "endpoint"} & set(config())


def test_files_in_a_home_that_is_written_as_one(home, environment):
    environment["AWS_SHARED_CREDENTIALS_FILE"] = "~/keys"
    (home / ".aws" / "credentials").rename(home / "keys")
    assert config()["access_key_id"] == "default-id"


def test_a_user_without_a_home_has_no_files(environment, monkeypatch):
    """As in a container that runs under a number nobody has a name for."""
    del environment["HOME"]
    monkeypatch.setattr("pwd.getpwuid", mock.Mock(side_effect=KeyError))
    environment["AWS_REGION"] = "eu-north-1"
    assert config()["bucket"] == "bucket"


@pytest.mark.parametrize("text", ["no section\nhunter2hunter2\n", "[default]\nhunter2hunter2\n"])
def test_a_malformed_file_is_named_and_not_shown(home, text):
    (home / ".aws" / "credentials").write_text(text)
    with pytest.raises(osl.StorageError, match=r"credentials is malformed") as caught:
        client()
    assert "hunter2" not in shown(caught.value)


@pytest.mark.parametrize("name", ["tab\there", "../other", "a/./b"])
@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_path_that_no_object_can_have(environment, scheme, name):
    environment.update(AWS_SKIP_SIGNATURE="true", STORAGE_EMULATOR_HOST="localhost:1")
    with pytest.raises(osl.StorageError, match=r"after 1 attempt.*Could not parse path"):
        osl.load(f"{scheme}://bucket/{name}")


@pytest.mark.parametrize(
    "variables",
    [
        {"AWS_ENDPOINT_URL": "http://localhost:1"},
        {"AWS_ENDPOINT_URL_S3": "http://localhost:1"},
        {"AWS_ENDPOINT_URL": "https://localhost:1", "AWS_ALLOW_HTTP": "true"},
    ],
)
def test_an_endpoint_without_tls_is_taken_as_said(environment, variables):
    environment.update(variables)
    assert client().client_options["allow_http"] == "true"


def test_amazon_itself_is_not_asked_without_tls():
    assert client().client_options["allow_http"] == "false"


@pytest.mark.parametrize("host", ["localhost:9023", "http://localhost:9023"])
def test_the_emulator_of_google_cloud_storage(environment, host):
    environment["STORAGE_EMULATOR_HOST"] = host
    assert config("gs")["base_url"] == "http://localhost:9023"


def test_the_policy_reaches_the_client():
    client = open_client("s3", "bucket", POLICY, retrying=True)
    assert client.retry_config["max_retries"] == 2
    assert client.retry_config["retry_timeout"] == datetime.timedelta(seconds=9)
    assert open_client("s3", "bucket", POLICY, retrying=False).retry_config["max_retries"] == 0


def test_azure_without_an_account_says_what_is_missing():
    storage, path = open_storage("az://container/model", retries=POLICY)
    with storage, pytest.raises(osl.StorageError, match="cannot set up a client") as caught:
        storage.is_file(path)
    assert "account" in str(caught.value).lower()


AZURE = {"AZURE_STORAGE_ACCOUNT_NAME": "me", "AZURE_STORAGE_ACCOUNT_KEY": "aGlkZGVu"}


def test_azures_listings_name_versions_without_the_quotes_of_its_answers(environment, monkeypatch):
    environment.update(AZURE)
    meta = {"path": "model/f", "size": 3, "e_tag": "0x8D", "version": None}
    meta["last_modified"] = datetime.datetime.now(datetime.UTC)
    asked = []

    def get(client, key, options):
        asked.append(options["if_match"])
        return SimpleNamespace(meta={**meta, "e_tag": '"0x8D"'}, stream=lambda **_: [b"abc"])

    monkeypatch.setattr(obstore, "list_with_delimiter", lambda *_: {"objects": [meta]})
    monkeypatch.setattr(obstore, "get", get)
    storage, folder = open_storage("az://container/model", retries=POLICY)
    with storage:
        assert storage.list(folder) == ["f"]
        data = bytearray(3)
        storage.read_into(f"{folder}/f", 0, [memoryview(data)])
    assert (data, asked) == (b"abc", ['"0x8D"'])


def test_azure_with_an_account(environment):
    environment.update(AZURE)
    assert isinstance(client("az"), obstore.store.AzureStore)


def test_paths_of_buckets():
    for text, path in (
        ("gs://bucket/a/b", "gs://bucket/a/b"),
        ("gs://bucket/a//b/", "gs://bucket/a/b"),
        ("s3://bucket", "s3://bucket/"),
    ):
        storage, folder = open_storage(text)
        assert folder == path
        storage.close()
    with pytest.raises(osl.StorageError, match="names no bucket"):
        open_storage("gs:///a")
    with pytest.raises(osl.StorageError, match=r"slash.*epath"):
        open_storage("gs:/bucket/a")


def test_a_whole_bucket_is_not_removed():
    storage, path = open_storage("gs://bucket")
    with storage, pytest.raises(osl.StorageError, match="whole bucket"):
        storage.remove(path)


def test_another_bucket_is_refused():
    storage, _ = open_storage("gs://bucket/a")
    with storage, pytest.raises(osl.StorageError, match="another bucket"):
        storage.size("gs://bucket2/a")


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (exceptions.GenericError("status code: 503 Service Unavailable: x"), True),
        (exceptions.GenericError("status code: 400 Bad Request: x"), False),
        (exceptions.GenericError("HTTP error: request or response body error"), True),
        (
            exceptions.GenericError("Error performing GET http://169.254.169.254/x: timed out"),
            False,
        ),
        (exceptions.PermissionDeniedError("status code: 403"), False),
        (ConnectionError("the body has 3 bytes instead of 5"), True),
    ],
)
def test_errors(error, transient):
    failure = classify(error)
    assert failure is not None
    assert failure.transient is transient


def test_foreign_errors_are_none():
    assert classify(ZeroDivisionError()) is None


def test_an_answer_is_told_by_its_status_and_chained_without_tokens():
    body = "<Code>InvalidToken</Code><Token-0>FwoGZXIvYXdzEBYaDHSecret</Token-0>"
    failure = classify(exceptions.GenericError(f"status code: 403 Forbidden: {body}"))
    assert failure is not None
    assert failure.cause == "status 403"
    assert "InvalidToken" in str(failure.__cause__)
    assert "Secret" not in str(failure.__cause__)
