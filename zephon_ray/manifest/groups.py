"""Groups: what one worker reads in one pass, and the numbers that a source's manifest gives them.

It numbers; it opens no file. How shards come to be listed is the affair of `build`, what lies inside a group that of `stages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from zephon_ray.hashing import canonical_json, sha256_hex
from zephon_ray.manifest.shards import Shard, ShardFile, units_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """What one worker reads in one pass, with everything that it must know to do so. It can be pickled, and stays small: of its
    shard it knows the file and its own part, however many groups there are beside it.

    Args:
        source: index of the source in the recipe.
        source_name: for messages.
        group: number of the group within its source.
        shard: the file that holds it.
        shard_groups: how many groups that file holds, >= 1.
        ordinal: number of the byte range, row group or record batch within the shard.
        rows: records in it; known for Parquet only, else None.
        text_size: Parquet only: uncompressed bytes of the text column's chunk, else None.
        text_field: name or dotted path of the text.
        unit_bytes: size of a unit, >= 1.
        units: how many units it has; None where that is known only when its end is read.
    """

    source: int
    source_name: str
    group: int
    shard: ShardFile
    shard_groups: int
    ordinal: int
    rows: int | None
    text_size: int | None
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

    @property
    def text_bytes(self) -> int:
        """Bytes of its texts, as far as they are known unread: as encoded, where they are columns of Parquet, else all that is stored."""
        return sum(sum(size for _, size in shard.row_groups) if shard.row_groups else shard.size for shard in self.shards)

    def group(self, number: int) -> Group:
        """The group of a number in [0, num_groups).

        Raises:
            IndexError: there is no such group.
        """
        if not 0 <= number < self.num_groups:
            raise IndexError(f"source {self.name!r} has no group {number}: it has {self.num_groups}")
        at = int(np.searchsorted(self.group_starts, number, side="right")) - 1
        first, after = int(self.group_starts[at]), int(self.group_starts[at + 1])
        shard, ordinal = self.shards[at], number - first
        rows: int | None = None
        text_size: int | None = None
        units: int | None = None
        if shard.format == "parquet":
            rows, text_size = shard.row_groups[ordinal]
            units = units_of(text_size, self.unit_bytes)
        elif shard.format == "jsonl" and shard.compression is None:
            units = 1
        return Group(
            source=self.source,
            source_name=self.name,
            group=number,
            shard=shard.file,
            shard_groups=after - first,
            ordinal=ordinal,
            rows=rows,
            text_size=text_size,
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
