"""A cluster that scales by itself is told what more workers would have work, and told so no longer than that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from ray.autoscaler.v2.sdk import get_cluster_status

from tests.feed.feeds import eventually
from tests.ray.many_units import many_units, with_execution
from zephon_ray.recipe_fields import WorkersSpec
from zephon_ray.runners import load, ray_demand, ray_runner
from zephon_ray.runners.ray_demand import Demand
from zephon_ray.stream import Stream

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(120)]

CPUS = 2
"""Of the session's cluster."""


def waiting(cpus: float) -> int:
    """Tasks that the cluster tells its autoscaler of, of so many CPUs each."""
    demands = get_cluster_status(ray.get_runtime_context().gcs_address).resource_demands.ray_task_actor_demand
    return sum(bundle.count for demand in demands for bundle in demand.bundles_by_count if bundle.bundle == {"CPU": cpus})


@contextmanager
def busy() -> Iterator[None]:
    """All CPUs are in use."""

    @ray.remote(num_cpus=1)
    class Holder:
        def here(self) -> None: ...

    holders = [Holder.remote() for _ in range(CPUS)]
    ray.get([holder.here.remote() for holder in holders], timeout=60)
    try:
        yield
    finally:
        for holder in holders:
            ray.kill(holder)


def test_demand_is_what_the_autoscaler_is_told_of_and_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_demand, "AGAIN_S", 0.0)
    demand = Demand(WorkersSpec(num_cpus=0.75))
    with busy():
        demand.set(3)
        eventually(lambda: waiting(0.75) == 3)
        demand.set(1)
        eventually(lambda: waiting(0.75) == 1)
        demand.set(0)
        eventually(lambda: waiting(0.75) == 0)
        demand.set(2)
    demand.set(2)
    eventually(lambda: waiting(0.75) == 0)  # there was room


@contextmanager
def taking(stream: Stream) -> Iterator[Callable[[], None]]:
    """A thread takes steps, without a pause, until it is told to stop."""
    stop = threading.Event()

    def take() -> None:
        while not stop.is_set() and stream.next_batch() is not None:
            pass

    thread = threading.Thread(target=take)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join(60)

    try:
        yield end
    finally:
        end()


@pytest.mark.long
def test_a_hungry_stream_asks_for_workers_up_to_its_limit_and_a_satisfied_one_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "SETTLED_S", 0.3)
    monkeypatch.setattr(ray_runner, "DEMAND_S", 3.0)
    size = {"sequence_length": 8192, "global_batch_size": 8}
    slow = {"stall_seconds": 60, "engine": "hf"}  # two workers of the fast one would do
    recipe = many_units(tmp_path, files=8, units=60, words=5_000, execution=slow, **size)
    stream = Stream(with_execution(recipe, workers=WorkersSpec(min=1, max=CPUS + 3)))
    try:
        with taking(stream) as stop:
            eventually(lambda: waiting(1.0) == 3)
            stop()
            eventually(lambda: waiting(1.0) == 0)
    finally:
        stream.close()  # one that is open when its cluster ends can take the process with it
