"""Which runners there are, by name."""

from __future__ import annotations

import os

from zephon_ray.errors import RecipeError
from zephon_ray.recipe import Recipe
from zephon_ray.runners.base import Runner
from zephon_ray.runners.local import InlineRunner, ProcessesRunner, ThreadsRunner

RUNNERS = ("inline", "threads", "processes")


def default_workers(recipe: Recipe) -> int:
    """How many workers a recipe gets on this machine: `execution.workers.max`, and not more than CPUs that this process may use."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(recipe.execution.workers.max, cpus))


def idle_options(recipe: Recipe) -> list[str]:
    """Fields of `execution` that are set and have no effect in this version, a sentence each."""
    execution = recipe.execution
    idle = [
        name
        for name, is_set in (
            ("token_cache", execution.token_cache is not None),
            ("hot_replay_bytes", execution.hot_replay_bytes is not None),
            ("lane_workers", execution.lane_workers != 1),
        )
        if is_set
    ]
    return [f"execution.{name} has no effect in this version: what it sets arrives with the feed. No batch depends on it" for name in idle]


def make_runner(name: str, workers: int) -> Runner:
    """A runner that is not started yet.

    Args:
        name: one of `RUNNERS`.
        workers: how many, at least 1; "inline" has none.

    Raises:
        RecipeError: there is none of that name.
    """
    if name == "inline":
        return InlineRunner()
    if name == "threads":
        return ThreadsRunner(workers)
    if name == "processes":
        return ProcessesRunner(workers)
    reason = "is not part of this version yet" if name == "ray" else "is no runner"
    raise RecipeError([f"execution.runner={name!r} {reason}. Use one of {', '.join(RUNNERS)}"])
