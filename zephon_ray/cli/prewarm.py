"""`prewarm`: the token cache of a recipe filled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict

from zephon_ray.cli.render import emit, number, pairs_of, progress, say, show, size
from zephon_ray.prewarm import Progress, prewarm
from zephon_ray.recipe import load_recipe

SAY_S = 10.0
"""Where there is no terminal, as in the log of a job, a line is said so often."""


def fill(recipe_path: str, overrides: Sequence[str], runner: str | None, workers: int | None, address: str | None, *, as_json: bool) -> int:
    """Fill it, and show what was done. Returns the exit code."""
    recipe = load_recipe(recipe_path, overrides)
    began = said = time.monotonic()
    with progress(wanted=True, columns=["groups", "{task.fields[speed]}"]) as bar:
        task = bar.add_task("starting", total=None, speed="") if bar else None

        def on_progress(done: Progress) -> None:
            nonlocal said
            now = time.monotonic()
            speed = f"{size(done.text_bytes)} of text, {size(done.text_bytes / max(1e-9, now - began))}/s"
            if bar is not None and task is not None:
                bar.update(task, description="filling", completed=done.groups, total=done.of_groups, speed=speed)
            elif now - said > SAY_S:
                said = now
                say(f"{done.groups:,} of {done.of_groups:,} groups, {done.units:,} units, {speed}")

        summary = prewarm(recipe, runner=runner, workers=workers, address=address, on_progress=on_progress)
    stats, seconds = summary.stats, time.monotonic() - began
    if as_json:
        facts = {name: asdict(stats)[name] for name in ("units", "text_bytes", "cached", "written", "corrupt", "retries")}
        emit({**facts, "not_kept": summary.not_kept, "cache": asdict(summary.cache), "seconds": seconds})
        return 0
    show(
        pairs_of(
            [
                ("units", f"{stats.units:,} ({size(stats.text_bytes)} of text, {number(stats.text_bytes / max(1e-9, seconds))}B/s)"),
                ("were there", f"{stats.cached:,}"),
                ("written", f"{stats.written:,}"),
                (
                    "the cache",
                    f"{summary.cache.entries:,} entries, {size(summary.cache.size)} of {size(recipe.execution.token_cache_bytes)}",
                ),
            ]
        )
    )
    if summary.not_kept:
        say(f"{summary.not_kept:,} units could not be kept: see the log")
    if summary.cache.entries < stats.units - summary.not_kept:
        say("the cache is too small for all of them: raise execution.token_cache_bytes")
    return 0
