"""From a source's URI to documents: shards, groups, units, records, ids. All of it is held in memory."""

from __future__ import annotations

import fnmatch
import gzip
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
import pyarrow.parquet as pq
import xxhash
from tokenizers import Tokenizer

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ENDINGS = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
BOM = b"\xef\xbb\xbf"
MIB = 1024 * 1024


class Line(bytes):
    """A line of JSON, without its end. A column's value is plain bytes, or None."""


RawUnit = list[Line | bytes | None]
"""What a unit holds before it is looked at."""


class EmptySource(ValueError):
    """A source whose first epoch holds no pair."""


class BadRecord(ValueError):
    """A record that the contract calls bad."""


@dataclass
class Unit:
    """A unit after tokenisation.

    `documents` holds lists of ids (two at least each), `digest` the 64-bit digest of the unit's text,
    `left_out` the counts of bad records, empty texts and documents of fewer than two ids.
    """

    documents: list[list[int]] = field(default_factory=list)
    digest: int = 0
    left_out: list[int] = field(default_factory=lambda: [0, 0, 0])

    @property
    def pairs(self) -> int:
        return sum(len(ids) - 1 for ids in self.documents)


# --- shards ---------------------------------------------------------------------------------------------------------


def shards(uri: str, folder: Path) -> list[tuple[str, Path]]:
    """(path relative to the source's root, absolute path) of every shard of a local `uri`, in the order of the contract."""
    parts = uri.rstrip("/").split("/")
    magic = next((i for i, part in enumerate(parts) if any(c in part for c in "*?[")), None)
    if magic is not None:
        root = folder / "/".join(parts[:magic]) if magic else folder
        found = [(path, full) for path, full in _walk(root) if _matches(path.split("/"), parts[magic:])]
    elif (folder / uri).is_file():
        return [(parts[-1], folder / uri)]
    else:
        found = list(_walk(folder / uri))
    found = [(path, full) for path, full in found if not any(part[0] in "._" for part in path.split("/"))]
    return sorted(found, key=lambda shard: shard[0].encode())


def _walk(root: Path) -> Iterator[tuple[str, Path]]:
    for folder, _, names in os.walk(root, followlinks=False):
        for name in names:
            full = Path(folder, name)
            yield full.relative_to(root).as_posix(), full


def _matches(parts: list[str], patterns: list[str]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        if len(patterns) == 1:
            return bool(parts)
        return any(_matches(parts[i:], patterns[1:]) for i in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], patterns[0]) and _matches(parts[1:], patterns[1:])


def _format(path: str, given: str | None) -> tuple[str, str]:
    """(format, compression or nothing) of a shard."""
    plain, compression = path, ""
    if path.endswith((".gz", ".zst")):
        plain, _, compression = path.rpartition(".")
    if given is not None:
        return given, compression if given == "jsonl" else ""
    kind = next((kind for ending, kind in ENDINGS.items() if plain.endswith(ending)), None)
    if kind is None or (compression and kind != "jsonl"):
        raise ValueError(f"no format for {path}")
    return kind, compression


# --- groups and units -----------------------------------------------------------------------------------------------


def groups(source: dict[str, Any], unit_bytes: int, folder: Path) -> list[list[RawUnit]]:
    """The units of every group of a source, numbered as the contract numbers them."""
    found: list[list[RawUnit]] = []
    text_field = source.get("text_field", "text")
    for path, full in shards(source["uri"], folder):
        kind, compression = _format(path, source.get("format"))
        if kind == "parquet":
            found += _parquet_groups(full, text_field, unit_bytes)
        elif kind == "arrow":
            found += _arrow_groups(full, text_field, unit_bytes)
        elif compression:
            found.append(_compressed_group(_inflate(full.read_bytes(), compression), unit_bytes))
        else:
            found += _plain_groups(full.read_bytes(), unit_bytes)
    return found


def _inflate(data: bytes, compression: str) -> bytes:
    if not data:
        return b""
    return gzip.decompress(data) if compression == "gz" else zstd.decompress(data)


def _lines(data: bytes) -> Iterator[tuple[int, Line]]:
    """(offset of the first byte, line without its end) of each line. A byte order mark is dropped, but counts."""
    start = 0
    while start < len(data):
        end = data.find(b"\n", start)
        end = len(data) if end < 0 else end
        line = data[start:end]
        yield start, Line(line.removeprefix(BOM) if start == 0 else line)
        start = end + 1


