"""Texts without secrets, for errors and logs."""

from __future__ import annotations

import re

_URL = re.compile(
    r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)([^\s/?#\"'<>]*@)?(?P<rest>[^\s?#\"'<>]*)([?#][^\s\"'<>)]*)?",
    re.I,
)
_QUERY = re.compile(r"[?#][^\s\"'<>?#]*=[^\s\"'<>)]*")
_SECRET = re.compile(
    r"(?P<name>(authorization|bearer|token|secret|signature|password|credential|access.?key"
    r"|api.?key)[\w-]*[\"']?(\s*[:=]|(?<=bearer) )\s*[\"']?(bearer\s+|basic\s+)?)"
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
