"""Which runners there are, by name."""

from __future__ import annotations

import os

from zephon_ray.errors import RecipeError
from zephon_ray.recipe import Recipe
from zephon_ray.runners.base import Runner
from zephon_ray.runners.local import InlineRunner, ProcessesRunner, ThreadsRunner

RUNNERS = ("inline", "threads", "processes", "ray")


def default_workers(recipe: Recipe) -> int:
    """How many workers a recipe gets on this machine: `execution.workers.max`, and not more than CPUs that this process may use."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(recipe.execution.workers.max, cpus))


def idle_options(recipe: Recipe) -> list[str]:
    """Fields of `execution` that are set and have no effect on a stream in one process, a sentence each."""
    execution = recipe.execution
    of_feeds = "it is a feed's, which `zephon-ray serve` starts"
    idle = [
        (name, why)
        for name, is_set, why in (
            ("hot_replay_bytes", execution.hot_replay_bytes is not None, of_feeds),
            ("lane_workers", execution.lane_workers != 1, of_feeds),
        )
        if is_set
    ]
    return [f"execution.{name} has no effect here: {why}. No batch depends on it" for name, why in idle]


def make_runner(name: str, recipe: Recipe, *, workers: int | None = None, address: str | None = None) -> Runner:
    """A runner that is not started yet.

    Args:
        name: one of `RUNNERS`.
        recipe: its `execution` says what workers are.
        workers: how many at most, at least 1; None for as many as the recipe allows and the machine or cluster has. "inline" has none.
        address: of a Ray cluster, for "ray"; None for the one that this process is in, else for one of its own.

    Raises:
        RecipeError: there is none of that name.
    """
    if name == "inline":
        return InlineRunner()
    if name == "threads":
        return ThreadsRunner(workers or default_workers(recipe))
    if name == "processes":
        return ProcessesRunner(workers or default_workers(recipe))
    if name == "ray":
        from zephon_ray.runners.ray_runner import RayRunner  # the core does without ray

        spec = recipe.execution.workers
        most = workers or spec.max
        limits = spec.model_copy(update={"min": min(spec.min, most), "max": most})
        return RayRunner(limits, recipe.execution.stall_seconds, address)
    raise RecipeError([f"execution.runner={name!r} is no runner. Use one of {', '.join(RUNNERS)}"])
