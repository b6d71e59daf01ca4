"""What an `hf://` path names."""

from __future__ import annotations

import re
from typing import NamedTuple

from orbax_safetensors_layout.errors import StorageError

_PATH = re.compile(
    r"(?P<root>hf://((?P<type>model|dataset|space)s/)?(?P<repo>[^/@]+/[^/@]+|[^/@]+(?=@|/?$))"
    r"(@(?P<revision>refs/pr/\d+|refs/convert/[^/]+|[^/]+))?)(?P<sub>/.*)?"
)


class HubPath(NamedTuple):
    """A place in a repository of the hub.

    Attributes:
        root: The part of the path that names the repository and the revision.
        repo_type: `model`, `dataset` or `space`.
        repo_id: As `org/name`, or a bare `name` of the hub's early days.
        revision: A branch, a tag or a commit; None for the default branch.
        sub: The folder or file in the repository; "" for its top.
    """

    root: str
    repo_type: str
    repo_id: str
    revision: str | None
    sub: str

    @classmethod
    def parse(cls, path: str) -> HubPath:
        """Parses `hf://[models/|datasets/|spaces/]org/name[@revision][/folder]`.

        A slash in a revision is written as `%2F`, except in `refs/pr/1` and `refs/convert/x`.

        Raises:
            StorageError: It is malformed.

        Example:
            >>> HubPath.parse("hf://org/model@refs/pr/1/fp8")[1:]
            ('model', 'org/model', 'refs/pr/1', 'fp8')
        """
        found = _PATH.fullmatch(path)
        if found is None:
            raise StorageError(
                "can not open the path",
                file=path,
                expected="hf://[datasets/|spaces/]org/name[@revision][/folder]",
            )
        revision = found["revision"]
        if revision is not None:
            revision = revision.replace("%2F", "/").replace("%2f", "/")
        sub = (found["sub"] or "").strip("/")
        return cls(found["root"], found["type"] or "model", found["repo"], revision, sub)

    def __str__(self) -> str:
        at = f" at revision {self.revision!r}" if self.revision else ""
        return f"{self.repo_type} {self.repo_id}{at}"
