"""Productions: the contract's bytes from any number of lane workers, and no token in the process that orders them."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray._private.worker import Worker

from tests.core.runner_suite import eventually
from tests.core.test_lane_groups import Runs, a_bad_corpus, outcome
from tests.golden_cases import GoldenCase
from tests.ray.many_units import many_units
from tests.ray.test_ray_store import FILES, store, window_bytes
from tests.ray_session import living
from zephon_ray.batches import GlobalBatch
from zephon_ray.collector import prepare
from zephon_ray.errors import BadRecordError, RunnerError, SourceError, WorkerLost
from zephon_ray.feed.production import ProducedStep, Production
from zephon_ray.recipe import load_recipe
from zephon_ray.runners.base import Job
from zephon_ray.state import Identity, to_bytes
from zephon_ray.stream import Stream

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(300)]


def unbroken(job: Job, identity: Identity, steps: int) -> list[GlobalBatch]:
    """The first steps of a stream without Ray."""
    with closing(Stream(job.recipe, runner="inline", prepared=(job, identity))) as stream:
        return [batch for _ in range(steps) if (batch := stream.next_batch()) is not None]


def rows_of(produced: ProducedStep) -> np.ndarray:
    """The rows of a step, from its blocks, which must cover them in order."""
    at, parts = 0, []
    for block in produced.blocks:
        rows = ray.get(block.ref)
        assert (block.first_row, block.rows) == (at, len(rows))
        parts.append(rows)
        at += block.rows
    return np.concatenate(parts)


def check_same(produced: ProducedStep | None, expected: GlobalBatch, identity: Identity) -> ProducedStep:
    assert produced is not None, f"the stream ended before step {expected.step}"
    step = produced.step
    assert (step.step, step.digest.hex(), step.chain.hex()) == (expected.step, expected.digest.hex(), expected.chain.hex())
    assert step.ledger_line == expected.ledger_line
    assert step.row_digests == expected.row_digests
    assert to_bytes(step.state, identity) == to_bytes(expected.state, identity)
    return produced


def check_whole(case: GoldenCase, lane_workers: int) -> None:
    job, identity = prepare(load_recipe(case.recipe))
    steps = len(case.steps)
    expected = unbroken(job, identity, steps)
    assert [(b.digest.hex(), b.chain.hex(), b.pairs) for b in expected] == [(s.digest, s.chain, s.pairs) for s in case.steps]
    with closing(Production(job, lane_workers=lane_workers, block_bytes=1 << 12)) as production:
        for batch in expected:
            produced = check_same(production.next_step(), batch, identity)
            if batch.step in (1, steps):
                np.testing.assert_array_equal(rows_of(produced), batch.rows)
        if case.ends:
            assert production.next_step() is None
            assert production.next_step() is None


@pytest.mark.long  # in the normal run tests of other things compare what two lane workers make, and nearly all tests of feeds have one
@pytest.mark.parametrize("lane_workers", [1, 2, 4])
def test_any_number_of_lane_workers_gives_the_contracts_bytes_in_every_case(golden_case: GoldenCase, lane_workers: int) -> None:
    check_whole(golden_case, lane_workers)


# ---- going on


def lane_workers_of_ours() -> list[psutil.Process]:
    """Processes of this test's cluster that are lane workers."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any("LaneWorker" in word for word in process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return sorted(found, key=lambda process: process.pid)


def check_kills(case: GoldenCase, lane_workers: int, kills: list[int], sent: signal.Signals = signal.SIGKILL) -> None:
    """One lane worker is killed after each of some steps, and another production goes on from the last state.

    Rows are there when all that made them are gone.
    """
    job, identity = prepare(load_recipe(case.recipe))
    expected = unbroken(job, identity, len(case.steps))
    pick = random.Random(case.name)
    production = Production(job, lane_workers=lane_workers)
    lost, given = 0, list[ProducedStep]()
    try:
        for batch in expected:
            try:
                produced = production.next_step()
            except WorkerLost:
                lost += 1
                state = production.state
                production.close()
                production = Production(job, state, lane_workers=lane_workers)
                produced = production.next_step()
            given.append(check_same(produced, batch, identity))
            if batch.step in kills:
                os.kill(pick.choice(lane_workers_of_ours()).pid, sent)
        assert lost == len(kills)
    finally:
        production.close()
    for produced, batch in zip(given, expected, strict=True):
        np.testing.assert_array_equal(rows_of(produced), batch.rows)


