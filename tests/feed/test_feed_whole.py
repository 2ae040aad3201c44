"""The feed as it is served: lane workers, Ray Data, ranks in processes of their own, and kills at any time."""

from __future__ import annotations

import os
import random
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import zephon_ray
from tests.feed.feeds import Rank, Step, eventually, folded, joined, ranks, serving, steps_of
from tests.feed.stand_in import open_whole
from tests.feed.test_production import lane_workers_of_ours
from tests.ray.many_units import many_units, with_execution
from zephon_ray.feed.client import FeedLoader
from zephon_ray.recipe import Recipe
from zephon_ray.runs import verify

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("ray_session"), pytest.mark.fault]

STEPS = 60


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return many_units(tmp_path_factory.mktemp("corpus"), files=8, units=40, words=12, execution={"prefetch_steps": 4, "lane_workers": 2})


@pytest.fixture(scope="module")
def expected(recipe: Recipe) -> list[Step]:
    return steps_of(inline(recipe), STEPS)


def inline(recipe: Recipe) -> Recipe:
    return with_execution(recipe, runner="inline")


def test_a_killed_lane_worker_costs_no_row_and_a_rewind_after_it_reads_nothing(tmp_path: Path) -> None:
    recipe = many_units(tmp_path, files=4, units=24, words=12, execution={"prefetch_steps": 4, "lane_workers": 2})
    expected = steps_of(inline(recipe), 1000)
    with serving("lanes", recipe, tmp_path / "out", open_production=open_whole) as served:

        def read_on(loaders: list[FeedLoader], most: int) -> list[Step]:
            return [joined(parts) for _ in range(most) if all(parts := [next(loader, None) for loader in loaders])]

        def connected(**more: Any) -> list[FeedLoader]:
            return [zephon_ray.connect("lanes", dp_rank=r, dp_world_size=2, **more) for r in range(2)]

        loaders = connected(incarnation="run:0")
        found = read_on(loaders, 10)
        state = loaders[0].state_dict()
        os.kill(eventually(lane_workers_of_ours)[0].pid, signal.SIGKILL)
        assert found + read_on(loaders, len(expected)) == expected
        once = served.status.streams["train"]
        assert once.reopened == 1
        again = connected(incarnation="run:1", state=state)
        assert read_on(again, len(expected)) == expected[10:]
        twice = served.status.streams["train"]
        assert (twice.replay, twice.replays_hot, twice.units, twice.reopened) == ("hot", 1, once.units, 1)
        for loader in [*loaders, *again]:
            loader.close()
    assert verify(str(tmp_path / "out" / "train"), runner="inline").steps == len(expected)


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
