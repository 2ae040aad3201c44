"""A survey: what the sources of a recipe hold, from their manifests alone, or from reading all of it once.

It is for looking before a run. It decides no order, keeps no ids, and goes on after a record or a shard that is bad, so
that all of them are found at once.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from zephon_ray.errors import DataChangedError, UserError
from zephon_ray.manifest import Group, SourceManifest
from zephon_ray.plan.windows import UnitTask
from zephon_ray.recipe import Recipe
from zephon_ray.runners.base import Job
from zephon_ray.runners.registry import default_workers
from zephon_ray.stages.tokenise import Options, UnitTokeniser
from zephon_ray.stages.unit import TokenisedUnit

EXAMPLES = 20
"""So many bad records, and so many bad shards, are named a source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceIndex:
    """What the manifest of a source says.

    Args:
        name: of the source.
        url: where it lies.
        shards: files.
        size: bytes as stored.
        formats: shards of each format, as {"jsonl.gz": 3}, in the order of their names.
        groups: what is read in one pass each.
        units: None where it is known only when compressed or Arrow files are read.
        rows: records; known for Parquet only, else None.
        digest: of the manifest, 64 hex digits.
    """

    name: str
    url: str
    shards: int
    size: int
    formats: dict[str, int]
    groups: int
    units: int | None
    rows: int | None
    digest: str