def _plain_groups(data: bytes, unit_bytes: int) -> list[list[RawUnit]]:
    ranges: list[RawUnit] = [[] for _ in range(max(1, -(-len(data) // unit_bytes)))]
    for start, line in _lines(data):
        ranges[start // unit_bytes].append(line)
    return [[unit] for unit in ranges]


def _compressed_group(data: bytes, unit_bytes: int) -> list[RawUnit]:
    lines = list(_lines(data))
    last = lines[-1][0] if lines else 0
    units: list[RawUnit] = [[] for _ in range(1 + last // unit_bytes)]
    for start, line in lines:
        units[start // unit_bytes].append(line)
    return units


def _parquet_groups(path: Path, text_field: str, unit_bytes: int) -> list[list[RawUnit]]:
    file = pq.ParquetFile(path)
    found = []
    for number in range(file.metadata.num_row_groups):
        row_group = file.metadata.row_group(number)
        chunks = [row_group.column(c) for c in range(row_group.num_columns)]
        size = next(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == text_field)
        found.append(_cut(_values(file.read_row_group(number), text_field), size, unit_bytes))
    return found


def _arrow_groups(path: Path, text_field: str, unit_bytes: int) -> list[list[RawUnit]]:
    found = []
    with pa.ipc.open_file(path) as reader:
        for number in range(reader.num_record_batches):
            values = _values(pa.Table.from_batches([reader.get_batch(number)]), text_field)
            found.append(_cut(values, sum(len(value) for value in values if value is not None), unit_bytes))
    return found


def _cut(values: RawUnit, size: int, unit_bytes: int) -> list[RawUnit]:
    rows, units = len(values), max(1, -(-size // unit_bytes))
    return [values[i * rows // units : (i + 1) * rows // units] for i in range(units)]


def _values(table: pa.Table, text_field: str) -> RawUnit:
    if text_field in table.column_names:
        column = table[text_field]
    else:
        first, *rest = text_field.split(".")
        column = pc.struct_field(table[first], rest)
    column = column.combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    values: RawUnit = column.cast(pa.large_binary()).to_pylist()
    return values


# --- documents ------------------------------------------------------------------------------------------------------


def _text(record: Line | bytes | None, text_field: str, limit: int) -> str | None:
    """The text of a record, or None (or "") where it is empty.

    Raises:
        BadRecord: what the contract calls a bad record.
    """
    if record is None:
        return None
    if len(record) > limit:
        raise BadRecord(f"{len(record)} bytes")
    try:
        if not isinstance(record, Line):
            return record.decode("utf-8", "strict")
        value = json.loads(record.decode("utf-8", "strict"))
        if not isinstance(value, dict):
            raise BadRecord("no object")
        for key in [text_field] if text_field in value else text_field.split("."):
            if not isinstance(value, dict) or key not in value:
                raise BadRecord("no such field")
            value = value[key]
        if not isinstance(value, str | None):
            raise BadRecord("neither string nor null")
        if value is not None:
            value.encode("utf-8", "strict")
        return value
    except (ValueError, RecursionError) as fault:
        raise BadRecord(str(fault)) from fault


class Documents:
    """Turns the raw units of one recipe into documents of ids."""

    def __init__(self, recipe: dict[str, Any], folder: Path) -> None:
        spec = recipe["tokenizer"]
        self._tokenizer = Tokenizer.from_file(str(folder / spec["path"]))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = spec.get("special_tokens_in_text", "plain") != "control"
        self._bos, self._eos, self.pad = (self._special(spec.get(name)) for name in ("bos", "eos", "pad"))
        self._limit = recipe.get("max_document_bytes", 64 * MIB)
        self._skip = recipe.get("on_bad_record", "fail") == "skip"
        self._known: dict[str, list[int]] = {}

    def _special(self, token: str | None) -> list[int]:
        if token is None:
            return []
        number = self._tokenizer.token_to_id(token)
        if number is None:
            raise ValueError(f"the tokenizer lacks {token!r}")
        return [number]

    def ids(self, text: str) -> list[int]:
        if text not in self._known:
            encoded = self._tokenizer.encode(text, add_special_tokens=False).ids
            self._known[text] = self._bos + encoded + self._eos
        return self._known[text]

    def unit(self, raw: RawUnit, text_field: str) -> Unit:
        """The documents of a unit.

        Raises:
            BadRecord: a record is bad, and the recipe does not skip it.
        """
        unit, texts = Unit(), []
        for record in raw:
            if isinstance(record, Line) and not record.strip(b" \t\r"):
                continue
            try:
                text = _text(record, text_field, self._limit)
            except BadRecord:
                if not self._skip:
                    raise
                unit.left_out[0] += 1
                continue
            if not text:
                unit.left_out[1] += 1
                continue
            texts.append(text.encode())
            if len(self.ids(text)) < 2:
                unit.left_out[2] += 1
            else:
                unit.documents.append(self.ids(text))
        lengths = b"".join(len(text).to_bytes(8, "little") for text in texts)
        unit.digest = xxhash.xxh3_64_intdigest(lengths + b"".join(texts))
        return unit
