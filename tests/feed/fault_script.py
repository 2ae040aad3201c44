"""Feeds on clusters of their own, and what is done to those; `test_feed_clusters.py` runs it, a scenario a process.

    python -m tests.feed.fault_script SCENARIO FOLDER SEED

Standard output is one line of JSON: what each scenario found.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError

from tests.feed.feeds import Rank, Step, eventually, folded, ranks, steps_of
from tests.feed.test_production import lane_workers_of_ours
from tests.ray.many_units import many_units, with_execution
from tests.ray.nodes_script import Nodes, raylet
from tests.ray.test_ray_faults import processes
from tests.ray.test_ray_store import store
from zephon_ray.feed.protocol import StreamStatus
from zephon_ray.feed.service import Order, Service
from zephon_ray.recipe import Recipe

STEPS = 60
LANE_WORKERS = 2
AT = 10
"""Something happens after this step, or one soon after it."""
STORE_BYTES = 80 << 20
PIN_BYTES = 256 << 10
FILL_S = 15.0
"""Over which the steps after `AT` are spread, so that the store of a rank's node is full before it has its last one."""
GIVE_UP_S = 300.0
NO_DISK = {"local_fs_capacity_threshold": 0.0001}
"""Ray takes its disk for full, so it neither spills nor falls back on it."""


@dataclass
class Job:
    """Two ranks, and what they said."""

    started: tuple[Rank, ...]
    readers: list[threading.Thread]

    @property
    def step(self) -> int:
        return min(int(rank.steps[-1]["step"]) if rank.steps else 0 for rank in self.started)

    def join(self) -> bool:
        """Whether they came to an end."""
        deadline = time.monotonic() + GIVE_UP_S
        for reader in self.readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        return not any(reader.is_alive() for reader in self.readers)

    def same(self, expected: Sequence[Step]) -> bool:
        """Each step that both ranks got is the right one."""
        most = min(len(rank.steps) for rank in self.started)
        for rank in self.started:
            rank.lines = [line for line in rank.lines if "step" not in line or line["step"] <= rank.steps[0]["step"] + most - 1]
        return folded(self.started) == list(expected[:most]) and most > 0

    @property
    def errors(self) -> list[str | None]:
        return [f"{rank.lines[-1]['error']}: {rank.lines[-1]['said']}" if "error" in rank.lines[-1] else None for rank in self.started]

    def longest_s(self, since: float) -> float:
        """The longest time between two steps after a moment."""
        times = [since, *(line["at"] for line in self.started[0].steps if line["at"] > since)]
        return max((after - before for before, after in pairwise(times)), default=0.0)


@contextmanager
def fed(recipe: Recipe, folder: Path) -> Iterator[Callable[[], StreamStatus]]:
    with Service(None) as service:
        service.start(Order(name="it", recipe=recipe, out=str(folder / "run"), local_out_ok=True))
        try:
            yield lambda: service.status("it").streams["train"]
        finally:
            service.stop("it", force=True)


@contextmanager
def a_job(incarnation: str = "run:0", last: int = STEPS, pace_s: float = 0.05, **more: Any) -> Iterator[Job]:
    with ranks(*(Rank("it", r, 2, last, incarnation, pace_s=pace_s, save_every=5, reconnect_s=120, **more) for r in range(2))) as started:
        readers = [threading.Thread(target=rank.read, daemon=True) for rank in started]
        for reader in readers:
            reader.start()
        yield Job(started, readers)


def a_recipe(folder: Path, **execution: Any) -> tuple[Recipe, list[Step]]:
    """Steps of 1.5 MB, and what they must be."""
    recipe = many_units(
        folder / "corpus", files=8, units=60, words=20_000, sequence_length=8192, global_batch_size=16,
        execution={"prefetch_steps": 4, "lane_workers": LANE_WORKERS, "stall_seconds": 40, **execution},
    )  # fmt: skip
    return recipe, steps_of(with_execution(recipe, runner="inline"), STEPS)


# ---- scenarios


def node(folder: Path, pick: random.Random) -> dict[str, Any]:
    """A node is killed under a lane worker; there is room on another."""
    nodes = Nodes()
    try:
        there = [nodes.add(2), nodes.add(2)]
        recipe, expected = a_recipe(folder)
        with fed(recipe, folder) as status, a_job() as job:
            eventually(lambda: job.step >= AT + pick.randrange(10), GIVE_UP_S)
            before = lane_workers()
            with_lanes = [node for node in there if before & below(node)]
            feeds = {process.pid for process in processes("ray::Feed")} & below(nodes.head)
            os.kill(raylet(pick.choice(with_lanes)), signal.SIGKILL)
            killed = time.time()
            ended = job.join()
            # Lane workers are replaced because one is missed, or because a rank has missed rows first: only the former is `reopened`.
            found = {"nodes": len(with_lanes), "ended": ended, "replaced": len(lane_workers() - before), "longest_s": job.longest_s(killed)}
            found |= {"on_head": len(feeds), "reopened": status().reopened, "same": job.same(expected)}
            return {**found, "steps": len(job.started[0].steps), "errors": job.errors}
    finally:
        nodes.close()


