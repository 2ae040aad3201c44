"""Building a manifest: a source's shards listed, and the footers of those that have one read. No text is read."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq

from zephon_ray.errors import SourceError
from zephon_ray.manifest.groups import SourceManifest
from zephon_ray.manifest.shards import Shard, find_shards
from zephon_ray.manifest.text_column import locate
from zephon_ray.recipe import Recipe
from zephon_ray.storage import Storage

FOOTERS_AT_ONCE = 16
"""How many footers are read at the same time; over a network most of that time is waiting."""


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
        raise SourceError(
            f"source {spec.name!r}: no document: its {len(shards)} files at {recipe.source_url(index)} hold no rows."
            " Look at the uri, or leave the source out."
        )
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
