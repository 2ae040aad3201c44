"""Prewarm: a recipe's token cache is filled, by making all units of one epoch and keeping them there.

It goes through a runner's workers like a run, and puts nothing in order. Ids stay with the worker that made them. What is there already is
checked and not made again, so one that was stopped is gone on with by starting it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from zephon_ray.cache import CacheSize, measure
from zephon_ray.errors import BadRecordError, UserError
from zephon_ray.manifest import SourceManifest, build_manifests
from zephon_ray.plan.windows import SourceCursor, UnitKey
from zephon_ray.recipe import Recipe
from zephon_ray.runners.base import FailedUnit, Job, Runner, RunnerStats
from zephon_ray.runners.registry import make_runner
from zephon_ray.stages.tokenise import make_options
from zephon_ray.stages.unit import TokenisedUnit
from zephon_ray.storage import Storage
from zephon_ray.stream import runner_of

AHEAD = 4
"""Windows that workers may be ahead of the last one that is whole, in each source."""
TAKE_S = 600.0
"""Seconds that a unit may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far it is.

    Args:
        groups: that are done, of all sources.
        of_groups: that there are.
        units: that are done.
        text_bytes: UTF-8 bytes of their texts.
    """

    groups: int
    of_groups: int
    units: int
    text_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PrewarmSummary:
    """What was done.

    Args:
        stats: the runner's.
        cache: what lies in the cache now.
    """

    stats: RunnerStats
    cache: CacheSize

    @property
    def not_kept(self) -> int:
        """Units that are not in the cache for all that: too large, or empty where no state of a shard is told, or writing failed."""
        return self.stats.units - self.stats.cached - self.stats.written


class _Walk:
    """The epoch of one source: which windows have come in whole."""

    def __init__(self, recipe: Recipe, manifest: SourceManifest) -> None:
        self._cursor = SourceCursor(recipe, manifest)
        self._tasks = self._cursor.tasks()
        self._lasts: dict[UnitKey, bool] = {}
        self.windows = 0

    @property
    def done(self) -> bool:
        return self._cursor.done

    def put(self, unit: TokenisedUnit) -> None:
        self._lasts[unit.key] = unit.last
        while not self.done and all(task.key in self._lasts for task in self._tasks):
            self._cursor.advance([self._lasts.pop(task.key) for task in self._tasks])
            self._tasks = self._cursor.tasks()
            self.windows += 1


def prewarm(
    recipe: Recipe,
    *,
    runner: str | None = None,
    workers: int | None = None,
    address: str | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> PrewarmSummary:
    """Fill the token cache of a recipe.

    Args:
        recipe: the recipe. Every source is read once, whatever its `epochs`.
        runner: its name; None for the recipe's.
        workers: how many at most; None for as many as the recipe allows and the machine or cluster has.
        address: of a Ray cluster, for the runner "ray"; None for one of its own.
        on_progress: told after each unit.

    Raises:
        UserError: the recipe has no token cache, or not one unit could be kept.
        RecipeError, SourceError, DataChangedError, BadRecordError, StorageError: the data cannot be used.
        RunnerError: the workers gave nothing in time, or go on dying.
    """
    if recipe.token_cache_url is None:
        raise UserError("execution.token_cache is not set, so there is nothing to fill. Name a folder or URL")
    name = runner_of(recipe, runner, address)
    job = _job(recipe)
    with make_runner(name, job.recipe, workers=workers, address=address) as made:
        _make_all(job, made, on_progress)
        stats = made.stats()
    if stats.units and not stats.cached + stats.written:
        raise UserError(
            f"token cache {recipe.token_cache_url}: none of {stats.units} units could be kept. The log says why: it cannot be"
            " written to, or token_cache_bytes is too small for any of them"
        )
    return PrewarmSummary(stats=stats, cache=measure(recipe.token_cache_url, recipe.execution.storage))


def _job(recipe: Recipe) -> Job:
    """One epoch in the order of files, as wide as there are workers, of whose units no ids come back."""
    width = max(recipe.execution.workers.max, 1)
    sources = tuple(source.model_copy(update={"epochs": 1, "window_groups": width}) for source in recipe.sources)
    once = recipe.model_copy(update={"sources": sources, "shuffle": recipe.shuffle.model_copy(update={"groups": False})})
    options = replace(make_options(once), only_fill_cache=True)
    return Job(recipe=once, manifests=build_manifests(once, Storage(once.execution.storage)), options=options)


def _make_all(job: Job, runner: Runner, on_progress: Callable[[Progress], None]) -> None:
    walks = {manifest.source: _Walk(job.recipe, manifest) for manifest in job.manifests}
    of_groups = sum(manifest.num_groups for manifest in job.manifests)
    groups = units = text_bytes = 0
    runner.start(job, [SourceCursor(job.recipe, manifest).position for manifest in job.manifests])
    for source in walks:
        runner.allow(source, AHEAD)
    while not all(walk.done for walk in walks.values()):
        unit = runner.take(TAKE_S)
        if isinstance(unit, FailedUnit):
            raise unit.error
        if unit.error is not None:
            raise BadRecordError(unit.error)
        walk = walks[unit.source]
        walk.put(unit)
        runner.allow(unit.source, walk.windows + AHEAD)
        groups, units, text_bytes = groups + unit.last, units + 1, text_bytes + unit.text_bytes
        on_progress(Progress(groups=groups, of_groups=of_groups, units=units, text_bytes=text_bytes))