def lane_workers() -> set[int]:
    return {process.pid for process in lane_workers_of_ours()}


def below(node: Any) -> set[int]:
    return {process.pid for process in psutil.Process(raylet(node)).children(recursive=True)}


def store_full(folder: Path, pick: random.Random) -> dict[str, Any]:
    """All of the object store is in use by others, who keep it; Ray may spill."""
    return _pinned(folder, pick, {})


def store_and_disk_full(folder: Path, pick: random.Random) -> dict[str, Any]:
    """The same, and Ray may not spill: its disk is full too, as far as it is told. Later others let go."""
    return _pinned(folder, pick, NO_DISK)


def _pinned(folder: Path, pick: random.Random, system: dict[str, Any]) -> dict[str, Any]:
    more: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
    ray.init(address="local", num_cpus=2, object_store_memory=STORE_BYTES, _system_config=system, **more)
    recipe, expected = a_recipe(folder)
    with fed(recipe, folder) as status, a_job() as job:
        eventually(lambda: job.step >= AT + pick.randrange(5), GIVE_UP_S)
        found = _pinned_under(job, status, expected)
    ray.shutdown()
    return found


def _pinned_under(job: Job, status: Callable[[], StreamStatus], expected: Sequence[Step]) -> dict[str, Any]:
    pins = Pins()
    try:
        pinned = time.time()
        waiting = Waiting(status)
        ended = job.join()
        found = {"pinned_mb": pins.nbytes >> 20, "end_s": time.time() - pinned, "ended": ended, "errors": job.errors}
        found |= {"spilled_mb": store().spilled_bytes_total >> 20, "said": waiting.end()}
        found |= {"same": job.same(expected), "steps": len(job.started[0].steps), "longest_s": job.longest_s(pinned)}
        found |= {"reopened": status().reopened, "kept_mb": status().kept_bytes >> 20}
    finally:
        pins.end()  # or its thread would look for another cluster when this one ends
    if any(job.errors):
        found["later"] = later(job, expected)
    return found


class Waiting(threading.Thread):
    """What `status` says that is waited for, as long as it runs."""

    def __init__(self, status: Callable[[], StreamStatus]) -> None:
        super().__init__(daemon=True)
        self._status, self._over, self._said = status, threading.Event(), list[str]()
        self.start()

    def run(self) -> None:
        while not self._over.wait(1.0):
            said = self._status().waiting
            if said and said not in self._said:
                self._said.append(said)

    def end(self) -> list[str]:
        self._over.set()
        self.join(60)
        return self._said


def rank_store_full(folder: Path, pick: random.Random) -> dict[str, Any]:
    """The node of the ranks has no room for rows, neither in its store nor on its disk; there is room where rows are made."""
    nodes = Nodes(_system_config=NO_DISK)
    try:
        nodes.add(2)
        recipe, expected = a_recipe(folder)
        with fed(recipe, folder) as status, a_job(pace_s=FILL_S / (STEPS - AT)) as job:
            eventually(lambda: job.step >= AT + pick.randrange(5), GIVE_UP_S)
            return _pinned_under(job, status, expected)
    finally:
        nodes.close()


class Pins(threading.Thread):
    """Objects in use, so many that there is room for no other; what becomes free is taken too, until it ends."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        here = ray.get_runtime_context().get_node_id()
        (self._whole,) = [node["Resources"]["object_store_memory"] for node in ray.nodes() if node["NodeID"] == here]
        self._pins, self._over = list[Any](), threading.Event()
        self._fill()
        self.start()

    def _fill(self) -> None:
        with suppress(ObjectStoreFullError, OutOfDiskError):
            while len(self._pins) * PIN_BYTES < self._whole and not self._over.is_set():
                self._pins.append(ray.get(ray.put(np.zeros(PIN_BYTES // 8))))

    def run(self) -> None:
        while not self._over.wait(0.1):
            self._fill()

    @property
    def nbytes(self) -> int:
        return len(self._pins) * PIN_BYTES

    def end(self) -> None:
        self._over.set()
        self.join(60)
        self._pins.clear()


def later(job: Job, expected: Sequence[Step]) -> dict[str, Any]:
    """The job starts anew from its last state, as it is told to."""
    saved = {line["saved"]: line["state"] for line in job.started[0].lines if "saved" in line}
    at = max(saved)
    with a_job("run:1", state=saved[at]) as anew:
        return {"ended": anew.join(), "same": anew.same(expected[at:]), "steps": len(anew.started[0].steps) + at, "errors": anew.errors}


def main(name: str, folder: str, seed: str) -> None:
    answer = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray says on standard output which node is gone
    scenario: Callable[[Path, random.Random], dict[str, Any]] = {
        "node": node, "rank_store_full": rank_store_full, "store_full": store_full, "store_and_disk_full": store_and_disk_full,
    }[name]  # fmt: skip
    answer.write(json.dumps(scenario(Path(folder), random.Random(f"{name} {seed}"))) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
