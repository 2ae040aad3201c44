"""Samples: the first units of a source, tokenised, and what they say of its whole.

Sizes of text are *raw* bytes: those of the lines or the text column, decompressed, from which units are cut.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zephon_ray.errors import SourceError
from zephon_ray.manifest import Group, Shard, ShardFile, SourceManifest
from zephon_ray.manifest.shards import units_of
from zephon_ray.plan.windows import SourceCursor
from zephon_ray.runners.base import Job
from zephon_ray.stages.tokenise import Options, UnitTokeniser
from zephon_ray.stages.unit import TokenisedUnit, UnitTask
from zephon_ray.storage import Storage

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ENOUGH_UNITS, ENOUGH_BYTES = 2, 1 << 18
"""A source is sampled until so many units with documents, and so many bytes of text, are tokenised ..."""
TRIES = 12
"""... or so many units."""

_LENGTH_BYTES = 4
"""With which a column's value is stored."""
_HEAD_BYTES = 1 << 18
"""Stored bytes of a compressed file that are decompressed to see by how much it expands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What some units of a source say of its whole.

    Args:
        units: that were tokenised.
        raw_bytes: of all of them.
        documents, pairs, text_bytes: that they hold.
        longest: ids of their longest document.
        source_bytes: raw bytes of the whole source, estimated where it is compressed or Arrow.
        source_units: units of one epoch, estimated likewise.
        source_documents: documents of one epoch, estimated; for Parquet the rows.
        stored_bytes: bytes that are read from the store for that.
        largest_groups: raw bytes of the groups that can be entered at their start only, the largest of them, one a slot at most.
    """

    units: int
    raw_bytes: int
    documents: int
    pairs: int
    text_bytes: int
    longest: int
    source_bytes: int
    source_units: int
    source_documents: int
    stored_bytes: int
    largest_groups: tuple[int, ...]


def sample_sources(job: Job) -> list[Sample]:
    """Tokenise the first units with documents of some groups of each source, those of its first window before others.

    Raises:
        SourceError: a source has no document there, or cannot be read.
        DataChangedError, StorageError: as `UnitTokeniser.tokenise`.
    """
    options = replace(job.options, on_bad_record="skip")
    return [_sample(job, manifest, options) for manifest in job.manifests]


def _sample(job: Job, manifest: SourceManifest, options: Options) -> Sample:
    found: list[tuple[TokenisedUnit, _Raw]] = []
    tries = TRIES
    for group in _groups(job, manifest):
        unit, raw, looked = _first_with_documents(group, options, tries)
        tries -= looked
        if unit is not None and raw is not None:
            found.append((unit, raw))
        if not tries or (len(found) >= ENOUGH_UNITS and sum(unit.text_bytes for unit, _ in found) >= ENOUGH_BYTES):
            break
    if not found:
        raise SourceError(
            f"source {manifest.name!r}: no document in the {TRIES - tries} units that were looked at, so nothing can be estimated."
            " Look at text_field, or read all of it: zephon-ray validate --deep"
        )
    sizes = [size for shard in manifest.shards for size in _group_sizes(shard, manifest.unit_bytes, found)]
    raw_bytes, documents = sum(raw.unit_bytes for _, raw in found), sum(unit.documents for unit, _ in found)
    stored = sum(raw.stored_bytes for _, raw in found) / sum(raw.group_bytes for _, raw in found)
    rows = sum(rows for shard in manifest.shards for rows, _ in shard.row_groups)
    columns = all(shard.format == "parquet" for shard in manifest.shards)
    return Sample(
        units=len(found),
        raw_bytes=raw_bytes,
        documents=documents,
        pairs=sum(len(unit.ids) - unit.documents for unit, _ in found),
        text_bytes=sum(unit.text_bytes for unit, _ in found),
        longest=max(int(np.diff(unit.offsets).max()) for unit, _ in found),
        source_bytes=sum(sizes),
        source_units=sum(units_of(size, manifest.unit_bytes) for size in sizes),
        source_documents=rows if columns else max(1, round(sum(sizes) * documents / raw_bytes)),
        stored_bytes=round(sum(sizes) * min(1.0, stored)),
        largest_groups=tuple(_largest_streams(job, manifest, found)),
    )


