"""Texts without secrets, for errors and logs."""

from __future__ import annotations

import base64
import binascii
import re
import threading
import urllib.parse
from collections.abc import Iterable, Mapping

_URL = re.compile(
    r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)([^\s/?#\"'<>]*@)?(?P<rest>[^\s?#\"'<>]*)([?#][^\s\"'<>)]*)?",
    re.I,
)
_QUERY = re.compile(r"[?#][^\s\"'<>?#]*=[^\s\"'<>)]*")
_SECRET = re.compile(
    r"(?P<name>(authorization|bearer|token|secret|signature|password|credential|access.?key"
    r"|api.?key)[\w-]*[\"']?(\s*[:=]|(?<=bearer) )\s*[\"']?(bearer\s+|basic\s+)?|\bbasic )"
    r"(?P<value>[^\s\"'<>,;)]{8,})",
    re.I,
)


def redact_urls(text: str) -> str:
    """A URL, or a text with URLs in it, without user info, query strings and fragments.

    Example:
        >>> redact_urls("GET https://me:pw@host/model?X-Amz-Signature=abc: 403")
        'GET https://host/model 403'
    """
    return _URL.sub(lambda found: found["scheme"] + found["rest"], text)


def redact(text: str) -> str:
    """The same, also without what stands in a query elsewhere, and what names secrets.

    Example:
        >>> redact("Max retries exceeded with url: /model?sig=abc")
        'Max retries exceeded with url: /model'
        >>> redact("Authorization: Bearer hf_abcdefghijkl")
        'Authorization: Bearer ***'
    """
    text = _QUERY.sub("", redact_urls(text))
    return _SECRET.sub(lambda found: found["name"] + "***", text)


_PUBLIC_HEADERS = frozenset(["accept", "accept-encoding", "range", "user-agent"])
_SHORTEST_SECRET = 3  # characters; a shorter one would be found everywhere


class Sent:
    """What requests have sent, to be taken out of what servers say. Safe to use from many threads.

    A server that repeats a header or a URL, as it came or decoded, shows nothing by that.

    Example:
        >>> sent = Sent()
        >>> sent.add("https://host/model?sig=a%20b+c", {"Authorization": "Basic bWU6cGFzc3dvcmQ="})
        >>> sent.redact("400 what is bWU6cGFzc3dvcmQ=, password and 'a b+c'?")
        "400 what is ***, *** and '***'?"
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._lock = threading.Lock()
        self._requests: set[tuple[str, ...]] = set()
        self._secrets: set[str] = set()
        self._keep(secrets)

    def add(self, url: str, headers: Mapping[str, str]) -> None:
        """Adds a request.

        Args:
            url: Its URL. What follows the host in it is secret.
            headers: Its headers. All but those that say nothing of the user are secret.
        """
        values = [v for name, v in headers.items() if name.lower() not in _PUBLIC_HEADERS]
        request = (url, *values)
        if request in self._requests:
            return
        parts = urllib.parse.urlsplit(url)
        secrets = [parts.path.strip("/"), parts.query, f"{parts.path}?{parts.query}"]
        secrets += [pair.partition("=")[2] for pair in parts.query.split("&")]
        secrets += [parts.netloc.rpartition("@")[0], parts.password or ""]
        for value in values:
            scheme, _, word = value.partition(" ")
            secrets += [value, word, *(_login(word) if scheme.lower() == "basic" else ())]
        self._keep(secrets)
        with self._lock:
            self._requests.add(request)

    def redact(self, text: str) -> str:
        """A text without what was sent, and without what `redact` takes out of any."""
        with self._lock:
            secrets = sorted(self._secrets, key=len, reverse=True)
        for secret in secrets:
            text = text.replace(secret, "***")
        return redact(text)

    def _keep(self, secrets: Iterable[str]) -> None:
        forms = {
            form
            for secret in secrets
            for form in (
                secret,
                urllib.parse.unquote(secret),
                urllib.parse.unquote_plus(secret),
                urllib.parse.quote(secret),
                urllib.parse.quote(urllib.parse.unquote(secret), safe=""),
            )
        }
        with self._lock:
            self._secrets |= {form for form in forms if len(form) >= _SHORTEST_SECRET}


def _login(word: str) -> list[str]:
    """The user and the password that stand for a word of an `Authorization: Basic` header."""
    try:
        login = base64.b64decode(word).decode()
    except (binascii.Error, UnicodeDecodeError):
        return []
    return [login, login.partition(":")[2]]
