"""`plan`: what a run will need."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from zephon_ray.cli.render import emit, number, pairs_of, percent, show, size, table
from zephon_ray.collector import prepare
from zephon_ray.errors import UserError
from zephon_ray.forecast import Forecast, Ranks, SourceForecast, forecast, sample_sources
from zephon_ray.recipe import Recipe, load_recipe

_ALL_SIZES = 24
_MANY_EPOCHS = 4


def look_ahead(
    path: str,
    overrides: Sequence[str],
    gpus: str,
    tokens_per_second: float | None,
    steps: int,
    cpu_per_mtok: float,
    *,
    as_json: bool,
) -> int:
    """Show the forecast of a recipe. Returns the exit code."""
    for name, value in (("--tokens-per-second", tokens_per_second), ("--cpu-per-mtok", cpu_per_mtok)):
        if value is not None and not (isfinite(value) and value > 0):
            raise UserError(f"{name} {value}: is not above 0. Write a number such as 1e6")
    sizes = sizes_in(gpus)
    recipe = load_recipe(path, overrides)
    job, _ = prepare(recipe)
    samples = sample_sources(job)
    found = forecast(
        recipe,
        job.manifests,
        samples,
        steps=steps,
        dp_sizes=sizes,
        tokens_per_second=tokens_per_second,
        cpu_per_mtok=cpu_per_mtok,
    )
    if as_json:
        emit({"recipe": recipe.name, "forecast": found, "samples": samples})
        return 0
    show(pairs_of(_facts(recipe, found)), _mixture(found), _texts(found))
    if any(s.about_epochs > _MANY_EPOCHS for s in found.sources):
        show(f"(!) read more than {_MANY_EPOCHS} times: the model sees these documents again and again")
    show(f"Estimates (≈) rest on a sample of {size(sum(s.text_bytes for s in samples))} of text; the rest follows from the recipe.")
    return 0


def sizes_in(gpus: str) -> list[int]:
    """The numbers of ranks in "8,16,64"; none in "".

    Raises:
        UserError: it is no list of whole numbers above 0.
    """
    try:
        sizes = [int(part) for part in gpus.split(",") if part.strip()]
    except ValueError as error:
        raise UserError(f"--gpus {gpus}: is no list of whole numbers. Write numbers with commas, such as 8,16,64") from error
    if any(n < 1 for n in sizes):
        raise UserError(f"--gpus {gpus}: numbers of ranks are at least 1. Write numbers with commas, such as 8,16,64")
    return sizes


def _facts(recipe: Recipe, f: Forecast) -> list[tuple[str, str]]:
    sizes = [str(n) for n in f.legal_dp_sizes]
    shown = ", ".join(sizes[:_ALL_SIZES]) + (f", ... {sizes[-1]}" if len(sizes) > _ALL_SIZES else "")
    rows = f"{f.rows_a_lane} row{'s' if f.rows_a_lane > 1 else ''} of {recipe.sequence_length:,} pairs a step each"
    facts = [("recipe", recipe.name), ("lanes", f"{f.lanes}, {rows}; {number(f.pairs_a_step)} pairs a step"), ("dp sizes", shown)]
    facts += [("", _ranks(ranks)) for ranks in f.asked]
    facts.append(("start", f"≈ {size(f.about_start_bytes)} of text are read and tokenised before the first batch"))
    decoded = f", and ≈ {size(f.about_decoded_bytes)} decoded (compressed files and cut groups)" if f.about_decoded_bytes else ""
    facts.append(("restore", f"at worst ≈ {size(f.about_restore_bytes)} of text are tokenised again{decoded}"))
    held = f"≈ {size(f.about_resident_bytes)} of ids, {size(f.batches_bytes)} of batches made ahead"
    facts.append(("memory", f"{held} (execution.prefetch_steps={recipe.execution.prefetch_steps})"))
    facts.append(("state", f"at most {size(f.state_bytes_at_most)}"))
    end = f"; the stream ends after step ≈ {f.about_last_step:,}" if f.about_last_step is not None else ""
    facts.append(("run", f"{f.steps:,} steps, {number(f.steps * f.pairs_a_step)} pairs{end}"))
    if f.tokens_per_second and f.cores and f.about_text_bytes_per_second and f.about_stored_bytes_per_second:
        cores = f"≈ {f.cores:.1f} CPU cores at an assumed {f.cpu_per_mtok:g} CPU s a million tokens"
        read = f"≈ {size(f.about_stored_bytes_per_second)}/s from the store ({size(f.about_text_bytes_per_second)}/s of text)"
        facts.append((f"{number(f.tokens_per_second)} tokens/s", f"{cores}; {read}"))
    return facts


def _ranks(ranks: Ranks) -> str:
    if ranks.legal:
        return f"{ranks.dp_size} ranks: {ranks.rows} rows each"
    return f"{ranks.dp_size} ranks: cannot share the rows evenly; use {' or '.join(map(str, ranks.nearest))}"


def _mixture(f: Forecast) -> object:
    headings = (
        "source",
        "target",
        "pairs a step",
        "≈ pairs an epoch",
        "≈ documents",
        f"≈ epochs in {f.steps:,} steps",
        "never further off",
    )
    rows = (
        (
            s.name,
            percent(s.target),
            number(s.pairs_a_step),
            number(s.about_epoch_pairs),
            number(s.about_epoch_documents),
            f"{s.about_epochs:.2f}{' (!)' if s.about_epochs > _MANY_EPOCHS else ''}",
            f"{s.bound_pairs:,} pairs a lane",
        )
        for s in f.sources
    )
    return table(headings, rows, title="mixture")


def _texts(f: Forecast) -> object:
    headings = ("source", "slots", "≈ windows", "≈ text a window", "≈ pairs a window", "≈ documents a window", "first batch", "restore")
    rows = ((s.name, str(s.slots), f"{s.about_windows:,}", *_window(s)) for s in f.sources)
    return table(headings, rows, title="windows: what is shuffled together")


def _window(s: SourceForecast) -> tuple[str, ...]:
    decoded = f", {size(s.about_decoded_bytes)} decoded" if s.about_decoded_bytes else ""
    restore = f"≤ {s.restore_windows} windows{decoded}"
    return (
        size(s.about_window_bytes),
        number(s.about_window_pairs),
        f"{s.about_window_documents:,}",
        f"{s.start_windows} window{'s' if s.start_windows > 1 else ''}",
        restore,
    )
