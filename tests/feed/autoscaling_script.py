"""A feed on a cluster that scales by itself; `test_feed_autoscaling.py` runs it in a process of its own. It says what it saw as JSON.

python -m tests.feed.autoscaling_script ADDRESS FOLDER
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from tests.feed.feeds import Step, joined, steps_of
from tests.ray.many_units import many_units, with_execution
from zephon_ray.feed.client import connect
from zephon_ray.feed.service import Order, Service
from zephon_ray.recipe import Recipe
from zephon_ray.recipe_fields import WorkersSpec

SEEN_S = 150.0
END_S = 60.0
MOST = 2
"""Workers, and so nodes: each node has room for one."""


def nodes() -> int:
    """Those that have CPUs."""
    return sum(bool(node["Alive"] and node["Resources"].get("CPU")) for node in ray.nodes())


def seen(what: Callable[[], bool]) -> float | None:
    """Seconds until it is so; None where it takes too long."""
    began, pause = time.monotonic(), threading.Event()
    while time.monotonic() - began < SEEN_S:
        if what():
            return round(time.monotonic() - began, 1)
        pause.wait(0.25)
    return None


class Taker(threading.Thread):
    """Takes all steps there are as fast as they come, until it is told to stop."""

    def __init__(self, name: str) -> None:
        super().__init__(daemon=True)
        self._name, self._stop_now = name, threading.Event()
        self.steps: list[Step] = []
        self.start()

    def run(self) -> None:
        with connect(self._name) as feed:
            while not self._stop_now.is_set() and (batch := next(feed, None)) is not None:
                self.steps.append(joined([batch]))

    def end(self) -> None:
        self._stop_now.set()
        self.join(END_S)
        assert not self.is_alive(), "the rank does not end"


def watch(service: Service, recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Nodes come for a feed that has none, and go once it is stopped."""
    found: dict[str, Any] = {"before": nodes()}
    service.start(Order(name="it", recipe=recipe, out=str(folder / "run"), local_out_ok=True))
    taker = Taker("it")
    found["first_s"] = seen(lambda: nodes() == 1)
    found["made_s"] = seen(lambda: bool(taker.steps))
    found["more_s"] = seen(lambda: nodes() == MOST)
    found["used_s"] = seen(lambda: service.status("it").streams["train"].workers == MOST)
    at = len(taker.steps)
    found["went_on_s"] = seen(lambda: len(taker.steps) > at)
    found["most"] = nodes()
    taker.end()
    service.stop("it")
    found["gone_s"] = seen(lambda: nodes() == 0)
    expected = steps_of(with_execution(recipe, runner="inline", engine="auto"), len(taker.steps))
    return {**found, "steps": len(taker.steps), "same": taker.steps == expected}


def main(address: str, folder: Path) -> None:
    size = {"sequence_length": 8192, "global_batch_size": 16}
    workers = WorkersSpec(min=1, max=MOST, labels={"role": "tokenise"})
    execution = {"prefetch_steps": 4, "stall_seconds": 60, "engine": "hf"}  # slow enough to be hungry for long
    recipe = many_units(folder / "corpus", files=8, units=60, words=20_000, execution=execution, **size)
    with Service(address) as service:
        print(json.dumps(watch(service, with_execution(recipe, workers=workers), folder)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
