"""Retention: a range without a gap, what must be kept is kept, and what need not be costs no more than its budget."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from zephon_ray.feed.retention import Bounds, Retention


@dataclass(frozen=True)
class Step:
    step: int
    nbytes: int = 10


def held(retention: Retention[Step]) -> list[int]:
    return [kept.step for kept in retention]


def filled(last: int, *, budget: int, keep: int = 0) -> Retention[Step]:
    retention = Retention[Step](budget=budget, keep_steps=keep)
    for step in range(1, last + 1):
        retention.put(Step(step))
    return retention


def test_steps_that_the_slowest_rank_lacks_are_kept_beyond_any_budget() -> None:
    retention = filled(20, budget=0, keep=2)
    retention.trim(Bounds(slowest=10))
    assert held(retention) == list(range(9, 21))


def test_older_steps_are_kept_from_the_older_of_the_last_two_marks_on() -> None:
    retention = filled(20, budget=10_000)
    for step in (0, 5, 5, 8):
        retention.mark(step)
    retention.trim(Bounds(slowest=20))
    assert held(retention) == list(range(6, 21))
    retention.mark(12)
    retention.trim(Bounds(slowest=20))
    assert held(retention) == list(range(9, 21))


def test_beyond_the_budget_the_oldest_goes_first() -> None:
    retention = filled(20, budget=75)
    retention.mark(0)
    retention.trim(Bounds(slowest=20))
    assert held(retention) == list(range(14, 21))
    assert retention.nbytes == 70


def test_ranks_that_have_not_come_yet_find_their_first_steps_within_the_budget() -> None:
    retention = filled(20, budget=10_000)
    retention.mark(15)
    retention.mark(16)
    retention.trim(Bounds(slowest=20, awaited=3))
    assert held(retention) == list(range(4, 21))


def test_a_rewind_leaves_no_gap() -> None:
    retention = filled(20, budget=10_000)
    retention.forget_from(8)
    assert held(retention) == list(range(1, 8))
    with pytest.raises(ValueError, match="step 9 cannot be kept behind step 7"):
        retention.put(Step(9))
    retention.put(Step(8))
    assert retention.last == 8


class Kept(RuleBasedStateMachine):
    """Against a list that is filtered by the words of the docstring."""

    def __init__(self) -> None:
        super().__init__()
        self.retention = Retention[Step](budget=100, keep_steps=2)
        self.model: list[Step] = []
        self.marks: list[int] = []
        self.slowest = 0

    @rule(nbytes=st.integers(0, 40), first=st.integers(1, 50))
    def put(self, nbytes: int, first: int) -> None:
        step = Step(self.model[-1].step + 1 if self.model else first, nbytes)
        self.retention.put(step)
        self.model.append(step)

    @rule(step=st.integers(0, 60))
    def mark(self, step: int) -> None:
        self.retention.mark(step)
        self.marks = [*(m for m in self.marks if m != step), step][-2:]

    @rule(step=st.integers(0, 60), awaited=st.none() | st.integers(0, 60))
    def trim(self, step: int, awaited: int | None) -> None:
        self.retention.trim(Bounds(slowest=step, awaited=awaited))
        floors = self.marks + ([] if awaited is None else [awaited])
        self.model = [s for s in self.model if s.step > step - 2 or s.step > min(floors, default=-1)]
        while self.model and self.model[0].step <= step - 2 and sum(s.nbytes for s in self.model) > 100:
            self.model.pop(0)

    @precondition(lambda self: self.model)
    @rule(back=st.integers(0, 9))
    def rewind(self, back: int) -> None:
        step = self.model[-1].step - back
        self.retention.forget_from(step)
        self.model = [s for s in self.model if s.step < step]

    @invariant()
    def same(self) -> None:
        assert list(self.retention) == self.model
        assert self.retention.nbytes == sum(s.nbytes for s in self.model)
        assert (self.retention.first, self.retention.last) == ((self.model[0].step, self.model[-1].step) if self.model else (None, None))
        for step in range(70):
            assert self.retention.get(step) == next((s for s in self.model if s.step == step), None)


test_it_keeps_what_it_says = Kept.TestCase


@given(st.lists(st.integers(0, 30), min_size=1), st.integers(0, 200))
def test_when_all_ranks_have_all_steps_nothing_costs_more_than_the_budget(sizes: list[int], budget: int) -> None:
    retention = Retention[Step](budget=budget, keep_steps=0)
    for step, nbytes in enumerate(sizes, 1):
        retention.put(Step(step, nbytes))
        retention.trim(Bounds(slowest=step))
        assert retention.nbytes <= budget
