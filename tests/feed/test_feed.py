"""The feed on Ray: any number of ranks gets the same steps, whatever is killed on the way."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

import zephon_ray
from tests.feed.feeds import CALLER, Rank, Served, Step, eventually, folded, joined, ranks, serving, steps_of
from tests.small import a_recipe, documents, write_lines
from zephon_ray.errors import FeedError, FencedError, RefusedError, UserError
from zephon_ray.feed.client import FeedLoader
from zephon_ray.loader import STATE_KEY, Loader
from zephon_ray.recipe import Recipe
from zephon_ray.runs import verify
from zephon_ray.state import place_in

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("ray_session")]

STEPS = 40


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return a_recipe(tmp_path_factory.mktemp("corpus"), execution={"runner": "threads", "prefetch_steps": 6})


@pytest.fixture(scope="module")
def expected(recipe: Recipe) -> list[Step]:
    return steps_of(recipe, STEPS)


@pytest.fixture(scope="module")
def validation(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("validation")
    write_lines(folder / "v" / "0.jsonl", documents(30, seed=99))
    return a_recipe(folder, {"v": {"epochs": 1}}, final_batch="pad", on_exhausted="continue")


@pytest.fixture(scope="module")
def served(recipe: Recipe, validation: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One feed for all tests that leave it as they found it: their runs have names of their own."""
    with serving("shared", recipe, tmp_path_factory.mktemp("shared"), validation) as served:
        yield served


def opened(name: str, run: str, of: int = 1, **more: object) -> list[FeedLoader]:
    return [zephon_ray.connect(name, dp_rank=r, dp_world_size=of, incarnation=run, **more) for r in range(of)]  # type: ignore[arg-type]


def close(loaders: list[FeedLoader]) -> None:
    for loader in loaders:
        loader.close()


def read(loaders: list[FeedLoader], steps: int) -> list[Step]:
    """So many steps, in lockstep as training does."""
    return [joined([next(loader) for loader in loaders]) for _ in range(steps)]


def test_any_number_of_ranks_gets_the_same_steps_and_goes_on_as_any_other(served: Served, recipe: Recipe, expected: list[Step]) -> None:
    state = None
    for at, (size, steps) in enumerate([(1, 10), (2, 7), (4, 8)]):
        loaders = opened("shared", f"sizes:{at}", size, state=state)
        first = loaders[0].step
        assert read(loaders, steps) == expected[first : first + steps]
        states = {loader.state_dict()[STATE_KEY] for loader in loaders}
        assert len(states) == 1
        state = states.pop()
        close(loaders)
    with Loader(recipe) as loader:
        assert joined([next(loader) for _ in range(25)][-1:]) == expected[24]
        assert loader.state_dict()[STATE_KEY] == state


def test_before_the_first_batch_the_state_is_that_of_the_beginning(served: Served, recipe: Recipe) -> None:
    with zephon_ray.connect("shared") as loader, Loader(recipe) as plain:
        assert loader.state_dict() == plain.state_dict()
        assert loader.recipe.identity() == recipe.identity()


def test_a_loader_that_was_not_used_can_be_sent_elsewhere(served: Served, expected: list[Step]) -> None:
    with pickle.loads(pickle.dumps(zephon_ray.connect("shared"))) as loader:
        assert read([loader], 2) == expected[:2]
        with pytest.raises(TypeError, match="in use"):
            pickle.dumps(loader)


def test_a_loaded_state_is_gone_on_from(served: Served, expected: list[Step]) -> None:
    loaders = opened("shared", "load:0", 2)
    assert read(loaders, 6) == expected[:6]
    states = [loader.state_dict() for loader in loaders]
    assert read(loaders, 6) == expected[6:12]
    for loader, state in zip(loaders, states, strict=True):
        loader.load_state_dict(state)
    assert [loader.step for loader in loaders] == [6, 6]
    assert read(loaders, 6) == expected[6:12]
    close(loaders)


def test_each_validation_begins_at_the_first_step(served: Served, validation: Recipe) -> None:
    whole = steps_of(validation, 1000)
    for _ in range(2):
        loaders = opened("shared", "eval:0", 2, stream="validation")
        assert read(loaders, len(whole)) == whole
        assert [next(loader, None) for loader in loaders] == [None, None]
        close(loaders)
    status = served.status.streams["validation"]
    assert (status.ended, status.replay, status.kept_steps) == (len(whole), "hot", len(whole))


def test_peers_of_a_rank_get_the_same(served: Served, expected: list[Step]) -> None:
    peers = [zephon_ray.connect("shared", dp_rank=1, dp_world_size=2, incarnation="peers:0") for _ in range(2)]
    other = zephon_ray.connect("shared", dp_rank=0, dp_world_size=2, incarnation="peers:0")
    for step in range(5):
        one, two = (next(peer) for peer in peers)
        assert joined([next(other), one]) == expected[step]
        assert (one.inputs == two.inputs).all()
    close([*peers, other])


