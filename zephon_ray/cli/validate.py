"""`validate`: everything that can be wrong with a recipe, all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rich.table import Table

from zephon_ray.cli import faults
from zephon_ray.cli.index import source_table
from zephon_ray.cli.render import emit, number, pairs_of, plain, progress, say, show, size, table
from zephon_ray.errors import RecipeError, UserError
from zephon_ray.manifest import SourceManifest, build_manifest
from zephon_ray.recipe import Recipe, fingerprint, load_recipe
from zephon_ray.runners.base import Job
from zephon_ray.runners.registry import idle_options
from zephon_ray.stages.tokenise import Options, make_options
from zephon_ray.storage import Storage
from zephon_ray.survey import SourceCensus, count_all, index_of, problems_of

T = TypeVar("T")


def check(path: str, overrides: Sequence[str], dp_sizes: Sequence[int], *, deep: bool, as_json: bool) -> int:
    """Check a recipe, show what it stands for, and list what is wrong. Returns the exit code."""
    recipe = load_recipe(path, overrides)
    job = _looked_at(recipe, dp_sizes)
    censuses = _read_all(job) if deep else []
    problems = problems_of(recipe, censuses) if deep else []
    error = RecipeError(problems) if problems else None
    if as_json:
        report = _report(job, censuses)
        emit(report if error is None else {"error": faults.error_json(error), **report})
    else:
        _show(job, censuses, deep=deep)
        for sentence in idle_options(recipe):
            say(sentence)
        say(faults.sentences(error) if error else "no problem found" + ("" if deep else " (the data was not read: --deep reads it)"))
    return 0 if error is None else error.exit_code


def _looked_at(recipe: Recipe, dp_sizes: Sequence[int]) -> Job:
    """Tokenizer and shards.

    Raises:
        UserError: the one thing that is wrong; RecipeError: all things that are.
        StorageError: the store goes on failing.
    """
    errors: list[UserError] = []
    for dp_size in dp_sizes:
        _tried(errors, recipe.check_dp, 0, dp_size)
    options: Options | None = _tried(errors, make_options, recipe)
    storage = Storage(recipe.execution.storage)
    found = [_tried(errors, build_manifest, recipe, index, storage) for index in range(len(recipe.sources))]
    manifests: list[SourceManifest] = [manifest for manifest in found if manifest is not None]
    if len(errors) == 1:
        raise errors[0]
    if errors or options is None:
        raise RecipeError([problem for error in errors for problem in faults.error_json(error)["problems"]])
    return Job(recipe=recipe, manifests=manifests, options=options)


def _tried(errors: list[UserError], action: Callable[..., T], *arguments: Any) -> T | None:
    try:
        return action(*arguments)
    except UserError as error:
        errors.append(error)
        return None


def _read_all(job: Job) -> list[SourceCensus]:
    known = sum(index_of(job.recipe, manifest).units or 0 for manifest in job.manifests)
    with progress(wanted=True, columns=["units, {task.fields[text]} of text"]) as bar:
        if bar is None:
            return count_all(job)
        task = bar.add_task("reading", total=known or None, text="0 B")
        read = 0

        def on_unit(name: str, text_bytes: int) -> None:
            nonlocal read
            read += text_bytes
            bar.update(task, advance=1, description=f"reading {name}", text=size(read))

        return count_all(job, on_unit)


def _report(job: Job, censuses: Sequence[SourceCensus]) -> dict[str, Any]:
    recipe, options = job.recipe, job.options
    report = {
        "recipe": recipe.name,
        "fingerprint": fingerprint(recipe, options.tokenizer_sha256, [m.digest() for m in job.manifests]),
        "tokenizer": {"sha256": options.tokenizer_sha256, "bos": options.bos, "eos": options.eos, "pad": options.pad},
        "legal_dp_sizes": recipe.legal_dp_sizes(),
        "sources": [index_of(recipe, manifest) for manifest in job.manifests],
    }
    read: dict[str, Any] = plain({**report, "deep": list(censuses)} if censuses else report)
    return read


def _show(job: Job, censuses: Sequence[SourceCensus], *, deep: bool) -> None:
    recipe, options = job.recipe, job.options
    specials = ((name, getattr(recipe.tokenizer, name), getattr(options, name)) for name in ("bos", "eos", "pad"))
    facts = [
        ("recipe", recipe.name),
        ("fingerprint", fingerprint(recipe, options.tokenizer_sha256, [m.digest() for m in job.manifests])),
        ("specials", ", ".join(f"{name} {token!r} = {id_}" for name, token, id_ in specials if token is not None) or "none"),
        ("dp sizes", ", ".join(map(str, recipe.legal_dp_sizes()))),
    ]
    show(pairs_of(facts), source_table([index_of(recipe, manifest) for manifest in job.manifests]))
    if deep:
        show(_census_table(censuses))


def _census_table(censuses: Sequence[SourceCensus]) -> Table:
    headings = ("source", "units", "documents", "tokens", "text", "longest", "bad", "empty", "short")
    rows = (
        (
            c.name,
            f"{c.units:,}",
            f"{c.documents:,}",
            number(c.ids),
            size(c.text_bytes),
            *(f"{n:,}" for n in (c.longest, c.bad, c.empty, c.short)),
        )
        for c in censuses
    )
    return table(headings, rows, title="one epoch, read")
