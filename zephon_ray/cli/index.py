"""`index`: the manifests of all sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from zephon_ray.cli.render import emit, number, show, size, table
from zephon_ray.hashing import canonical_json
from zephon_ray.manifest import build_manifests
from zephon_ray.recipe import load_recipe
from zephon_ray.recipe_fields import is_url
from zephon_ray.storage import Storage
from zephon_ray.survey import SourceIndex, index_of


def list_sources(path: str, overrides: Sequence[str], out: str | None, *, as_json: bool) -> int:
    """List shards, and write the manifests if asked to. Returns the exit code."""
    recipe = load_recipe(path, overrides)
    storage = Storage(recipe.execution.storage)
    manifests = build_manifests(recipe, storage)
    indexes = [index_of(recipe, manifest) for manifest in manifests]
    written = []
    if out is not None:
        folder = out if is_url(out) else str(Path(out).absolute())
        for manifest in manifests:
            place = storage.join(folder, f"{manifest.source:04d}.json")
            storage.write_bytes(place, canonical_json(manifest.to_json()))
            written.append(place)
    if as_json:
        sources = [{**asdict(i), "manifest": m.to_json()} for i, m in zip(indexes, manifests, strict=True)]
        emit({"recipe": recipe.name, "sources": sources, "written": written})
    else:
        show(source_table(indexes))
        show(*(f"written: {place}" for place in written))
    return 0


def source_table(indexes: Sequence[SourceIndex]) -> Table:
    """What the manifests say, a row a source."""
    rows = (
        (
            i.name,
            ", ".join(f"{n} {kind}" for kind, n in i.formats.items()),
            size(i.size),
            f"{i.groups:,}",
            "when read" if i.units is None else f"{i.units:,}",
            "when read" if i.rows is None else number(i.rows),
            i.url,
        )
        for i in indexes
    )
    return table(("source", "shards", "bytes", "groups", "units", "documents", "where"), rows, words=(0, 1, 6))