def test_older_ranks_are_fenced_and_strangers_refused(served: Served, expected: list[Step]) -> None:
    old = opened("shared", "fence:0", 2)
    assert read(old, 3) == expected[:3]
    new = opened("shared", "fence:1", 2)
    assert read(new, 3) == expected[:3]
    with pytest.raises(FencedError, match="fence:1 reads the feed now"):
        list(old[0])
    with pytest.raises(RefusedError, match="another run, fence:1"):
        next(zephon_ray.connect("shared", incarnation="stranger:0"))
    with zephon_ray.connect("shared", incarnation="stranger:0", takeover=True) as stranger:
        assert read([stranger], 2) == expected[:2]
    close([*old, *new])


def test_a_state_that_the_feed_does_not_want_to_hear_of_is_given_and_logs_nothing(
    served: Served, expected: list[Step], caplog: pytest.LogCaptureFixture
) -> None:
    """The rank is fenced, or the feed was started again: what Ray says of an error that nobody asks for is many lines."""
    (old,) = opened("shared", "quiet:0")
    read([old], 3)
    (new,) = opened("shared", "quiet:1")
    assert read([new], 1) == expected[:1]
    for _ in range(3):
        assert place_in(old.state_dict()[STATE_KEY])[0] == 3
        assert served.status.streams["train"].incarnation == "quiet:1"  # the feed has answered what was asked before
    close([old, new])
    assert caplog.messages == []


def test_what_does_not_fit_is_said(served: Served) -> None:
    with pytest.raises(UserError, match="needs an incarnation"):
        zephon_ray.connect("shared", dp_world_size=2)
    with pytest.raises(FeedError, match="feed 'no-such' is not there"):
        next(zephon_ray.connect("no-such", reconnect_s=0.5))
    with pytest.raises(zephon_ray.RecipeError, match="dp_world_size=3"):
        next(zephon_ray.connect("shared", dp_world_size=3, incarnation="misfit:0"))
    with pytest.raises(zephon_ray.StateError):
        next(zephon_ray.connect("shared", state=b"{}"))


def test_batches_that_were_dropped_hold_nothing_in_the_store(served: Served, expected: list[Step]) -> None:
    with ranks(Rank("shared", 0, 1, 30, "dropped:0", prefetch=3)) as (rank,):
        rank.read()
        assert folded([rank]) == expected[:30]
        # Two blocks of each step that is fetched ahead, of the one that is taken, and of the one before; and the call that is waiting.
        assert max(line["held"] for line in rank.steps) <= (3 + 2) * 2 + 1


@pytest.mark.fault
def test_a_killed_feed_comes_back_and_its_ranks_go_on(recipe: Recipe, expected: list[Step], tmp_path: Path) -> None:
    with serving("killed", recipe, tmp_path) as served:
        with ranks(*(Rank("killed", r, 2, STEPS, pace_s=0.05) for r in range(2))) as started:
            started[0].read(lambda line: line.get("step") == 12)
            served.kill()
            killed = time.time()
            for rank in started:
                rank.read()
        assert folded(started) == expected
        back = min(line["at"] for line in started[0].steps if line["at"] > killed and line["step"] > 16)
        assert back - killed < 20
        assert len({rank.lines[-1]["state"] for rank in started}) == 1
        # The new feed knows nothing of the first steps, and makes them again from its directory.
        last = bytes.fromhex(started[0].lines[-1]["state"])
        assert place_in(last) == (STEPS, bytes.fromhex(expected[-1].chain))
        with zephon_ray.connect("killed", incarnation="later:0", takeover=True) as again:
            assert read([again], 15) == expected[:15]
    assert verify(str(tmp_path / "train")).steps >= STEPS


@pytest.mark.fault
def test_a_killed_rank_s_job_starts_anew_where_it_was(recipe: Recipe, expected: list[Step], tmp_path: Path) -> None:
    with serving("torn", recipe, tmp_path) as served, ranks(*(Rank("torn", r, 2, STEPS, pace_s=0.05) for r in range(2))) as old:
        old[0].read(lambda line: line.get("step") == 9)
        old[0].process.kill()
        anew = opened("torn", "run:1", 2)
        assert read(anew, 9) == expected[:9]  # there was no checkpoint: from the beginning, and hot
        status = served.status.streams["train"]
        assert (status.replay, status.generation, status.incarnation) == ("hot", 2, "run:1")
        assert read(anew, 10) == expected[9:19]
        close(anew)
        assert "FencedError" in {line.get("error") for line in old[1].read()}


def test_a_stopped_feed_tells_its_ranks(recipe: Recipe, expected: list[Step], tmp_path: Path) -> None:
    with serving("stopped", recipe, tmp_path) as served:
        loader = zephon_ray.connect("stopped")
        assert read([loader], 3) == expected[:3]
        with pytest.raises(RefusedError, match=r"1 ranks read feed stopped: rank 0 at .* --force"):
            ray.get(served.actor.stop.remote(CALLER), timeout=60)
        ray.get(served.actor.stop.remote(CALLER, True), timeout=60)
        with pytest.raises(FeedError, match="was stopped"):
            list(loader)
        state = loader.state_dict()[STATE_KEY]  # the feed need not live
        loader.close()
    assert place_in(state)[0] >= 3
    assert eventually(lambda: verify(str(tmp_path / "train")).steps >= 3)