def _groups(job: Job, manifest: SourceManifest) -> Iterator[Group]:
    """The groups of the first window, then the others."""
    first = [task.group for task in SourceCursor(job.recipe, manifest).tasks()]
    yield from first
    seen = {group.group for group in first}
    yield from (manifest.group(number) for number in range(manifest.num_groups) if number not in seen)


def _first_with_documents(group: Group, options: Options, tries: int) -> tuple[TokenisedUnit | None, _Raw | None, int]:
    """The first unit of a group that has documents, and how many units were looked at for it."""
    tokeniser = UnitTokeniser(options)  # a new one each, so that its counters are those of the group
    try:
        for number in range(tries):
            unit = tokeniser.tokenise(UnitTask(group=group, epoch=0, unit=number))
            if unit.documents:
                return unit, _raw(Storage(options.storage), group, unit, tokeniser.counters.bytes_read), number + 1
            if unit.last:
                return None, None, number + 1
        return None, None, tries
    finally:
        tokeniser.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Raw:
    """Raw bytes of a unit and of its group, the stored bytes of the group (whole, or as far as it was read), and its kind of file."""

    unit_bytes: int
    group_bytes: int
    stored_bytes: int
    kind: tuple[str, str | None]


def _raw(storage: Storage, group: Group, unit: TokenisedUnit, bytes_read: int) -> _Raw:
    shard = group.shard
    stored = bytes_read
    if group.text_size is not None:
        size = group.text_size
    elif shard.format == "arrow":
        size = bytes_read  # of the whole record batch, decompressed
    elif shard.compression:
        size, stored = int(shard.size * _expansion(storage, shard)), shard.size
    else:
        size = stored = min(shard.size - group.ordinal * group.unit_bytes, group.unit_bytes)
    if shard.format != "jsonl":
        # Cut by rows, not by bytes, so a unit may hold far more or less text than its part of the group.
        part = unit.text_bytes + _LENGTH_BYTES * unit.documents
    else:
        part = size - unit.unit * group.unit_bytes if unit.last else min(group.unit_bytes, size)
    return _Raw(unit_bytes=max(1, part), group_bytes=max(1, size), stored_bytes=stored, kind=(shard.format, shard.compression))


def _expansion(storage: Storage, shard: ShardFile) -> float:
    """Decompressed bytes for each stored byte, measured at the head of a compressed file."""
    with storage.open_input(shard.url) as file:
        head = bytes(file.read(_HEAD_BYTES))
    gzip = shard.compression == "gz"
    decompressor = zlib.decompressobj(wbits=31) if gzip else zstd.ZstdDecompressor()
    out = len(decompressor.decompress(head))
    return max(1.0, out / max(1, len(head) - len(decompressor.unused_data)))


def _group_sizes(shard: Shard, unit_bytes: int, found: Sequence[tuple[TokenisedUnit, _Raw]]) -> list[int]:
    """Raw bytes of each group of a shard."""
    if shard.format == "parquet":
        return [size for _, size in shard.row_groups]
    if shard.format == "jsonl" and shard.compression is None:
        return [min(unit_bytes, shard.size - start) for start in range(0, shard.size, unit_bytes)]
    alike = [raw for _, raw in found if raw.kind == (shard.format, shard.compression)]
    if shard.format == "arrow":
        batch = sum(raw.group_bytes for raw in alike) // len(alike) if alike else shard.size // max(1, shard.batches)
        return [batch] * shard.batches
    stored = sum(raw.stored_bytes for raw in alike)
    return [shard.size * sum(raw.group_bytes for raw in alike) // stored if stored else 3 * shard.size]


def _largest_streams(job: Job, manifest: SourceManifest, found: Sequence[tuple[TokenisedUnit, _Raw]]) -> list[int]:
    plain = ("jsonl", None)
    shards = (shard for shard in manifest.shards if (shard.format, shard.compression) != plain)
    sizes = (size for shard in shards for size in _group_sizes(shard, manifest.unit_bytes, found))
    cut = sorted((size for size in sizes if size > manifest.unit_bytes), reverse=True)
    return cut[: job.recipe.window_groups_of(manifest.source)]
