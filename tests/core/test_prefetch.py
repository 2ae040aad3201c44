"""Prefetch: batches made in a thread come in order, are bounded, and are waited for neither too long nor one by one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import pytest

from tests.core.runner_suite import WAIT_S, eventually
from zephon_ray import prefetch
from zephon_ray.batches import GlobalBatch
from zephon_ray.prefetch import Prefetch

DEPTH = 4


class Batch(GlobalBatch):
    """A batch of which only the step is there."""

    def __init__(self, step: int) -> None:
        object.__setattr__(self, "step", step)


class Maker:
    """Makes so many batches, and then what it is given."""

    def __init__(self, batches: int, then: Callable[[], None] = lambda: None) -> None:
        self.batches, self.then, self.made = batches, then, 0

    def __call__(self) -> GlobalBatch | None:
        if self.made == self.batches:
            return self.then()
        self.made += 1
        return Batch(self.made)


@contextmanager
def started(
    make: Callable[[], GlobalBatch | None],
    rest: Callable[[], bool] = lambda: False,
    watch: Callable[[], Exception | None] = lambda: None,
    depth: int = DEPTH,
) -> Iterator[Prefetch]:
    made = Prefetch(make, depth, rest=rest, watch=watch)
    try:
        yield made
    finally:
        made.close()
        made.join(WAIT_S)
        assert "zephon-prefetch" not in [thread.name for thread in threading.enumerate()]


def step(batch: GlobalBatch | None) -> int:
    return cast(GlobalBatch, batch).step


@pytest.mark.parametrize("depth", [1, 2, 3, 8])
def test_batches_come_in_order_and_the_end_again_and_again(depth: int) -> None:
    with started(Maker(50), depth=depth) as made:
        assert [step(made.take()) for _ in range(50)] == [*range(1, 51)]
        assert [made.take(), made.take()] == [None, None]


def test_an_error_comes_after_the_batches_before_it_again_and_again() -> None:
    def fail() -> None:
        raise OSError("gone")

    with started(Maker(3, fail)) as made:
        assert [step(made.take()) for _ in range(3)] == [1, 2, 3]
        for _ in range(2):
            with pytest.raises(OSError, match="gone"):
                made.take()


def test_never_more_is_made_than_its_depth_and_all_of_that() -> None:
    make = Maker(100)
    with started(make) as made:
        eventually(lambda: make.made == DEPTH, "as many as may be")
        for taken in range(1, 60):
            assert step(made.take()) == taken
            assert make.made <= taken + DEPTH + 1  # one is handed over when it is made
        eventually(lambda: make.made == 59 + DEPTH or make.made >= 59 + DEPTH // 2, "it goes on")


@pytest.mark.parametrize("left", [1, 2])
def test_who_waits_gets_a_batch_though_no_other_comes(left: int) -> None:
    gate = threading.Event()
    with started(Maker(left, lambda: cast(None, gate.wait(WAIT_S) and None)), depth=8) as made:
        began = time.monotonic()
        assert [step(made.take()) for _ in range(left)] == [*range(1, left + 1)]
        assert time.monotonic() - began < WAIT_S / 2
        gate.set()
        assert made.take() is None


def test_while_nothing_is_to_be_made_it_does_what_else_there_is_until_that_is_done() -> None:
    rested = iter([True] * 5 + [False] * 1000)
    calls: list[bool] = []

    def rest() -> bool:
        calls.append(next(rested))
        return calls[-1]

    make = Maker(100)
    with started(make, rest) as made:
        eventually(lambda: len(calls) == 6, "it rests until nothing is left to do")
        time.sleep(0.05)
        assert (len(calls), make.made) == (6, DEPTH), "and then it waits"
        for _ in range(DEPTH // 2):
            made.take()
        eventually(lambda: make.made == 2 * DEPTH - DEPTH // 2, "and goes on when there is room")


def test_an_error_while_it_does_something_else_comes_after_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any class: a tokenizer's panic is no Exception."""

    def rest() -> bool:
        raise KeyboardInterrupt("panic")

    with started(Maker(100), rest) as made:
        assert [step(made.take()) for _ in range(DEPTH)] == [*range(1, DEPTH + 1)]
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt, match="panic"):
                made.take()


def test_room_is_seen_while_it_does_something_else() -> None:
    make = Maker(100)
    with started(make, lambda: True) as made:
        assert [step(made.take()) for _ in range(40)] == [*range(1, 41)]


def test_who_waits_is_told_that_the_thread_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "WATCH_S", 0.05)
    gate, errors = threading.Event(), iter([None, None, RuntimeError("stuck")])
    with started(Maker(1, lambda: cast(None, gate.wait(WAIT_S) and None)), watch=lambda: next(errors, None)) as made:
        assert step(made.take()) == 1
        with pytest.raises(RuntimeError, match="stuck"):
            made.take()
        gate.set()
        assert made.take() is None, "and may go on waiting"


def test_closing_ends_a_wait() -> None:
    gate = threading.Event()
    with started(Maker(0, lambda: cast(None, gate.wait(WAIT_S) and None))) as made:
        taken: list[GlobalBatch | None] = []
        waiter = threading.Thread(target=lambda: taken.append(made.take()))
        waiter.start()
        time.sleep(0.05)
        made.close()
        waiter.join(WAIT_S)
        assert taken == [None]
        gate.set()
