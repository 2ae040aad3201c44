"""Tokenising with a cache before it: what workers have in place of a bare tokeniser."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from zephon_ray.cache.keys import Names, Versions
from zephon_ray.cache.store import CacheCounters, TokenCache
from zephon_ray.plan.windows import UnitTask
from zephon_ray.stages.tokenise import Options, TokeniserCounters, UnitTokeniser
from zephon_ray.stages.unit import TokenisedUnit
from zephon_ray.storage import Storage

_NOTHING = TokeniserCounters(units=0, text_bytes=0, skipped_bytes=0, bytes_read=0, remade=0)


class CachedTokeniser:
    """Gives units from a cache, and tokenises and keeps the others. One instance a worker, like the tokeniser behind it.

    The tokenizer is loaded, and a shard opened, when the first unit is not there. So a unit in the middle of a stream that is there costs
    nothing of what lies before it.

    Args:
        options: of the run.
        cache: where units are kept.
    """

    def __init__(self, options: Options, cache: TokenCache) -> None:
        self._options, self._cache = options, cache
        self._names, self._versions = Names(options), Versions(Storage(options.storage))
        self._tokeniser: UnitTokeniser | None = None
        self.given = 0
        """Units that came from the cache."""

    @property
    def counters(self) -> TokeniserCounters:
        """Of the tokeniser: units from the cache are not among them."""
        return _NOTHING if self._tokeniser is None else self._tokeniser.counters

    @property
    def cache_counters(self) -> CacheCounters:
        return self._cache.counters

    def tokenise(self, task: UnitTask) -> TokenisedUnit:
        """A unit, as `UnitTokeniser.tokenise` gives it and raises."""
        unit = self._unit(task)
        return _without_ids(unit) if self._options.only_fill_cache else unit

    def _unit(self, task: UnitTask) -> TokenisedUnit:
        tag = self._versions.tag(task.group.shard)
        if tag is None:
            return self._by_text(task)
        name = self._names.of_unit(task, tag)
        found = self._cache.get(name, task)
        if found is not None and not (found.bad and self._options.on_bad_record == "fail"):
            self.given += 1
            return found
        unit = self._behind().tokenise(task)
        # If the shard was changed while it was read, nobody knows of which state this is.
        if unit.error is None and self._versions.tag(task.group.shard, anew=True) == tag:
            self._cache.put(name, unit, task)
        return unit

    def _by_text(self, task: UnitTask) -> TokenisedUnit:
        """A unit of a shard whose states nothing tells apart: it is read, and its ids are looked up by its texts."""
        tokeniser = self._behind()
        read = tokeniser.read(task)
        if read.error is not None or not len(read.texts):
            return tokeniser.encode(task, read)
        name = self._names.of_texts(read.texts)
        found = self._cache.get(name, task)
        if found is None:
            unit = tokeniser.encode(task, read)
            self._cache.put(name, replace(unit, last=False, bad=0, empty=0, bad_examples=()), task)
            return unit
        self.given += 1
        left_out = read.left_out
        return replace(found, last=read.last, bad=left_out.bad, empty=left_out.empty, bad_examples=tuple(left_out.examples))

    def _behind(self) -> UnitTokeniser:
        self._tokeniser = self._tokeniser or UnitTokeniser(self._options)
        return self._tokeniser

    def close(self) -> None:
        """Close the shards that are open. The instance can go on afterwards."""
        if self._tokeniser is not None:
            self._tokeniser.close()


def _without_ids(unit: TokenisedUnit) -> TokenisedUnit:
    return replace(unit, ids=np.empty(0, np.uint32), offsets=np.zeros(1, np.int64))


Tokeniser = UnitTokeniser | CachedTokeniser


def open_tokeniser(options: Options) -> Tokeniser:
    """What makes the units of a worker: with a cache before it where the options name one."""
    if options.token_cache is None:
        return UnitTokeniser(options)
    return CachedTokeniser(options, TokenCache(options.token_cache, options.token_cache_bytes, options.storage))
