"""Shards: the files that a source's URI stands for, in the order of the contract. No file is opened here.

A URI is a file, a folder or a glob. What is listed, and in which order, depends on names alone: never on the order in which a disk or
a store lists them.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from zephon_ray.errors import SourceError
from zephon_ray.storage import Listed, Storage, is_local

Format = Literal["jsonl", "parquet", "arrow"]
Compression = Literal["gz", "zst"]

_ENDINGS: dict[str, Format] = {
    ".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow",
}  # fmt: skip
_WILD = "*?["


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFile:
    """The file of a shard: what opening and decoding it takes.

    Args:
        path: relative to the source's root, parts joined by `/`.
        url: absolute path or URL to open.
        size: bytes as stored.
        format: how its records are laid out.
        compression: of JSON lines; None where they lie plain.
    """

    path: str
    url: str
    size: int
    format: Format
    compression: Compression | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard(ShardFile):
    """One file of a source, with what its footer says.

    Args:
        row_groups: Parquet only: (rows, uncompressed bytes of the text column's chunk) of each row group.
        batches: Arrow IPC only: number of record batches.
    """

    row_groups: tuple[tuple[int, int], ...] = ()
    batches: int = 0

    @property
    def file(self) -> ShardFile:
        """The file alone: what a worker is told of the shard, which must not grow with its groups."""
        return ShardFile(path=self.path, url=self.url, size=self.size, format=self.format, compression=self.compression)

    def num_groups(self, unit_bytes: int) -> int:
        """How many groups the shard holds. Only Parquet and Arrow files may hold none."""
        if self.format == "parquet":
            return len(self.row_groups)
        if self.format == "arrow":
            return self.batches
        return 1 if self.compression else units_of(self.size, unit_bytes)


def units_of(size: int, unit_bytes: int) -> int:
    """How many units `size` bytes are cut into: at least one."""
    return max(1, -(-size // unit_bytes))


def find_shards(storage: Storage, name: str, uri: str, format: Format | None) -> list[Shard]:
    """The shards of a source, sorted by the UTF-8 bytes of their paths, without what their footers say.

    Args:
        storage: where to look.
        name: of the source, for messages.
        uri: absolute path or URL of a file, folder or glob.
        format: of all shards; None: each by its ending.

    Raises:
        SourceError: no shard, a name with no known ending, a link that leads nowhere, no access.
        StorageError: the store goes on failing.
    """
    try:
        found = _find(storage, uri)
    except PermissionError as error:
        raise SourceError(f"source {name!r}: no access to {error.filename or uri}. Give this user the right to read it.") from error
    except FileNotFoundError:
        found = []
    if not found:
        raise SourceError(
            f"source {name!r}: no shard at {uri}. Check the uri: it names a file, a folder or a glob; "
            "below the folder, names that start with '.' or '_' are left out."
        )
    shards = [_shard(name, path, url, size, format) for path, url, size in found]
    return sorted(shards, key=lambda shard: shard.path.encode())


def _find(storage: Storage, uri: str) -> list[tuple[str, str, int]]:
    """(relative path, url, size) of the files, in any order."""
    if any(character in uri for character in _WILD):
        root, pattern = split_glob(uri)
        depth = None if "**" in pattern else len(pattern)
        found = [item for item in _below(storage, root, depth) if matches(tuple(item[0].split("/")), pattern)]
        if found:
            return found
    # A name may hold the characters of a glob.
    kind = storage.kind(uri)
    if kind == "file" and not uri.endswith("/"):
        size = storage.size(uri)
        if size or is_local(uri):
            return [(uri.rsplit("/", 1)[1], uri, size)]
        # In a bucket an object of no bytes may stand for the folder of the same name.
        return _below(storage, uri, None) or [(uri.rsplit("/", 1)[1], uri, size)]
    return _below(storage, uri, None)


def split_glob(uri: str) -> tuple[str, tuple[str, ...]]:
    """The root of a glob (its longest leading part without wildcards, cut at a `/`) and the parts of the pattern below it."""
    first = min(at for character in _WILD if (at := uri.find(character)) >= 0)
    cut = uri.rindex("/", 0, first)
    return uri[:cut] or "/", tuple(uri[cut + 1 :].split("/"))


def matches(path: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Whether the parts of a path fit the parts of a glob.

    `**` as a whole part stands for any number of parts, as the last one for at least one; within a part, `*`, `?` and `[...]` mean what
    they do in a shell. Case counts.
    """

    @functools.cache
    def fit(i: int, j: int) -> bool:
        if j == len(pattern):
            return i == len(path)
        if pattern[j] == "**":
            return i < len(path) if j == len(pattern) - 1 else any(fit(k, j + 1) for k in range(i, len(path) + 1))
        return i < len(path) and fnmatch.fnmatchcase(path[i], pattern[j]) and fit(i + 1, j + 1)

    return fit(0, 0)


def _below(storage: Storage, root: str, depth: int | None) -> list[tuple[str, str, int]]:
    try:
        return list(_visible(storage, root, storage.list_files(root, depth=depth)))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _visible(storage: Storage, root: str, listed: list[Listed]) -> Iterator[tuple[str, str, int]]:
    for path, size, is_mark in listed:
        if not is_mark and not any(part.startswith((".", "_")) for part in path.split("/")):
            yield path, storage.join(root, path), size


def _shard(name: str, path: str, url: str, size: int, format: Format | None) -> Shard:
    """A shard from its name and size."""
    where = f"source {name!r}, shard {path!r}"
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise SourceError(f"{where}: its name is not valid UTF-8. Rename it.") from error
    if url.startswith("s3://") and "//" in url.removeprefix("s3://"):
        raise SourceError(f"{where}: its key has an empty part ('//'), which pyarrow cannot open. Copy the object to another key.")
    if size < 0:
        raise SourceError(f"{where}: a link that leads nowhere. Restore what it stands for, or remove it.")
    stem, compression = path, None
    for ending in ("gz", "zst"):
        if path.endswith("." + ending):
            stem, compression = path.removesuffix("." + ending), ending
    known = format or next((kind for ending, kind in _ENDINGS.items() if stem.endswith(ending)), None)
    if known is None or (format is None and compression and known != "jsonl"):
        raise SourceError(
            f"{where}: its ending says no format. Known are {', '.join(_ENDINGS)}, and .gz and .zst of the first three (case counts). "
            "Write `format: jsonl`, `parquet` or `arrow` for the source, or a glob that leaves the file out."
        )
    return Shard(path=path, url=url, size=size, format=known, compression=compression if known == "jsonl" else None)  # type: ignore[arg-type]
