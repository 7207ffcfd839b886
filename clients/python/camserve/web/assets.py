"""The files of the web page, which the package contains, for the servers that serve it."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass, replace
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from importlib.resources.abc import Traversable

INDEX = "index.html"
_TYPES: Mapping[str, str] = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "json": "application/json",
    "svg": "image/svg+xml",
    "ico": "image/vnd.microsoft.icon",
    "jpg": "image/jpeg",
    "png": "image/png",
    "webp": "image/webp",
}


@dataclass(frozen=True)
class Asset:
    """A file of the page.

    Attributes:
        body: Its contents.
        content_type: Its media type.
        etag: Its entity tag, for conditional requests; a weak one, because it is that of both encodings.
        compressed: Its contents compressed by gzip, or nothing if that does not make them smaller.
        link: Its header ``Link``: the modules that a browser should load at once, before it has read their imports.
    """

    body: bytes
    content_type: str
    etag: str
    compressed: bytes = b""
    link: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """The headers that describe it, besides its encoding."""
        # A browser asks whether a file has changed, by its entity tag.
        headers = {"content-type": self.content_type, "etag": self.etag, "cache-control": "no-cache"}
        headers |= {"vary": "accept-encoding"} if self.compressed else {}
        return {**headers, "link": self.link} if self.link else headers

    @classmethod
    def of(cls, body: bytes, content_type: str) -> Asset:
        """Return a file with an entity tag of its contents."""
        compressed = gzip.compress(body, mtime=0)
        etag = f'W/"{hashlib.sha256(body).hexdigest()[:16]}"'
        return cls(body, content_type, etag, compressed if len(compressed) < len(body) else b"")

    def encoded(self, accepted: str) -> tuple[bytes, dict[str, str]]:
        """Return the body and all headers of a response to a request whose ``Accept-Encoding`` is this."""
        if self.compressed and "gzip" in accepted:
            return self.compressed, {**self.headers, "content-encoding": "gzip"}
        return self.body, self.headers


def load() -> dict[str, Asset]:
    """Return the files of the page by their paths in a URL, such as ``app.js``. The empty path is the page itself."""
    folder = resources.files("camserve").joinpath("page")
    found = dict(_assets(folder, "")) if folder.is_dir() else {}
    if INDEX not in found:
        return found
    # Without it, a browser learns of a module only from those that import it: the page took 11 % longer.
    modules = ", ".join(f"<{path}>; rel=modulepreload" for path in found if path.endswith(".js"))
    return {**found, "": replace(found[INDEX], link=modules)}


def _assets(folder: Traversable, prefix: str) -> Iterator[tuple[str, Asset]]:
    for file in folder.iterdir():
        if file.is_dir():
            yield from _assets(file, f"{prefix}{file.name}/")
        elif content_type := _TYPES.get(file.name.rpartition(".")[2]):
            yield prefix + file.name, Asset.of(file.read_bytes(), content_type)
