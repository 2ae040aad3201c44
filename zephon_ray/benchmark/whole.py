"""A stream of global batches, whole: with labels, positions, digests and ledger lines, as any run has it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

from zephon_ray.batches import GlobalBatch
from zephon_ray.errors import UserError
from zephon_ray.recipe import Recipe, load_recipe
from zephon_ray.runners.registry import default_workers
from zephon_ray.stream import Stream, runner_of
from zephon_ray.telemetry import CpuMeter

WARM_S = 2.0
"""Seconds after the first batch that are not measured: workers start, caches fill."""


def measure_whole(
    *, spawned: float, recipe: str, overrides: list[str], runner: str | None, workers: int | None, address: str | None, seconds: float
) -> dict[str, Any]:
    """Take batches for some seconds.

    Args:
        spawned: when this process was started, in seconds since 1970.
        recipe: path of a recipe.
        overrides: of its fields.
        runner: as `Stream` has it, like the next two.
        workers: how many.
        address: of a Ray cluster.
        seconds: that are measured, after `WARM_S`.

    Returns:
        tokens (next-token pairs delivered), text_bytes (of units made meanwhile), seconds, cpu_seconds, first_batch_s, state_bytes,
        cold_s and restore_s (to the first batch, in a process that is warm), workers, units, cached, steps.
    """
    made = load_recipe(recipe, overrides)
    meter = CpuMeter()

    def opened(state: bytes | None = None) -> Stream:
        return Stream(made, runner=runner, workers=workers, address=address, state=state)

    with closing(opened()) as stream:
        first = _taken(stream, made)
        first_batch_s = time.time() - spawned
        ready = time.monotonic() + WARM_S
        while time.monotonic() < ready:
            meter.look()
            first = _taken(stream, made)
        window = _window(stream, made, meter, seconds)
        state = stream.state_bytes()
    name = runner_of(made, runner, address)
    return {
        **window,
        "first_batch_s": first_batch_s,
        "state_bytes": len(state),
        "cold_s": _first_batch_s(opened),
        "restore_s": _first_batch_s(lambda: opened(state)),
        "workers": 1 if name == "inline" else min(workers or made.execution.workers.max, window["workers"] or default_workers(made)),
        "runner": name,
        "padding": first.padding,
    }


def _window(stream: Stream, recipe: Recipe, meter: CpuMeter, seconds: float) -> dict[str, Any]:
    before, cpu_s, began = stream.stats(), meter.seconds(), time.monotonic()
    tokens = steps = 0
    while time.monotonic() - began < seconds:
        tokens += _tokens(_taken(stream, recipe))
        steps += 1
        meter.look()
    wall_s, after = time.monotonic() - began, stream.stats()
    return {
        "tokens": tokens,
        "steps": steps,
        "seconds": wall_s,
        "cpu_seconds": meter.seconds() - cpu_s,
        "text_bytes": after.text_bytes - before.text_bytes,
        "units": after.units - before.units,
        "cached": after.cached - before.cached,
        "workers": after.workers,
    }


def _tokens(batch: GlobalBatch) -> int:
    return int(batch.rows.shape[0] * batch.rows.shape[2]) - batch.padding


def _taken(stream: Stream, recipe: Recipe) -> GlobalBatch:
    batch = stream.next_batch()
    if batch is None:
        raise UserError(
            f"recipe {recipe.name!r} ends after step {stream.state.step}, before enough was measured. Give its sources more epochs"
            " (--set sources.NAME.epochs=1000), or measure for less long (--seconds)"
        )
    return batch


def _first_batch_s(opened: Callable[[], Stream]) -> float:
    began = time.monotonic()
    with closing(opened()) as stream:
        stream.next_batch()
        return time.monotonic() - began
