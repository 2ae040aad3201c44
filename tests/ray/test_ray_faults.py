"""Processes are killed and stopped under the Ray runner, and the stream stays the contract's."""

from __future__ import annotations

import gzip
import json
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from tests.core.runner_suite import ALL, begin, eventually, job_of, walk
from zephon_ray.errors import RunnerError
from zephon_ray.recipe import Recipe, WorkersSpec
from zephon_ray.runners.base import Job
from zephon_ray.runners.ray_runner import STALLS, RayRunner
from zephon_ray.stream import Stream

pytestmark = [pytest.mark.fault, pytest.mark.long, pytest.mark.timeout(60)]  # with limits of time: not beside other tests

STEPS = 20
"""A fault is before one of the first steps; all others are taken after it."""
STALL_S = 3.0
FILES, UNITS = 16, 50


def _line(number: int) -> bytes:
    """Records of one size."""
    return json.dumps({"text": " ".join(f"w{(number * 7919 + i * i) % 900 + 100}" for i in range(12))}).encode() + b"\n"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """16 streams of 50 small units each, in as many slots: 50 windows."""
    files = {f"s/{i:02}.jsonl.gz": gzip.compress(b"".join(map(_line, range(i * 200, i * 200 + 2 * UNITS))), mtime=0) for i in range(FILES)}
    source = {"name": "s", "uri": "s", "epochs": 1, "window_groups": FILES}
    execution = {"runner": "ray", "prefetch_steps": 1}
    folder = tmp_path_factory.mktemp("faults")
    made = job_of(folder, files, [source], unit_bytes=2 * len(_line(0)), lanes=2, global_batch_size=4, execution=execution)
    windows = walk(made, 0, ALL)[0]
    assert (made.manifests[0].num_groups, len(windows)) == (FILES, UNITS), [len(u) for _, u in windows][-3:]
    return made


@pytest.fixture(scope="module")
def chains(job: Job) -> list[bytes]:
    """Of an undisturbed run without Ray, step by step."""
    stream = Stream(job.recipe, runner="inline")
    found = []
    while (batch := stream.next_batch()) is not None:
        found.append(batch.chain)
    stream.close()
    assert len(found) > 2 * STEPS
    return found


