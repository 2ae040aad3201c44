"""A feed that was started again: who may read it, and where it goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.feed.feeds import LIMIT_S, eventually, serving
from tests.feed.stand_in import Here
from tests.feed.test_feed_streams import serving as stream_of
from tests.feed.test_generations import Ranks, asks
from tests.small import a_recipe
from zephon_ray import connect
from zephon_ray.errors import FencedError, RefusedError
from zephon_ray.feed.protocol import ALIVE_S
from zephon_ray.recipe import Recipe
from zephon_ray.rundir import Readers

pytestmark = pytest.mark.timeout(90)

RUN_1 = Readers(feed="f", generation=3, incarnation="run:1", dp_world_size=2, reading=True)


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return a_recipe(tmp_path, execution={"prefetch_steps": 4})


def restored(readers: Readers = RUN_1, feed: str = "f") -> Ranks:
    ranks = Ranks()
    ranks.restore(readers, feed, now=100.0)
    return ranks


def test_after_a_restart_older_ranks_are_fenced_before_the_newer_ones_have_called() -> None:
    ranks = restored()
    with pytest.raises(FencedError, match=r"belongs to run:0, and run:1 reads the feed now"):
        ranks.enter(asks(0, incarnation="run:0"), "old", 0, 101.0)
    with pytest.raises(RefusedError, match=r"read by another run, run:1: its ranks may come back"):
        ranks.enter(asks(0, incarnation="other:7"), "stranger", 0, 101.0)
    assert ranks.awaited() == ([], 0)
    assert ranks.enter(asks(0, incarnation="run:1", start=5), "new", 5, 102.0)
    assert not ranks.enter(asks(1, incarnation="run:1", start=5), "newer", 7, 102.0)
    assert (ranks.number, ranks.slowest(102.0)) == (3, 5)


def test_after_a_restart_a_newer_start_begins_and_who_takes_over_does() -> None:
    assert restored().enter(asks(0, of=4, incarnation="run:2"), "a", 0, 101.0)
    assert restored().enter(asks(0, incarnation="other:0", takeover=True), "a", 0, 101.0)


def test_ranks_that_do_not_come_back_hold_nobody_off_for_longer_than_a_minute() -> None:
    assert restored().enter(asks(0, incarnation="run:0"), "a", 0, 100.0 + ALIVE_S)
    assert restored().enter(asks(0, incarnation="other:0"), "a", 0, 100.0 + ALIVE_S)


@pytest.mark.parametrize("readers", [RUN_1, Readers(feed="f", generation=3, incarnation="run:1", dp_world_size=2, reading=False)])
def test_a_feed_served_anew_and_one_whose_ranks_had_left_let_anyone_in(readers: Readers) -> None:
    ranks = restored(readers, "g" if readers.reading else "f")
    assert ranks.enter(asks(0, of=4, incarnation="other:0"), "a", 0, 100.0)
    assert ranks.number == 4, "generations of a run are counted on"


def test_the_directory_says_who_reads_and_that_they_have_left(recipe: Recipe, tmp_path: Path) -> None:
    note = tmp_path / "run" / "readers.json"
    with stream_of(recipe, tmp_path / "run", Here()) as served:
        ranks = [served.rank(r, of=2, incarnation="run:4") for r in range(2)]
        for rank in ranks:
            rank.steps(2)
        assert json.loads(note.read_text()) == {
            "feed": "", "generation": 1, "incarnation": "run:4", "dp_world_size": 2, "reading": True,
        }  # fmt: skip
        served.stream.leave(ranks[0].session)
        served.stream.leave(ranks[1].session)
        served.until(lambda: not json.loads(note.read_text())["reading"])
    note.write_text('{"feed":')
    with stream_of(recipe, tmp_path / "run", Here()) as served:
        served.rank(incarnation="other:0").steps(3)


def test_what_is_ahead_is_told_of_the_ranks_that_were_there_last(recipe: Recipe, tmp_path: Path) -> None:
    with stream_of(recipe, tmp_path / "run", Here()) as served:
        rank = served.rank()
        rank.steps(9)
        served.stream.leave(rank.session)
        status = served.status()
        assert (status.ranks, status.taken_step, status.due) == (0, 9, (1.0,))
        assert 0 <= status.steps_ahead <= recipe.execution.prefetch_steps


@pytest.fixture
def first(recipe: Recipe, tmp_path: Path, ray_session: None) -> Iterator[object]:
    with serving("restarted", recipe, tmp_path) as served:
        yield served


@pytest.mark.fault
def test_a_killed_feed_knows_its_newest_ranks_when_it_is_back(first: object, recipe: Recipe) -> None:
    with connect("restarted", incarnation="run:1", reconnect_s=LIMIT_S) as newer:
        assert next(newer).step == 1
        pid = first.status.pid  # type: ignore[attr-defined]
        first.kill()  # type: ignore[attr-defined]
        with connect("restarted", incarnation="run:0", reconnect_s=LIMIT_S) as older, pytest.raises(FencedError, match="run:1 reads"):
            next(older)
        assert eventually(lambda: first.status.pid) != pid  # type: ignore[attr-defined]
        assert next(newer).step == 2
