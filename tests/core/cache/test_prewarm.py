"""A cache is filled once, by any runner; what is there is not made again, and what cannot be kept is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.cache.test_token_cache import cached, entries, run
from tests.core.runner_suite import FILES, job_of
from tests.small import a_recipe, documents, write_lines
from zephon_ray.errors import BadRecordError, UserError
from zephon_ray.prewarm import Progress, prewarm
from zephon_ray.recipe import Recipe


def of_every_format(folder: Path, cache: Path) -> Recipe:
    sources = [{"name": name, "uri": name} for name in ("plain", "packed", "rows")]
    return cached(job_of(folder, FILES, sources).recipe, cache)


def test_a_filled_cache_is_all_that_a_run_reads(tmp_path: Path) -> None:
    recipe = of_every_format(tmp_path / "data", tmp_path / "cache")
    seen: list[Progress] = []
    filled = prewarm(recipe, runner="threads", workers=2, on_progress=seen.append)
    assert filled.stats.written == filled.stats.units == filled.cache.entries == len(entries(tmp_path / "cache"))
    assert filled.cache.size == sum(path.stat().st_size for path in entries(tmp_path / "cache"))
    assert filled.not_kept == 0
    assert (seen[-1].groups, seen[-1].units) == (seen[-1].of_groups, filled.stats.units)
    warm = run(recipe, 60)
    assert warm.stats.cached == warm.stats.units > 0
    assert (
        warm.chains == run(job_of(tmp_path / "data", FILES, [{"name": n, "uri": n} for n in ("plain", "packed", "rows")]).recipe, 60).chains
    )


def test_one_that_was_stopped_is_gone_on_with(tmp_path: Path) -> None:
    recipe = of_every_format(tmp_path / "data", tmp_path / "cache")

    def stop(done: Progress) -> None:
        if done.units == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prewarm(recipe, runner="threads", workers=2, on_progress=stop)
    there = len(entries(tmp_path / "cache"))
    assert there >= 10
    filled = prewarm(recipe, runner="inline")
    assert filled.stats.cached >= there
    assert filled.stats.cached + filled.stats.written == filled.stats.units == filled.cache.entries


def test_what_cannot_be_filled_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="token_cache is not set"):
        prewarm(a_recipe(tmp_path), runner="inline")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="none of 9 units could be kept"):
        prewarm(cached(a_recipe(tmp_path), tmp_path / "file"), runner="inline")
    with pytest.raises(UserError, match=r"address=127\.0\.0\.1:1 is of a Ray cluster"):
        prewarm(cached(a_recipe(tmp_path), tmp_path / "cache"), runner="inline", address="127.0.0.1:1")
    write_lines(tmp_path / "a" / "9.jsonl", [*documents(3), 7])
    with pytest.raises(BadRecordError, match=r"9\.jsonl"):
        prewarm(cached(a_recipe(tmp_path), tmp_path / "cache"), runner="inline")
