"""A stream of the feed without Ray: what ranks get, what is made again, and what happens when production or directory fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fault_proxy import SLOW_DOWN, FaultProxy
from tests.feed.stand_in import Here
from tests.s3_server import Bucket
from tests.small import a_recipe
from zephon_ray.batches import GlobalBatch
from zephon_ray.errors import (
    DataChangedError,
    FeedError,
    FencedError,
    RecipeError,
    RefusedError,
    ReplayError,
    RunnerError,
    StateError,
    StorageError,
)
from zephon_ray.feed.protocol import Caller, Opened, OpenRequest, StepReply, StreamStatus, TakeReply, TakeRequest
from zephon_ray.feed.streams import FeedStream, StreamOptions
from zephon_ray.recipe import Recipe
from zephon_ray.runs import verify
from zephon_ray.state import StreamState, place_in, to_bytes
from zephon_ray.stream import Stream

pytestmark = pytest.mark.timeout(60)

LIMIT_S = 20.0


class Local:
    """States are kept as they are."""

    def put(self, state: StreamState) -> Any:
        return state

    def get(self, kept: Any) -> StreamState:
        return kept


class Served:
    """A stream, and ranks that take from it."""

    def __init__(self, recipe: Recipe, out: Path | str, production: Callable[..., Any], **more: Any) -> None:
        self.changes, self.limit_s = threading.Condition(), LIMIT_S
        options = StreamOptions(
            name="train", recipe=recipe, out=str(out), open_production=production, states=Local(),
            hot_bytes=more.pop("hot_bytes", 1 << 30), keep_steps=more.pop("keep_steps", 2), patience_s=more.pop("patience_s", 5.0),
        )  # fmt: skip
        self.recipe, self.stream = recipe, FeedStream(options, self._changed)
        self.requests: list[OpenRequest] = []

    def _changed(self) -> None:
        with self.changes:
            self.changes.notify_all()

    def until(self, what: Callable[[], Any]) -> Any:
        """What it gives once it is true."""
        deadline = time.monotonic() + self.limit_s
        with self.changes:
            while not (found := what()):
                assert time.monotonic() < deadline, "it did not come in time"
                self.changes.wait(0.05)
            return found

    def rank(self, rank: int = 0, of: int = 1, incarnation: str = "run:0", state: bytes | None = None, **more: Any) -> Rank:
        self.until(self.stream.ready)
        step, chain = place_in(state) if state else (0, bytes(16))
        request = OpenRequest(
            caller=Caller(client=f"host:{rank}"), session=f"session{len(self.requests)}",
            stream="train", dp_rank=rank, dp_world_size=of, incarnation=incarnation, state=state,
            start_step=step, start_chain=chain,
        )  # fmt: skip
        self.requests.append(replace(request, **more))
        return Rank(self, self.requests[-1].session, self.stream.open(self.requests[-1]))

    def status(self) -> StreamStatus:
        return self.stream.status()


class Rank:
    def __init__(self, served: Served, session: str, opened: Opened) -> None:
        self.served, self.session, self.opened, self.taken = served, session, opened, opened.state.step

    def ask(self, count: int = 1, **more: Any) -> TakeReply | None:
        return self.served.stream.ask(TakeRequest(session=self.session, taken=self.taken, count=count, **more))

    def take(self, **more: Any) -> StepReply | None:
        reply = self.served.until(lambda: self.ask(**more))
        self.served.stream.unask(self.session)
        assert reply.steps or reply.ended
        if not reply.steps:
            return None
        self.taken = reply.steps[0].step
        self.ask(0)
        return reply.steps[0]

    def steps(self, last: int) -> list[StepReply]:
        made = []
        while self.taken < last:
            step = self.take()
            assert step is not None
            made.append(step)
        return made

    def state(self, step: StepReply) -> bytes:
        return to_bytes(step.state, self.opened.identity)


@contextmanager
def serving(recipe: Recipe, out: Path | str, production: Callable[..., Any] | None = None, **more: Any) -> Iterator[Served]:
    served = Served(recipe, out, production or Here(), **more)
    try:
        yield served
    finally:
        served.stream.stop("test")
        served.stream.close()
        assert not served.stream._thread.is_alive()


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return a_recipe(tmp_path, execution={"runner": "inline", "prefetch_steps": 4})


@pytest.fixture
def expected(recipe: Recipe) -> list[GlobalBatch]:
    """The first 40 steps."""
    stream = Stream(recipe)
    batches = [stream.next_batch() for _ in range(40)]
    stream.close()
    return [batch for batch in batches if batch]


def same(step: StepReply, batch: GlobalBatch, rank: int = 0, of: int = 1) -> bool:
    size = len(batch.rows) // of
    for row in range(rank * size, (rank + 1) * size):
        (block,) = [b for b in step.blocks if b.first_row <= row < b.first_row + b.rows]
        if (block.ref.rows[row - block.first_row] != batch.rows[row]).any():
            return False
    return (step.step, step.digest, step.chain, step.pairs) == (batch.step, batch.digest, batch.chain, batch.pairs)


def test_ranks_get_their_rows_of_each_step_and_the_same_state(recipe: Recipe, expected: list[GlobalBatch], tmp_path: Path) -> None:
    with serving(recipe, tmp_path / "out") as served:
        ranks = [served.rank(r, 4) for r in range(4)]
        for batch in expected[:12]:
            steps = [rank.take() for rank in ranks]
            assert all(step and same(step, batch, r, 4) for r, step in enumerate(steps))
            assert {rank.state(step) for rank, step in zip(ranks, steps, strict=True) if step} == {
                to_bytes(batch.state, ranks[0].opened.identity)
            }
            assert [len(step.blocks) for step in steps if step] == [1, 1, 1, 1]
    assert verify(str(tmp_path / "out")).last_step >= 12


def test_nothing_is_made_far_ahead_of_the_slowest_rank(recipe: Recipe, tmp_path: Path) -> None:
    with serving(recipe, tmp_path / "out") as served:
        fast, slow = served.rank(0, 2), served.rank(1, 2)
        slow.steps(2)
        fast.steps(6)
        assert fast.ask() is None
        status = served.status()
        assert (status.step, status.taken_step, status.steps_ahead, status.ranks) == (6, 2, 4, 2)
        assert status.kept_bytes > 6 * 12 * recipe.global_batch_size * recipe.sequence_length
        slow.steps(3)
        assert fast.take().step == 7  # type: ignore[union-attr]


def test_asked_twice_a_step_has_the_same_bytes(recipe: Recipe, expected: list[GlobalBatch], tmp_path: Path) -> None:
    with serving(recipe, tmp_path / "out") as served:
        rank = served.rank()
        rank.steps(5)
        rank.taken = 3
        again = rank.take()
        assert again
        assert same(again, expected[3])


def test_a_late_ask_is_replayed_though_its_step_is_gone(recipe: Recipe, expected: list[GlobalBatch], tmp_path: Path) -> None:
    here = Here()
    with serving(recipe, tmp_path / "out", here, hot_bytes=0, keep_steps=1) as served:
        rank = served.rank()
        rank.steps(30)
        served.until(lambda: served.status().kept_steps <= 6)
        rank.taken = 3
        for batch in expected[3:]:
            step = rank.take()
            assert step
            assert same(step, batch)
    assert here.opened == [0, 0]


def test_a_rewind_within_what_is_kept_makes_nothing_again(recipe: Recipe, expected: list[GlobalBatch], tmp_path: Path) -> None:
    here = Here()
    with serving(recipe, tmp_path / "out", here) as served:
        rank = served.rank()
        steps = rank.steps(20)
        served.stream.saved(rank.session, 10)
        served.stream.saved(rank.session, 20)
        made = served.until(lambda: served.status() if served.status().step == 24 else None)
        again = served.rank(incarnation="run:1", state=rank.state(steps[9]))
        with pytest.raises(FencedError):
            rank.ask()
        assert all(same(step, batch) for step, batch in zip(again.steps(20), expected[10:20], strict=True))
        after = served.status()
        assert (after.replay, after.replays_hot, after.replays_cold) == ("hot", 1, 0)
        assert (after.units, after.step) == (made.units, made.step)
        assert all(same(step, batch) for step, batch in zip(again.steps(30), expected[20:30], strict=True))
    assert here.opened == [0]


def test_a_rewind_beyond_what_is_kept_is_cold_and_said_to_be(recipe: Recipe, expected: list[GlobalBatch], tmp_path: Path) -> None:
    here = Here()
    with serving(recipe, tmp_path / "out", here, hot_bytes=0) as served:
        rank = served.rank()
        steps = rank.steps(20)
        again = served.rank(incarnation="run:1", state=rank.state(steps[9]))
        assert all(same(step, batch) for step, batch in zip(again.steps(30), expected[10:30], strict=True))
        assert (served.status().replay, served.status().replays_cold) == ("cold", 1)
    assert here.opened == [0, 10]
    assert verify(str(tmp_path / "out")).last_step >= 30


def test_a_feed_that_starts_empty_goes_on_where_its_ranks_are(recipe: Recipe, expected: list[GlobalBatch], tmp_path: Path) -> None:
    with serving(recipe, tmp_path / "out") as served:
        first, second = served.rank(0, 2), served.rank(1, 2)
        states = first.steps(4)
        second.steps(7)
        states += first.steps(9)
    here = Here()
    with serving(recipe, tmp_path / "out", here) as served:
        chain = {"start_step": 0, "start_chain": bytes(16)}
        first = served.rank(0, 2, state=first.state(states[8]), **chain)
        assert same(first.take() or states[0], expected[9], 0, 2)
        second = served.rank(1, 2, state=second.state(states[6]), **chain)  # behind the first: what is between is made again
        assert all(same(step, batch, 1, 2) for step, batch in zip(second.steps(13), expected[7:13], strict=True))
        assert all(same(step, batch, 0, 2) for step, batch in zip(first.steps(17), expected[10:17], strict=True))
    assert here.opened == [9, 7]


def test_a_directory_whose_tail_was_lost_is_made_again_up_to_the_ranks(recipe: Recipe, expected: list[GlobalBatch], tmp_path: Path) -> None:
    with serving(recipe, tmp_path / "one") as served:
        rank = served.rank()
        state = rank.state(rank.steps(9)[8])
    with serving(recipe, tmp_path / "other") as served:
        rank = served.rank(state=state)
        assert rank.take().chain == expected[9].chain  # type: ignore[union-attr]
    assert verify(str(tmp_path / "other")).steps >= 10


def test_lost_rows_are_made_again_once(recipe: Recipe, expected: list[GlobalBatch], tmp_path: Path) -> None:
    here = Here()
    with serving(recipe, tmp_path / "out", here) as served:
        ranks = [served.rank(r, 2) for r in range(2)]
        for rank in ranks:
            rank.steps(3)
        gone = ranks[0].take()
        assert gone
        ranks[0].taken = 3
        lost = (4, gone.blocks[0].ref.hex())
        again = ranks[0].take(lost=lost)
        assert again
        assert again.blocks[0].ref is not gone.blocks[0].ref
        assert same(again, expected[3], 0, 2)
        other = ranks[1].take(lost=lost)  # it had the same reference: that step was made again already
        assert other
        assert same(other, expected[3], 1, 2)
    assert here.opened == [0, 3], "made again once, and what lies before it is kept"


def test_rows_lost_under_a_rewind_make_it_cold_and_no_step_is_missing(recipe: Recipe, expected: list[GlobalBatch], tmp_path: Path) -> None:
    here = Here()
    with serving(recipe, tmp_path / "out", here) as served:
        rank = served.rank()
        steps = rank.steps(20)
        again = served.rank(incarnation="run:1", state=rank.state(steps[9]))
        again.steps(12)
        assert served.status().replay == "hot"
        assert same(again.take(lost=(13, steps[12].blocks[0].ref.hex())) or steps[0], expected[12])
        assert all(same(step, batch) for step, batch in zip(again.steps(30), expected[13:30], strict=True))
        status = served.status()
        assert (status.replay, status.replays_hot, status.replays_cold) == ("cold", 0, 1)
    assert here.opened == [0, 12]


def test_production_that_fails_is_replaced_behind_what_is_kept(recipe: Recipe, expected: list[GlobalBatch], tmp_path: Path) -> None:
    here = Here(faults=[None, None, RunnerError("killed"), RuntimeError("anything"), None, None, RunnerError("killed")])
    with serving(recipe, tmp_path / "out", here) as served:
        assert all(same(step, batch) for step, batch in zip(served.rank().steps(20), expected, strict=False))
        assert served.status().reopened == 3
    assert here.opened == [0, 2, 2, 4]


def test_steps_outlive_their_production_and_a_rewind_after_it_failed_is_hot(
    recipe: Recipe, expected: list[GlobalBatch], tmp_path: Path
) -> None:
    here = Here()
    with serving(recipe, tmp_path / "out", here) as served:
        rank = served.rank()
        steps = rank.steps(20)
        served.until(lambda: served.status().step == 24)
        here.faults = [RunnerError("killed")]
        assert same(rank.take() or steps[0], expected[20])
        served.until(lambda: served.status().reopened == 1)
        assert all(same(step, batch) for step, batch in zip(rank.steps(24), expected[21:24], strict=True))
        again = served.rank(incarnation="run:1", state=rank.state(steps[9]))
        assert all(same(step, batch) for step, batch in zip(again.steps(40), expected[10:40], strict=True))
        assert (served.status().replay, served.status().replays_hot) == ("hot", 1)
    assert here.opened == [0, 24], "no step twice"


def test_lines_that_a_ledger_lost_are_made_again_under_what_is_kept(recipe: Recipe, expected: list[GlobalBatch], tmp_path: Path) -> None:
    """As after a disk that failed to sync."""
    here = Here()
    with serving(recipe, tmp_path / "out", here) as served:
        rank = served.rank()
        rank.steps(8)
        served.until(lambda: served.status().step == 12)
        writer = served.stream._maker._writer  # type: ignore[union-attr]
        writer.ledger.close()
        for segment in (tmp_path / "out" / "ledger").glob("*.zst"):
            segment.unlink()
        writer.ledger = writer.directory.open_ledger()
        here.faults = [RunnerError("killed")]
        assert all(same(step, batch) for step, batch in zip(rank.steps(30), expected[8:30], strict=True))
    assert here.opened == [0, 0]
    assert verify(str(tmp_path / "out")).steps >= 30


def test_production_that_goes_on_failing_is_one_error_on_every_rank_until_they_start_anew(
    recipe: Recipe, expected: list[GlobalBatch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zephon_ray.feed.making.REOPENS", 1)
    here = Here()
    with serving(recipe, tmp_path / "out", here) as served:
        ranks = [served.rank(r, 2) for r in range(2)]
        for rank in ranks:
            rank.steps(1)
        here.faults = [RunnerError("no workers"), RunnerError("no workers")]
        for rank in ranks:
            with pytest.raises(RunnerError, match="no workers"):
                rank.steps(40)
        assert "no workers" in str(served.status().error)
        assert same(served.rank(incarnation="run:1").steps(3)[2], expected[2])
        assert served.status().error is None


def test_data_changed_under_the_run_stops_it(recipe: Recipe, tmp_path: Path) -> None:
    with serving(recipe, tmp_path / "out") as served:
        served.rank().steps(30)
    file = tmp_path / "a" / "0.jsonl"
    file.write_text(file.read_text().replace("w", "v"))
    with serving(recipe, tmp_path / "out") as served, pytest.raises(DataChangedError):
        served.rank().steps(30)


def test_a_state_of_another_history_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    """At once where what follows it is kept, else when its step is made."""
    with serving(recipe, tmp_path / "out", hot_bytes=0, keep_steps=0) as served:
        rank = served.rank()
        steps = rank.steps(9)
        old, new = (to_bytes(replace(steps[n].state, chain=bytes(15) + b"x"), rank.opened.identity) for n in (4, 8))
        served.until(lambda: served.status().step == 13)
        with pytest.raises(ReplayError, match="another history"):
            served.rank(incarnation="run:1", state=new)
        other = served.rank(incarnation="run:1", state=old)
        other.taken = 3
        with pytest.raises(ReplayError, match="another history"):
            other.steps(6)


def test_ranks_that_do_not_fit_are_refused(recipe: Recipe, tmp_path: Path) -> None:
    with serving(recipe, tmp_path / "out") as served:
        served.rank(0, 2)
        with pytest.raises(RecipeError, match="dp_world_size=3"):
            served.rank(0, 3, incarnation="run:1")
        with pytest.raises(StateError):
            served.stream.open(replace(served.requests[0], state=b"{}"))
        with pytest.raises(RefusedError, match="the fingerprint"):
            served.rank(1, 2, fingerprint="0" * 64)
        with pytest.raises(RefusedError, match="another run, run:0"):
            served.rank(0, 2, incarnation="other:0")


def test_the_end_comes_to_every_rank(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, {"a": {"epochs": 1}})
    with serving(recipe, tmp_path / "out") as served:
        ranks = [served.rank(r, 2) for r in range(2)]
        while [rank.take() for rank in ranks] != [None, None]:
            assert ranks[0].taken == ranks[1].taken
        assert ranks[0].taken == ranks[1].taken == served.status().ended
        again = served.rank(0, 2, incarnation="run:1")  # as each validation does
        assert again.take().step == 1  # type: ignore[union-attr]


def test_a_directory_that_refuses_for_a_while_is_waited_for(recipe: Recipe, expected: list[GlobalBatch], tmp_path: Path) -> None:
    with serving(recipe, tmp_path / "out", patience_s=20) as served:
        rank = served.rank()
        rank.steps(3)
        refusing = Refusing(served)
        assert "refuses since" in served.until(lambda: served.status().waiting)
        refusing.over = True
        assert all(same(step, batch) for step, batch in zip(rank.steps(12), expected[3:], strict=False))
        assert served.status().waiting is None
    assert verify(str(tmp_path / "out")).last_step >= 12


def test_a_directory_that_refuses_for_good_is_one_error_on_every_rank(recipe: Recipe, expected: list[GlobalBatch], tmp_path: Path) -> None:
    with serving(recipe, tmp_path / "out", patience_s=0.2) as served:
        ranks = [served.rank(r, 2) for r in range(2)]
        refusing = Refusing(served)
        for rank in ranks:
            with pytest.raises(StorageError, match=r"refuses since .*: no space left.* Mend it"):
                rank.steps(40)
        refusing.over = True
        assert served.rank(0, 2, incarnation="run:1").steps(9)[8].chain == expected[8].chain


class Refusing:
    """The ledger takes nothing until it is over."""

    def __init__(self, served: Served) -> None:
        self.over = False
        writer = served.until(lambda: served.stream._maker)._writer
        ledger = type(writer.ledger)
        append = ledger.append

        def refuse(ledger: Any, line: Any) -> bool:
            if not self.over:
                raise StorageError("no space left")
            return append(ledger, line)

        writer.ledger.append = refuse.__get__(writer.ledger)
        directory = writer.directory
        reopen = directory.open_ledger

        def open_ledger() -> Any:
            if not self.over:
                raise OSError("no space left")
            return reopen()

        directory.open_ledger = open_ledger


@pytest.mark.fault
def test_a_store_that_refuses_for_a_while_and_one_that_does_for_good(
    bucket: Bucket, proxy: FaultProxy, recipe: Recipe, expected: list[GlobalBatch]
) -> None:
    """What was given to ranks and not written yet is written when the store takes it again."""
    storage = bucket.spec(endpoint_url=proxy.endpoint, max_tries=2, retry_seconds=1)
    recipe = recipe.model_copy(update={"execution": recipe.execution.model_copy(update={"storage": storage})})
    refuses = threading.Event()
    proxy.fault = lambda asked: SLOW_DOWN if asked.method == "PUT" and refuses.is_set() else None
    out = f"{bucket.url}/run"
    with serving(recipe, out, patience_s=30) as served:
        rank = served.rank()
        rank.steps(5)
        refuses.set()
        served.stream.saved(rank.session, 5)
        assert "refuses since" in served.until(lambda: served.status().waiting)
        refuses.clear()
        assert all(same(step, batch) for step, batch in zip(rank.steps(20), expected[5:20], strict=True))
    assert verify(out, recipe=recipe).steps >= 20
    with serving(recipe, out, patience_s=0.2) as served:
        ranks = [served.rank(r, 2) for r in range(2)]
        for rank in ranks:
            rank.steps(3)
        refuses.set()
        served.stream.saved(ranks[0].session, 3)
        for rank in ranks:
            with pytest.raises(StorageError, match=r"the run's directory .* refuses since"):
                rank.steps(40)
        refuses.clear()


def test_a_stopped_stream_says_so_and_has_saved_its_last_state(recipe: Recipe, tmp_path: Path) -> None:
    with serving(recipe, tmp_path / "out") as served:
        rank = served.rank()
        rank.steps(5)
        served.stream.stop("host:1")
        with pytest.raises(FeedError, match="was stopped"):
            rank.take()
        served.stream.close()
        last = served.status().step
    assert (tmp_path / "out" / "states" / f"{last:012d}.json").exists()
    events = [line for line in (tmp_path / "out" / "audit.jsonl").read_text().splitlines() if '"event":"stopped"' in line]
    assert len(events) == 1
