"""Demand: tells a cluster that scales by itself that more workers would have work.

Waves are never wider than the room that nodes have, so an autoscaler sees nothing of ours that waits. Demand is tasks that do nothing
and have what a worker takes: they wait, which all of Ray's autoscalers look at, with their resources and labels. Why not through
`ray.autoscaler.sdk`: `docs/decisions/0007-autoscaling.md`.
"""

from __future__ import annotations

import time
from typing import Any

import ray

from zephon_ray.recipe import WorkersSpec

NAME = "RoomForZephonUnits"
AGAIN_S = 1.0
"""Seconds after which what found room, and so is over, is asked for again: a worker that waits for credit lends its CPU meanwhile."""


class Demand:
    """Room for so many more workers. Used from one thread at a time.

    Args:
        workers: what each takes.
    """

    def __init__(self, workers: WorkersSpec) -> None:
        self._task = ray.remote(_found).options(
            name=NAME, num_cpus=workers.num_cpus, resources=dict(workers.resources) or None,
            label_selector=dict(workers.labels) or None, max_retries=0,
        )  # fmt: skip
        self._waiting: list[Any] = []
        self._asked = -AGAIN_S

    def set(self, count: int) -> None:
        """Ask for room for `count` workers more, at least 0, instead of what was asked for before. It waits for nothing."""
        if self._waiting:
            _, self._waiting = ray.wait(self._waiting, num_returns=len(self._waiting), timeout=0)
        now = time.monotonic()
        fewer = len(self._waiting) > count
        while fewer and self._waiting:  # all, for the cluster forgets tasks that wait only when none of their kind is left
            ray.cancel(self._waiting.pop())
        if count > len(self._waiting) and (fewer or now - self._asked >= AGAIN_S):
            self._asked = now
            self._waiting += [self._task.remote() for _ in range(count - len(self._waiting))]


def _found() -> None:
    """There is room."""
