"""A cluster of several nodes on this machine, and what happens to them under a stream; `test_ray_nodes.py` runs it in a process of its own.

It reads the names of scenarios, a line each, and answers each with a line of JSON. One process is in one cluster, so it is no test module.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

from tests.ray.many_units import chains_of, many_units, with_execution
from zephon_ray.errors import RunnerError
from zephon_ray.recipe import Recipe
from zephon_ray.recipe_fields import WorkersSpec
from zephon_ray.stream import Stream

STORE_BYTES = 100 << 20
STALL_S = 10.0
HEAVY_STALL_S = 40.0
"""Four processes that start at once on two busy CPUs give nothing for long."""
AT = 10
"""The step before which something happens."""
LATER_S = 6.0
GIVE_UP_S = 60.0
"""Longer than any limit of the tests."""


class Nodes:
    """A head without CPUs, which no scenario touches, and nodes that come and go."""

    def __init__(self, **more: Any) -> None:
        head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False, "dashboard_port": None, **more}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
        self.head = self._cluster.head_node
        self._there: list[Any] = []

    def add(self, cpus: int, **more: Any) -> Any:
        node = self._cluster.add_node(num_cpus=cpus, object_store_memory=STORE_BYTES, **more)
        self._there.append(node)
        return node

    def kill(self, node: Any) -> None:
        """End its raylet at once; its workers end when they see that."""
        os.kill(raylet(node), signal.SIGKILL)

    def leave(self, node: Any) -> None:
        self._there.remove(node)
        self._cluster.remove_node(node, allow_graceful=True)

    def clear(self) -> None:
        """All leave, and the head knows; it takes a raylet that ended without a word for alive for up to half a minute."""
        for node in list(self._there):
            self.leave(node)
        head = ray.get_runtime_context().get_node_id()
        gone = seen(lambda: all(node["NodeID"] == head for node in ray.nodes() if node["Alive"]), time.monotonic())
        if gone is None:
            raise TimeoutError("a node that left is there still")

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


def raylet(node: Any) -> int:
    pid: int = node.all_processes["raylet"][0].process.pid
    return pid


def at_work(node: Any) -> list[int]:
    """Processes of a node that run a task of ours."""
    try:
        below = psutil.Process(raylet(node)).children(recursive=True)
        return [process.pid for process in below if any("ReadZephonUnits" in word for word in process.cmdline())]
    except psutil.NoSuchProcess:
        return []


def since(began: float) -> float:
    return round(time.monotonic() - began, 2)


def seen(what: Callable[[], bool], began: float, unless: Callable[[], bool] = lambda: False) -> float | None:
    """Seconds from `began` on until `what` is so; None if it takes too long, or `unless` is so."""
    pause = threading.Event()
    while time.monotonic() - began < GIVE_UP_S and not unless():
        if what():
            return since(began)
        pause.wait(0.1)
    return None


class Scenarios:
    """Each gives what it found: `same`, that all chains were those of a run without Ray, and times in seconds."""

    def __init__(self, folder: Path) -> None:
        self._light = many_units(folder / "light", files=16, units=50, words=12, execution={"stall_seconds": STALL_S})
        size = {"sequence_length": 8192, "global_batch_size": 8}
        # Its blocks go through the object store, which dies with the raylet. Smaller ones come to the driver without it, so that a worker
        # whose raylet was killed would go on, unnoticed, until the head misses the node.
        self._solid = many_units(folder / "solid", files=8, units=60, words=6_000, execution={"stall_seconds": STALL_S}, **size)
        execution = {"stall_seconds": HEAVY_STALL_S, "engine": "hf"}  # with the fast one a single worker has time left
        self._heavy = many_units(folder / "heavy", files=8, units=60, words=20_000, execution=execution, **size)
        self._nodes = Nodes()

    def close(self) -> None:
        self._nodes.close()

    def clear(self) -> None:
        self._nodes.clear()

    def _after(self, fault: Callable[[], Any], later: Callable[[], Any] = lambda: None) -> dict[str, Any]:
        """Take a whole stream, with a fault before step `AT`, and something after it while the stream goes on."""
        with Taker(self._solid, workers=2) as taker:
            fault()
            began = taker.go_on()
            later()
            taker.join()
            took = since(began)
        same = taker.got == chains_of(self._solid, len(taker.got))
        return {
            "same": same,
            "steps": len(taker.got),
            "longest_s": taker.longest_s,
            "end_s": took,
            "error": taker.error,
        }

    def nothing(self) -> dict[str, Any]:
        self._nodes.add(1)
        self._nodes.add(1)
        return self._after(lambda: None)

    def placed(self) -> dict[str, Any]:
        """Workers go where resources and labels send them, and take what they say."""
        plain = self._nodes.add(2)
        labelled = self._nodes.add(2, labels={"pool": "data"})
        resourced = self._nodes.add(2, resources={"slot": 1}, labels={"pool": "data"})
        found: dict[str, Any] = {}
        for name, spec in (
            ("labels", WorkersSpec(min=1, max=4, labels={"pool": "data"}, num_cpus=2)),
            ("resources", WorkersSpec(min=1, max=4, resources={"slot": 1}, labels={"pool": "data"})),
        ):
            with Taker(with_execution(self._light, workers=spec)) as taker:
                workers = taker.workers()
                used = [len(at_work(node)) for node in (plain, labelled, resourced)]
                taker.stop_after(AT)
                taker.go_on()
                taker.join()
            found[name] = {
                "used": used,
                "workers": workers,
                "same": taker.got == chains_of(self._light, len(taker.got)),
                "error": taker.error,
            }
        return found

    def killed_with_room_left(self) -> dict[str, Any]:
        one, other = self._nodes.add(1), self._nodes.add(1)
        used: list[int] = []

        def kill() -> None:
            used.extend(len(at_work(node)) for node in (one, other))
            self._nodes.kill(other)

        return {**self._after(kill), "used": used}

    def killed_and_replaced(self) -> dict[str, Any]:
        only = self._nodes.add(2)

        def replace() -> None:
            threading.Event().wait(LATER_S)
            self._nodes.add(2)

        return self._after(lambda: self._nodes.kill(only), replace)

    def killed_for_good(self) -> dict[str, Any]:
        only = self._nodes.add(2)
        return self._after(lambda: self._nodes.kill(only))

    def left(self) -> dict[str, Any]:
        """A node leaves by itself, and says so."""
        self._nodes.add(1)
        other = self._nodes.add(1)
        used: list[int] = []

        def leave() -> None:
            used.append(len(at_work(other)))
            self._nodes.leave(other)

        return {**self._after(leave), "used": used}

    def joined(self) -> dict[str, Any]:
        """A node joins a stream whose consumer takes all it gets and waits for more."""
        self._nodes.add(1)
        with Taker(with_execution(self._heavy, workers=WorkersSpec(min=1, max=4))) as taker:
            before = taker.workers()
            began = time.monotonic()
            node = self._nodes.add(1)
            taker.go_on()
            used_s = seen(lambda: bool(at_work(node)), began, unless=taker.over)
            after = taker.workers()
            taker.stop_after(AT)
            taker.join()
        same = taker.got == chains_of(self._heavy, len(taker.got))
        return {"same": same, "steps": len(taker.got), "used_s": used_s, "workers": [before, after], "error": taker.error}

    def slow_then_hungry(self) -> dict[str, Any]:
        """A pool of at most four on two nodes, under a consumer that stops, and then takes all."""
        self._nodes.add(2)
        self._nodes.add(2)
        with Taker(with_execution(self._heavy, workers=WorkersSpec(min=1, max=4))) as taker:
            most = taker.workers()
            shrunk_s = seen(lambda: taker.workers() == 1, time.monotonic())
            began = taker.go_on()
            grown_s = seen(lambda: taker.workers() > 1, began, unless=taker.over)
            grown = taker.workers()
            taker.stop_after(AT)
            taker.join()
        same = taker.got == chains_of(self._heavy, len(taker.got))
        found = {"most": most, "shrunk_s": shrunk_s, "grown_s": grown_s, "grown": grown}
        return {**found, "same": same, "steps": len(taker.got), "error": taker.error}


class Taker:
    """Takes a stream in a thread, since nodes can be started by the main thread only; it waits before step `AT` to be told to go on."""

    def __init__(self, recipe: Recipe, workers: int | None = None) -> None:
        self.got: list[str] = []
        self.longest_s = 0.0
        self.error = ""
        self._most = 1 << 60
        self._reached, self._go = threading.Event(), threading.Event()
        self._stream = Stream(recipe, runner="ray", workers=workers)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Taker:
        self._thread.start()
        if not self._reached.wait(GIVE_UP_S):
            raise TimeoutError(f"no {AT} steps within {GIVE_UP_S} s")
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()

    def _run(self) -> None:
        try:
            while len(self.got) < self._most:
                if len(self.got) == AT - 1:
                    self._reached.set()
                    self._go.wait()
                began = time.monotonic()
                batch = self._stream.next_batch()
                self.longest_s = max(self.longest_s, since(began))
                if batch is None:
                    return
                self.got.append(batch.chain.hex())
        except RunnerError as error:
            self.error = str(error)
        finally:
            self._reached.set()

    def workers(self) -> int:
        return self._stream.stats().workers

    def over(self) -> bool:
        return not self._thread.is_alive()

    def go_on(self) -> float:
        self.longest_s = 0.0
        self._go.set()
        return time.monotonic()

    def stop_after(self, steps: int) -> None:
        self._most = len(self.got) + steps

    def join(self) -> None:
        self._thread.join(2 * GIVE_UP_S)
        if self._thread.is_alive():
            self.error = f"the next step did not come within {2 * GIVE_UP_S} s"


def main(arguments: Sequence[str]) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray says on standard output which node is gone
    scenarios = Scenarios(Path(arguments[0]))
    try:
        answers.write(json.dumps({"ready": True}) + "\n")
        for line in sys.stdin:
            try:
                found = getattr(scenarios, line.strip())()
            except Exception as error:  # noqa: BLE001  the test shows it
                found = {"raised": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(found) + "\n")
            scenarios.clear()
    finally:
        scenarios.close()


if __name__ == "__main__":
    main(sys.argv[1:])
