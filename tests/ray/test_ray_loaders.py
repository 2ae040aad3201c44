"""Loaders opened and left in every way, one after the other on one cluster: none leaves anything behind."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import islice

import psutil
import pytest

from tests.core.runner_suite import eventually
from tests.ray.many_units import chains_of, many_units
from tests.ray_session import living
from tests.small import a_recipe
from zephon_ray.errors import UserError
from zephon_ray.loader import Loader
from zephon_ray.recipe import Recipe

pytestmark = pytest.mark.timeout(120)

GROWTH_BYTES = 8 << 20
"""Of this process, for all loaders after the first third; the allocator's own coming and going is less."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Larger than what is read ahead, so that a loader which is left is at work."""
    return many_units(tmp_path_factory.mktemp("many"), files=16, units=50, words=12, execution={"stall_seconds": 30})


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Comes to its end."""
    return a_recipe(tmp_path_factory.mktemp("short"), {"a": {"epochs": 1}})


def opened(recipe: Recipe) -> Loader:
    return Loader(recipe, runner="ray", workers=2)


def closed(recipe: Recipe, short: Recipe) -> None:
    loader = opened(recipe)
    assert [next(loader).step for _ in range(3)] == [1, 2, 3]
    loader.close()
    loader.close()
    assert next(loader, None) is None


def left_by_break(recipe: Recipe, short: Recipe) -> None:
    with opened(recipe) as loader:
        for batch in loader:
            if batch.step == 2:
                break


def forgotten(recipe: Recipe, short: Recipe) -> None:
    """Nobody closes it, and nobody has it any more."""
    loader = opened(recipe)
    next(loader)
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None


def left_by_error(recipe: Recipe, short: Recipe) -> None:
    with pytest.raises(ZeroDivisionError), opened(recipe) as loader:
        print(next(loader).step // 0)


def never_used(recipe: Recipe, short: Recipe) -> None:
    loader = opened(recipe)
    loader.close()
    with pytest.raises(UserError):
        next(loader)


def closed_by_another_thread(recipe: Recipe, short: Recipe) -> None:
    loader = opened(recipe)
    began, steps = threading.Event(), []

    def take() -> None:
        for batch in loader:
            steps.append(batch.step)
            began.set()

    taker = threading.Thread(target=take)
    taker.start()
    assert began.wait(60)
    loader.close()
    taker.join(30)
    assert not taker.is_alive()
    assert steps == list(range(1, len(steps) + 1))


def sent_back(recipe: Recipe, short: Recipe) -> None:
    with opened(recipe) as loader:
        next(loader)
        state = loader.state_dict()
        ahead = [next(loader).inputs.tobytes() for _ in range(2)]
        loader.load_state_dict(state)
        assert [next(loader).inputs.tobytes() for _ in range(2)] == ahead


def taken_to_its_end(recipe: Recipe, short: Recipe) -> None:
    loader = opened(short)  # and not closed: there is nothing more to come
    assert sum(1 for _ in loader) == len(chains_of(short))
    del loader
    gc.collect()


WAYS: list[Callable[[Recipe, Recipe], None]] = [
    closed, left_by_break, forgotten, left_by_error, never_used, closed_by_another_thread, sent_back, taken_to_its_end,
]  # fmt: skip


def our_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("zephon")}


def our_actors() -> int:
    return len(living("Mailbox"))


def at_work() -> int:
    found = 0
    for process in psutil.Process().children(recursive=True):
        try:
            found += any("ReadZephonUnits" in word for word in process.cmdline())
        except psutil.NoSuchProcess:
            continue
    return found


def held_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_full_info().uss)


def leave(ways: Iterator[Callable[[Recipe, Recipe], None]], recipe: Recipe, short: Recipe) -> None:
    for way in ways:
        before = our_threads()
        way(recipe, short)
        eventually(lambda before=before: our_threads() <= before, f"{way.__name__}: its threads end")


def nothing_is_left() -> None:
    eventually(lambda: not our_threads(), "no thread of ours is left")
    eventually(lambda: not our_actors(), "no actor of ours is left")
    eventually(lambda: not at_work(), "no worker is at work for us")


def test_a_loader_left_in_any_way_leaves_nothing_behind(recipe: Recipe, short: Recipe) -> None:
    leave(iter(WAYS), recipe, short)
    nothing_is_left()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_thirty_loaders_do_not_make_this_process_grow(recipe: Recipe, short: Recipe) -> None:
    ways = (WAYS[number % len(WAYS)] for number in range(30))
    leave(islice(ways, 10), recipe, short)
    nothing_is_left()
    before = held_bytes()
    leave(ways, recipe, short)
    nothing_is_left()
    assert held_bytes() - before < GROWTH_BYTES