def index_of(recipe: Recipe, manifest: SourceManifest) -> SourceIndex:
    """Count what a manifest holds."""
    kinds = [".".join(filter(None, (shard.format, shard.compression))) for shard in manifest.shards]
    known = all(kind in ("jsonl", "parquet") for kind in kinds)
    return SourceIndex(
        name=manifest.name,
        url=recipe.source_url(manifest.source),
        shards=len(manifest.shards),
        size=sum(shard.size for shard in manifest.shards),
        formats={kind: kinds.count(kind) for kind in sorted(set(kinds))},
        groups=manifest.num_groups,
        units=sum(manifest.group(g).units or 0 for g in range(manifest.num_groups)) if known else None,
        rows=sum(rows for shard in manifest.shards for rows, _ in shard.row_groups) if set(kinds) == {"parquet"} else None,
        digest=manifest.digest(),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceCensus:
    """What reading all of a source once has found.

    Args:
        name: of the source.
        units: that were read.
        documents: of at least two ids.
        ids: of the documents, bos and eos included.
        pairs: next-token pairs of them.
        text_bytes: UTF-8 bytes of texts, short documents included.
        bad, empty, short: records left out.
        longest: ids of the longest document.
        bad_records: where bad ones are and what is wrong with them, in file order; at most three a unit and `EXAMPLES` in all.
        bad_shards: what is wrong with shards that cannot be read to their end, at most `EXAMPLES`.
        unread_groups: groups that were not read to their end for that.
    """

    name: str
    units: int = 0
    documents: int = 0
    ids: int = 0
    pairs: int = 0
    text_bytes: int = 0
    bad: int = 0
    empty: int = 0
    short: int = 0
    longest: int = 0
    bad_records: tuple[str, ...] = ()
    bad_shards: tuple[str, ...] = ()
    unread_groups: int = 0

    def plus(self, other: SourceCensus) -> SourceCensus:
        """Of this part and of one that follows it."""
        sums = ("units", "documents", "ids", "pairs", "text_bytes", "bad", "empty", "short", "unread_groups")
        return SourceCensus(
            name=self.name,
            longest=max(self.longest, other.longest),
            bad_records=(self.bad_records + other.bad_records)[:EXAMPLES],
            bad_shards=(self.bad_shards + other.bad_shards)[:EXAMPLES],
            **{name: getattr(self, name) + getattr(other, name) for name in sums},
        )


def count_all(job: Job, on_unit: Callable[[str, int], None] = lambda _, __: None) -> list[SourceCensus]:
    """Read and tokenise every unit of one epoch, with as many threads as the recipe gives a runner.

    Args:
        job: on_bad_record of its options is not minded: bad records are counted.
        on_unit: told of every unit, from any thread: the source's name, and the UTF-8 bytes of its texts.

    Raises:
        StorageError: the store goes on failing.
    """
    readers = _Readers(replace(job.options, on_bad_record="skip"), on_unit)
    pool = ThreadPoolExecutor(default_workers(job.recipe), thread_name_prefix="zephon-survey")
    try:
        censuses = []
        for manifest in job.manifests:
            parts = pool.map(readers.count, map(manifest.group, range(manifest.num_groups)))
            censuses.append(functools.reduce(SourceCensus.plus, parts, SourceCensus(name=manifest.name)))
        return censuses
    finally:
        readers.stopped = True
        pool.shutdown(cancel_futures=True)
        readers.close()


class _Readers:
    """Counts groups, with a tokeniser for each thread that asks."""

    def __init__(self, options: Options, on_unit: Callable[[str, int], None]) -> None:
        self.stopped = False
        self._options, self._on_unit = options, on_unit
        self._own = threading.local()
        self._all: list[UnitTokeniser] = []

    def count(self, group: Group) -> SourceCensus:
        """Of one group, as far as it can be read."""
        census = SourceCensus(name=group.source_name)
        last = False
        while not last and not self.stopped:
            try:
                unit = self._tokeniser().tokenise(UnitTask(group=group, epoch=0, unit=census.units))
            except (UserError, DataChangedError) as error:
                return replace(census, bad_shards=(str(error),), unread_groups=1)
            census, last = census.plus(_counted(unit, group.source_name)), unit.last
            self._on_unit(group.source_name, unit.text_bytes)
        return census

    def close(self) -> None:
        for tokeniser in self._all:
            tokeniser.close()

    def _tokeniser(self) -> UnitTokeniser:
        if not hasattr(self._own, "tokeniser"):
            self._own.tokeniser = UnitTokeniser(self._options)
            self._all.append(self._own.tokeniser)
        tokeniser: UnitTokeniser = self._own.tokeniser
        return tokeniser


def _counted(unit: TokenisedUnit, name: str) -> SourceCensus:
    return SourceCensus(
        name=name,
        units=1,
        documents=unit.documents,
        ids=len(unit.ids),
        pairs=len(unit.ids) - unit.documents,
        text_bytes=unit.text_bytes,
        bad=unit.bad,
        empty=unit.empty,
        short=unit.short,
        longest=int(np.diff(unit.offsets).max(initial=0)),
        bad_records=unit.bad_examples,
    )


def problems_of(recipe: Recipe, censuses: Sequence[SourceCensus]) -> list[str]:
    """What would stop a run of the recipe, in sentences."""
    problems: list[str] = []
    for spec, census in zip(recipe.sources, censuses, strict=True):
        name = f"source {census.name!r}"
        problems += census.bad_shards
        if census.unread_groups > len(census.bad_shards):
            problems.append(f"{name}: {census.unread_groups} groups in all cannot be read to their end. Restore the files.")
        most = 0 if recipe.on_bad_record == "fail" else spec.max_bad_records
        if most is not None and census.bad > most:
            limit = "on_bad_record is fail" if recipe.on_bad_record == "fail" else f"max_bad_records={most}"
            mend = "on_bad_record: skip" if recipe.on_bad_record == "fail" else "a higher limit"
            problems += census.bad_records
            problems.append(f"{name}: {census.bad} bad records in all, and {limit}. Mend the data, or write {mend}.")
        if not census.pairs and not census.unread_groups:
            problems.append(f"{name}: no document of at least two ids. Look at text_field, or leave the source out.")
    return problems + _too_short(recipe, censuses)


def _too_short(recipe: Recipe, censuses: Sequence[SourceCensus]) -> list[str]:
    """Whether the epochs of all sources together cannot fill one batch."""
    needed = recipe.global_batch_size * recipe.sequence_length
    given = [census.pairs * spec.epochs for spec, census in zip(recipe.sources, censuses, strict=True) if spec.epochs is not None]
    if recipe.final_batch == "pad" or len(given) < len(recipe.sources) or sum(given) >= needed:
        return []
    short = f"the epochs of all sources give {sum(given)} next-token pairs, and one batch takes {needed}."
    return [f"{short} Give them more epochs or take a smaller batch, or write final_batch: pad."]
