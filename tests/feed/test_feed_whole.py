"""The feed as it is served: lane workers, Ray Data, ranks in processes of their own, and kills at any time."""

from __future__ import annotations

import os
import random
import signal
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

import zephon_ray
from tests.feed.feeds import Rank, Step, eventually, folded, joined, ranks, serving, steps_of
from tests.feed.stand_in import open_whole
from tests.feed.test_production import lane_workers_of_ours
from tests.ray.many_units import many_units
from zephon_ray.recipe import Recipe
from zephon_ray.runs import verify

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("ray_session"), pytest.mark.fault]

STEPS = 60


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return many_units(tmp_path_factory.mktemp("corpus"), files=8, units=40, words=12, execution={"prefetch_steps": 4, "lane_workers": 2})


@pytest.fixture(scope="module")
def expected(recipe: Recipe) -> list[Step]:
    inline = recipe.model_copy(update={"execution": recipe.execution.model_copy(update={"runner": "inline"})})
    return steps_of(inline, STEPS)


def test_a_killed_lane_worker_costs_its_ranks_no_row(recipe: Recipe, expected: list[Step], tmp_path: Path) -> None:
    with serving("lanes", recipe, tmp_path, open_production=open_whole) as served:
        loaders = [zephon_ray.connect("lanes", dp_rank=r, dp_world_size=2, incarnation="run:0") for r in range(2)]
        found = [joined([next(loader) for loader in loaders]) for _ in range(10)]
        os.kill(eventually(lane_workers_of_ours)[0].pid, signal.SIGKILL)
        found += [joined([next(loader) for loader in loaders]) for _ in range(20)]
        assert found == expected[:30]
        assert served.status.streams["train"].reopened >= 1
        for loader in loaders:
            loader.close()
    assert verify(str(tmp_path / "train"), runner="inline").steps >= 30


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_two_feeds_of_four_ranks_under_random_kills(recipe: Recipe, expected: list[Step], tmp_path: Path, seed: int) -> None:
    pick = random.Random(seed)
    with ExitStack() as stack:
        feeds = [stack.enter_context(serving(f"f{seed}{n}", recipe, tmp_path / f"{n}", open_production=open_whole)) for n in range(2)]
        jobs = [
            stack.enter_context(ranks(*(Rank(feed.name, r, 4, STEPS, pace_s=0.02, reconnect_s=120) for r in range(4)))) for feed in feeds
        ]
        readers = [threading.Thread(target=rank.read) for job in jobs for rank in job]
        for reader in readers:
            reader.start()
        for at in sorted(pick.sample(range(5, STEPS - 10), 3)):
            feed, job = pick.choice(list(zip(feeds, jobs, strict=True)))
            eventually(lambda job=job, at=at: len(job[0].steps) >= at, 200)
            if pick.random() < 0.5:
                feed.kill()
            else:
                os.kill(pick.choice(eventually(lane_workers_of_ours)).pid, signal.SIGKILL)
        for reader in readers:
            reader.join(200)
        assert [folded(job) for job in jobs] == [expected, expected]
        assert len({rank.lines[-1]["state"] for job in jobs for rank in job}) == 1
    for n in range(2):
        assert verify(str(tmp_path / f"{n}" / "train"), runner="inline").steps >= STEPS