def processes(part: str) -> list[psutil.Process]:
    """Processes of this test's cluster whose command line has `part`."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any(part in word for word in process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def workers() -> list[psutil.Process]:
    return processes("ReadZephonUnits")


def send(victims: Sequence[psutil.Process], number: int) -> int:
    sent = 0
    for process in victims:
        try:
            process.send_signal(number)
            sent += 1
        except psutil.NoSuchProcess:
            continue
    return sent


def run_through(recipe: Recipe, chains: list[bytes], at: int, fault: Callable[[], Any]) -> float:
    """Take all steps, with a fault before step `at`. Returns the longest time that one of the steps after it took, in seconds."""
    stream = Stream(recipe, runner="ray", workers=2)
    longest = 0.0
    try:
        for step, chain in enumerate(chains, 1):
            if step == at:
                fault()
            began = time.monotonic()
            batch = stream.next_batch()
            longest = max(longest, time.monotonic() - began) if step >= at else 0.0
            assert batch is not None
            assert batch.chain == chain, f"step {step}, after a fault before step {at}"
        assert stream.next_batch() is None
        return longest
    finally:
        stream.close()


def kill_one(pick: random.Random) -> None:
    assert send([pick.choice(workers())], signal.SIGKILL) == 1


def kill_all() -> None:
    assert send(workers(), signal.SIGKILL) >= 1


def kill_mailbox() -> None:
    mailboxes = processes("Mailbox")
    assert len(mailboxes) == 1
    assert send(mailboxes, signal.SIGKILL) == 1


@pytest.mark.parametrize("seed", range(4))
def test_one_worker_killed_at_any_step_changes_nothing(seed: int, job: Job, chains: list[bytes]) -> None:
    pick = random.Random(seed)
    assert run_through(job.recipe, chains, pick.randint(2, STEPS), lambda: kill_one(pick)) < 10


def test_all_workers_killed_change_nothing(job: Job, chains: list[bytes]) -> None:
    assert run_through(job.recipe, chains, random.Random(5).randint(2, STEPS), kill_all) < 20


def test_the_mailbox_killed_changes_nothing(job: Job, chains: list[bytes]) -> None:
    assert run_through(job.recipe, chains, random.Random(6).randint(2, STEPS), kill_mailbox) < 20


def test_a_stalled_execution_is_given_up_and_opened_again(job: Job, chains: list[bytes]) -> None:
    """Its workers stay stopped: they must be replaced, not waited for."""
    stopped: list[psutil.Process] = []

    def stop_all() -> None:
        stopped.extend(workers())
        assert send(stopped, signal.SIGSTOP) >= 1

    execution = job.recipe.execution.model_copy(update={"stall_seconds": STALL_S})
    recipe = job.recipe.model_copy(update={"execution": execution})
    try:
        assert run_through(recipe, chains, 5, stop_all) < STALL_S + 15
    finally:
        send(stopped, signal.SIGCONT)


def test_workers_that_hang_in_their_work_and_hold_the_cpus_are_replaced(tmp_path: Path) -> None:
    """They hold the CPUs: nothing can replace them before they are gone."""
    words = [json.dumps({"text": " ".join(f"w{(n * 31 + i) % 997}" for i in range(9_000))}).encode() + b"\n" for n in range(240)]
    files = {f"s/{i:02}.jsonl": b"".join(words[i * 15 : i * 15 + 15]) for i in range(16)}
    sources = [{"name": "s", "uri": "s", "epochs": 1}]
    execution = {"runner": "ray", "prefetch_steps": 1, "stall_seconds": STALL_S}
    made = job_of(tmp_path, files, sources, unit_bytes=1 << 18, sequence_length=512, global_batch_size=16, execution=execution)
    stopped: list[psutil.Process] = []
    got: list[bytes] = []

    def take_all() -> None:
        stream = Stream(made.recipe, runner="ray", workers=2)
        try:
            while (batch := stream.next_batch()) is not None:
                got.append(batch.chain)
        finally:
            stream.close()

    def held() -> bool:
        """Stop the workers where they are at work, and not where they wait for an entry, which takes no CPU."""
        send(stopped, signal.SIGCONT)
        stopped[:] = workers()
        send(stopped, signal.SIGSTOP)
        pause.wait(0.5)  # until the cluster has heard of it
        return len(stopped) == 2 and not ray.available_resources().get("CPU")

    taker, pause = threading.Thread(target=take_all), threading.Event()
    try:
        taker.start()
        eventually(lambda: bool(got), "the stream has begun")
        eventually(held, "both workers are stopped, and hold the CPUs")
        began = time.monotonic()
        _, alive = psutil.wait_procs(stopped, timeout=STALL_S + 15)
        assert not alive
        steps = len(got)  # of what was made before, all that was enough for a step
        eventually(lambda: len(got) > steps, "the stream goes on")
        assert time.monotonic() - began < STALL_S + 15
        taker.join(60)
    finally:
        send(stopped, signal.SIGCONT)
        taker.join(60)
    alone = Stream(made.recipe, runner="inline")
    assert got == [batch.chain for batch in iter(alone.next_batch, None) if batch is not None]
    alone.close()


def test_capacity_that_stays_gone_is_one_clear_error(job: Job) -> None:
    with RayRunner(WorkersSpec(min=1, max=2, num_cpus=64), stall_s=STALL_S) as runner:
        runner.start(job, begin(job))
        runner.allow(0, 2)
        began = time.monotonic()
        with pytest.raises(RunnerError) as caught:
            runner.take(60)
        took = time.monotonic() - began
    text = str(caught.value)
    assert "source 's', shard " in text
    assert "room for 0 workers" in text
    assert "64" in text
    assert took < STALLS * STALL_S + 2


def test_the_first_batch_needs_at_most_three_windows(job: Job) -> None:
    stream = Stream(job.recipe, runner="ray", workers=2)
    try:
        assert stream.next_batch() is not None
        assert stream.stats().units <= 3 * FILES
    finally:
        stream.close()


def test_a_consumer_that_does_not_take_bounds_what_is_made(job: Job) -> None:
    with RayRunner(WorkersSpec(min=1, max=2), stall_s=STALL_S) as runner:
        runner.start(job, begin(job))
        taken = 0
        for allowed, until in ((3, 5), (7, 100)):
            runner.allow(0, allowed)
            while taken < until:
                runner.take(30)
                taken += 1
            end, pause = time.monotonic() + STALL_S / 2, threading.Event()
            while time.monotonic() < end:
                assert runner.stats().units <= allowed * FILES
                pause.wait(0.05)  # a look now and then; nothing waits for it
            eventually(lambda made=allowed * FILES: runner.stats().units == made, "all that is allowed is made")
        assert runner.stats().retries == 0


def test_two_runs_side_by_side_give_what_each_gives_alone(job: Job, chains: list[bytes]) -> None:
    other = job.recipe.model_copy(update={"seed": 4})
    alone = Stream(other, runner="inline")
    one, two = (Stream(recipe, runner="ray", workers=1) for recipe in (job.recipe, other))
    try:
        for chain in chains[:STEPS]:
            batches = one.next_batch(), two.next_batch(), alone.next_batch()
            assert all(batches)
            got, other_got, other_want = (batch.chain for batch in batches if batch is not None)
            assert (got, other_got) == (chain, other_want)
            assert got != other_got
    finally:
        for stream in (one, two, alone):
            stream.close()