@pytest.mark.long  # in the normal run `test_feed_whole.py` kills one of a feed
@pytest.mark.fault
def test_a_killed_lane_worker_is_told_its_rows_stay_and_another_production_makes_the_same_bytes(
    golden_cases: dict[str, GoldenCase],
) -> None:
    case = golden_cases["wrap_two_sources"]
    check_kills(case, 2, [len(case.steps) // 3])


KILLED = [
    "all_defaults", "arrow_units", "best_fit", "compressed_edges", "epochs_continue", "many_lanes", "rare_source", "ties", "validation_pad",
]  # fmt: skip


@pytest.mark.fault
@pytest.mark.long
@pytest.mark.parametrize("name", KILLED)
def test_lane_workers_killed_at_random_steps_change_no_byte(name: str, golden_cases: dict[str, GoldenCase]) -> None:
    case, pick = golden_cases[name], random.Random(name)
    kills = sorted(pick.sample(range(1, max(2, len(case.steps) // 2)), 1 + (len(case.steps) > 30)))
    check_kills(case, pick.choice([1, 2, 4]), kills)


@pytest.mark.long
def test_a_production_goes_on_from_any_state_with_another_number_of_lane_workers(golden_cases: dict[str, GoldenCase]) -> None:
    for name in ("best_fit_pad", "compressed_edges", "epochs_continue", "rare_source"):
        case = golden_cases[name]
        job, identity = prepare(load_recipe(case.recipe))
        expected = unbroken(job, identity, len(case.steps))
        for start, lane_workers in ((1, 2), (len(expected) // 2, 4), (len(expected) - 1, 3)):
            with closing(Production(job, expected[start - 1].state, lane_workers=lane_workers)) as production:
                for batch in expected[start : start + 3]:
                    check_same(production.next_step(), batch, identity)


def take_all(production: Production) -> None:
    while production.next_step() is not None:
        continue


@pytest.mark.fault
def test_a_lane_worker_that_hangs_is_an_error_within_the_limit_and_close_does_not_wait_for_it(tmp_path: Path) -> None:
    job, _ = prepare(many_units(tmp_path, files=2, units=8, words=400, execution={}))
    with closing(Production(job)) as production:
        assert production.next_step() is not None
        (process,) = lane_workers_of_ours()
        process.send_signal(signal.SIGSTOP)
        production._team._patience_s = 2.0  # only now: units that a busy machine makes slowly are not what this is about
        began = time.monotonic()
        try:
            with pytest.raises(RunnerError):
                take_all(production)
            assert time.monotonic() - began < 20
            production.close()
            assert time.monotonic() - began < 30
        finally:
            if process.is_running():
                process.send_signal(signal.SIGCONT)


# ---- what goes where


@contextmanager
def bytes_got() -> Iterator[list[int]]:
    """Sizes of all objects that this process reads, whichever way."""
    sizes: list[int] = []
    read = Worker.deserialize_objects

    def counted(self: Worker, objects: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.extend(len(data) for data, *_ in objects if data is not None)
        return read(self, objects, *args, **kwargs)

    Worker.deserialize_objects = counted
    try:
        yield sizes
    finally:
        Worker.deserialize_objects = read


def used_before() -> int:
    """Bytes in the store, once what earlier streams held is given back."""
    gc.collect()  # else some KB of theirs would be given back while they are taken for ours
    eventually(lambda: store().object_store_bytes_used < 1 << 20, "earlier streams hold nothing", 60)
    return int(store().object_store_bytes_used)


KEPT_BESIDE_READ = [("s", "s", 1), ("kept", "s/00.jsonl.gz", 5)]


def test_no_token_comes_into_the_process_that_orders_lanes_and_dropped_rows_are_given_back(tmp_path: Path) -> None:
    shape = {"sequence_length": 8192, "global_batch_size": 16, "lanes": 4}
    recipe = many_units(tmp_path, files=4, units=6, words=4000, execution={"prefetch_steps": 2, "lane_workers": 2}, **shape)
    job, identity = prepare(recipe)
    expected = unbroken(job, identity, 100)
    step_bytes = expected[0].rows.nbytes
    tokens = sum(batch.rows[:, 0].nbytes for batch in expected)
    assert len(expected) >= 6
    before = used_before()
    with bytes_got() as got, closing(Production(job)) as production:
        steps = [check_same(production.next_step(), batch, identity) for batch in expected]
        assert production.next_step() is None
        assert max(got) < 32 << 10
        assert sum(got) < tokens / 20
        held = len(steps) * step_bytes
        eventually(lambda: store().object_store_bytes_used - before >= held, "all rows are held")
        np.testing.assert_array_equal(rows_of(steps[-1]), expected[-1].rows)
        told = sum(got)
        got_rows = [rows_of(step) for step in steps[:2]]  # copies
        assert sum(got) - told >= 2 * step_bytes, "the count sees rows where they come"
        del steps
        eventually(lambda: store().object_store_bytes_used - before < step_bytes, "dropped steps are given back")
        np.testing.assert_array_equal(np.concatenate(got_rows), np.concatenate([batch.rows for batch in expected[:2]]))
    eventually(lambda: store().object_store_bytes_used - before < 1 << 20, "nothing is left")


def test_a_small_source_is_read_once_and_kept_without_the_blocks_that_it_came_in(tmp_path: Path) -> None:
    """Beside it lies one that is read once, in the same blocks: these are given back."""
    sources = [{"name": name, "uri": uri, "epochs": n, "weight": 1, "window_groups": 4} for name, uri, n in KEPT_BESIDE_READ]
    shape = {"sequence_length": 1024, "global_batch_size": 16, "on_exhausted": "continue"}
    recipe = many_units(tmp_path, files=8, units=6, words=4000, execution={"prefetch_steps": 2}, sources=sources, **shape)
    job, identity = prepare(recipe)
    expected = unbroken(job, identity, 10_000)
    kept_bytes = 6 * window_bytes(recipe) // FILES
    before = used_before()
    with closing(Production(job, lane_workers=2)) as production:
        for batch in expected:
            check_same(production.next_step(), batch, identity)
        assert production.next_step() is None
        assert production.stats().units < 8 * 6 + 2 * 6, "its later epochs read nothing"
        eventually(lambda: store().object_store_bytes_used - before < 2 * kept_bytes, "only what is kept is held", 20)
        assert store().object_store_bytes_used - before >= kept_bytes


def test_closing_from_another_thread_ends_actors_threads_and_the_waiting_call(tmp_path: Path) -> None:
    job, _ = prepare(many_units(tmp_path, files=2, units=4, words=50, execution={"prefetch_steps": 2, "lane_workers": 2}))
    production = Production(job)
    assert production.next_step() is not None
    ended: list[BaseException] = []

    def go_on() -> None:
        try:
            take_all(production)
            while True:
                production._refuse_closed()
        except RunnerError as error:
            ended.append(error)

    thread = threading.Thread(target=go_on)
    thread.start()
    production.close()
    production.close()
    thread.join(30)
    assert [str(error) for error in ended] == ["the production is closed and makes no further step"]
    assert len(production._team.members) == 2
    eventually(lambda: not living("LaneWorker", "Mailbox"), "no actor is left")
    assert not [t.name for t in threading.enumerate() if t.name.startswith("zephon")]


# ---- data that cannot be used


@pytest.mark.parametrize("good", [pytest.param(0, marks=pytest.mark.long), 40])
def test_a_window_that_cannot_be_used_stops_a_production_where_it_stops_a_collector(tmp_path: Path, good: int) -> None:
    runs = Runs(a_bad_corpus(tmp_path, good))
    digests, end = outcome(runs, None)
    made = []
    with closing(Production(runs.job, lane_workers=2)) as production:
        try:
            while (produced := production.next_step()) is not None:
                made.append(produced.step.digest)
            found = "over"
        except BadRecordError as error:
            found = str(error)
            with pytest.raises(BadRecordError):
                production.next_step()
    assert (made, found) == (digests, end)


@pytest.mark.long  # in the normal run the collector's test of it, which the same code answers
def test_a_stream_that_ends_before_its_first_step_is_an_error(tmp_path: Path) -> None:
    job, _ = prepare(many_units(tmp_path, files=1, units=1, words=5, execution={}, lanes=4, sequence_length=1024))
    with closing(Production(job)) as production, pytest.raises(SourceError, match="ends before the first global batch"):
        production.next_step()
