"""A manifest: the shards of a source and how they fall into groups, found from names, sizes and footers alone.

It lists and numbers; it reads no text. What lies inside a group is the affair of `stages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from zephon_ray.errors import SourceError
from zephon_ray.hashing import canonical_json, sha256_hex
from zephon_ray.recipe import Recipe
from zephon_ray.shards import Shard, find_shards, units_of
from zephon_ray.storage import Storage
from zephon_ray.text_column import locate

__all__ = ["Group", "Shard", "SourceManifest", "build_manifest", "build_manifests"]

FOOTERS_AT_ONCE = 16
"""How many footers are read at the same time; over a network most of that time is waiting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """What one worker reads in one pass, with everything that it must know to do so. It can be pickled.

    Args:
        source: index of the source in the recipe.
        source_name: for messages.
        group: number of the group within its source.
        shard: the file that holds it.
        ordinal: number of the byte range, row group or record batch within the shard.
        text_field: name or dotted path of the text.
        unit_bytes: size of a unit, >= 1.
        units: how many units it has; None where that is known only when its end is read.
    """

    source: int
    source_name: str
    group: int
    shard: Shard
    ordinal: int
    text_field: str
    unit_bytes: int
    units: int | None

    @property
    def streamed(self) -> bool:
        """Its units are found only by reading in order from the group's start."""
        return self.units != 1

    @property
    def where(self) -> str:
        """The place as messages name it."""
        return f"source {self.source_name!r}, shard {self.shard.path}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceManifest:
    """The shards of one source, in order, and the numbers of their groups.

    Args:
        source: index of the source in the recipe.
        name: of the source.
        text_field: name or dotted path of the text.
        unit_bytes: size of a unit, >= 1.
        shards: sorted by the UTF-8 bytes of their paths.
        group_starts: int64 [shards + 1]; shard i holds the groups [group_starts[i], group_starts[i + 1]).
    """

    source: int
    name: str
    text_field: str
    unit_bytes: int
    shards: tuple[Shard, ...]
    group_starts: npt.NDArray[np.int64] = field(compare=False, repr=False)

    @staticmethod
    def of(*, source: int, name: str, text_field: str, unit_bytes: int, shards: Sequence[Shard]) -> SourceManifest:
        """A manifest of shards that are in order already."""
        counts = np.fromiter((shard.num_groups(unit_bytes) for shard in shards), np.int64, len(shards))
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        return SourceManifest(
            source=source, name=name, text_field=text_field, unit_bytes=unit_bytes, shards=tuple(shards), group_starts=starts
        )

    @property
    def num_groups(self) -> int:
        return int(self.group_starts[-1])

    def group(self, number: int) -> Group:
        """The group of a number in [0, num_groups)."""
        if not 0 <= number < self.num_groups:
            raise IndexError(f"source {self.name!r} has no group {number}: it has {self.num_groups}")
        at = int(np.searchsorted(self.group_starts, number, side="right")) - 1
        shard, ordinal = self.shards[at], number - int(self.group_starts[at])
        units: int | None = None
        if shard.format == "parquet":
            units = units_of(shard.row_groups[ordinal][1], self.unit_bytes)
        elif shard.format == "jsonl" and shard.compression is None:
            units = 1
        return Group(
            source=self.source,
            source_name=self.name,
            group=number,
            shard=shard,
            ordinal=ordinal,
            text_field=self.text_field,
            unit_bytes=self.unit_bytes,
            units=units,
        )

    def digest(self) -> str:
        """sha256 (64 hex) of what the fingerprint knows of the data: paths and sizes, and for Parquet the row groups' sizes."""
        return sha256_hex(canonical_json([[shard.path, shard.size, [list(sizes) for sizes in shard.row_groups]] for shard in self.shards]))

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, for a run's directory."""
        return {
            "source": self.source,
            "name": self.name,
            "text_field": self.text_field,
            "unit_bytes": self.unit_bytes,
            "shards": [
                {
                    "path": shard.path,
                    "url": shard.url,
                    "size": shard.size,
                    "format": shard.format,
                    "compression": shard.compression,
                    "row_groups": [list(sizes) for sizes in shard.row_groups],
                    "batches": shard.batches,
                }
                for shard in self.shards
            ],
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> SourceManifest:
        """The manifest that `to_json` gave."""
        shards = [Shard(**{**shard, "row_groups": tuple((rows, size) for rows, size in shard["row_groups"])}) for shard in data["shards"]]
        return SourceManifest.of(**{**data, "shards": shards})


def build_manifests(recipe: Recipe, storage: Storage) -> list[SourceManifest]:
    """The manifests of all sources, in the recipe's order. See `build_manifest`."""
    return [build_manifest(recipe, index, storage) for index in range(len(recipe.sources))]


def build_manifest(recipe: Recipe, index: int, storage: Storage) -> SourceManifest:
    """List a source's shards and read the footers of those that have one.

    Args:
        recipe: the recipe.
        index: of the source in it.
        storage: where its URIs are looked up.

    Raises:
        SourceError: no shard, an ending that is not known, a footer that is cut or damaged, no text column, no group at all.
        StorageError: the store goes on failing.
    """
    spec = recipe.sources[index]
    shards = find_shards(storage, spec.name, recipe.source_url(index), spec.format)
    with ThreadPoolExecutor(FOOTERS_AT_ONCE) as pool:
        shards = list(pool.map(lambda shard: _with_footer(storage, spec.name, spec.text_field, shard), shards))
    manifest = SourceManifest.of(
        source=index, name=spec.name, text_field=spec.text_field, unit_bytes=recipe.unit_bytes_of(index), shards=shards
    )
    if not manifest.num_groups:
        raise SourceError(f"source {spec.name!r}: no document: its {len(shards)} files at {recipe.source_url(index)} hold no rows.")
    return manifest


def _with_footer(storage: Storage, name: str, text_field: str, shard: Shard) -> Shard:
    """The shard with what its footer says; JSON lines have none."""
    if shard.format == "jsonl":
        return shard
    where = f"source {name!r}, shard {shard.path}"
    try:
        with storage.open_input(shard.url) as file:
            if shard.format == "arrow":
                return replace(shard, batches=_record_batches(file, text_field, where))
            return replace(shard, row_groups=_row_groups(file, text_field, where))
    except (OSError, pa.ArrowException) as error:
        raise SourceError(f"{where}: not a whole {shard.format} file ({shard.size} bytes): {error}. Write or copy it again.") from error


def _row_groups(file: pa.NativeFile, text_field: str, where: str) -> tuple[tuple[int, int], ...]:
    """(rows, uncompressed bytes of the text column's chunk) of each row group."""
    with pq.ParquetFile(file) as parquet:
        metadata, leaf = parquet.metadata, locate(parquet.schema_arrow, text_field, where).leaf
        groups = (metadata.row_group(g) for g in range(metadata.num_row_groups))
        return tuple((int(group.num_rows), int(group.column(leaf).total_uncompressed_size)) for group in groups)


def _record_batches(file: pa.NativeFile, text_field: str, where: str) -> int:
    with pa.ipc.open_file(file) as reader:
        locate(reader.schema, text_field, where)
        return int(reader.num_record_batches)
