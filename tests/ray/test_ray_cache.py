"""Workers of a cluster share a token cache: filled by them, it is all that a later stream on Ray reads, and gives the same bytes."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import yaml

from tests.core.runner_suite import FILES, job_of
from zephon_ray.loader import Loader
from zephon_ray.prewarm import prewarm
from zephon_ray.recipe import recipe_from_dict


@pytest.mark.timeout(240)
def test_a_cluster_fills_a_cache_and_streams_from_it(tmp_path: Path) -> None:
    plain = job_of(tmp_path / "data", FILES, [{"name": name, "uri": name} for name in ("plain", "packed", "rows")]).recipe
    data = yaml.safe_load(plain.to_yaml())
    data["execution"] |= {"token_cache": str(tmp_path / "cache"), "workers": {"min": 1, "max": 2}}
    recipe = recipe_from_dict(data, "/")

    filled = prewarm(recipe, runner="ray")
    assert filled.stats.written == filled.stats.units == filled.cache.entries > 20
    again = prewarm(recipe, runner="ray")
    assert (again.stats.written, again.stats.cached) == (0, filled.stats.units)

    with Loader(recipe, runner="ray", workers=2) as warm, Loader(plain, runner="inline") as reference:
        assert [b.chain for b in islice(warm, 40)] == [b.chain for b in islice(reference, 40)]
    stats = warm.stats()
    assert (stats.cached, stats.corrupt) == (stats.units, 0)
