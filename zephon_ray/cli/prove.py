"""`prove`: a recipe's own pilot, before GPUs are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from zephon_ray.cli.plan import sizes_in
from zephon_ray.cli.render import emit, pairs_of, progress, show, table
from zephon_ray.recipe import load_recipe
from zephon_ray.training.pilot import Proof, SizeProof, prove


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The command line of `prove`."""

    recipe: str
    overrides: Sequence[str]
    gpus: str
    at_step: int
    steps: int
    runner: str | None
    workers: int | None
    address: str | None
    as_json: bool


def pilot(wanted: Wanted) -> int:
    """Resume one state at each size, and show what was found. Returns the exit code: 1 where something differs."""
    sizes = list(dict.fromkeys(sizes_in(wanted.gpus)))
    recipe = load_recipe(wanted.recipe, wanted.overrides)
    with progress(wanted=not wanted.as_json, columns=["steps"]) as bar:
        task = bar.add_task("uninterrupted", total=wanted.at_step + wanted.steps * (1 + len(sizes))) if bar else None

        def on_step(what: str, step: int) -> None:
            if bar is not None and task is not None:
                bar.update(task, advance=1, description=what)

        proof = prove(
            recipe, sizes, at_step=wanted.at_step, steps=wanted.steps, runner=wanted.runner, workers=wanted.workers,
            address=wanted.address, on_step=on_step,
        )  # fmt: skip
    if wanted.as_json:
        emit({"recipe": recipe.name, "equal": proof.equal, **asdict(proof)})
    else:
        _show(recipe.name, proof)
    return 0 if proof.equal else 1


def _show(name: str, proof: Proof) -> None:
    first, last = proof.digests[0], proof.digests[-1]
    facts = [
        ("recipe", name),
        ("fingerprint", proof.fingerprint),
        ("state", f"after step {proof.at_step}, {proof.state_bytes:,} bytes, the same for every number of ranks"),
        ("compared", f"steps {first[0]} to {last[0]} with those of a run that was never stopped"),
        ("chain", f"{last[2]} after step {last[0]}"),
    ]
    headings = ("ranks", "rows of a rank", "rows compared", "rows and digests", "state at the end")
    rows = ((str(s.dp_size), str(s.rows), f"{s.compared:,}", _found(s), "equal" if s.state_equal else "differs") for s in proof.sizes)
    show(pairs_of(facts), table(headings, rows, words=(3, 4)), _verdict(proof))


def _found(size: SizeProof) -> str:
    return "equal" if size.difference is None else size.difference


def _verdict(proof: Proof) -> str:
    if proof.equal:
        return "Every rank got the rows of the uninterrupted run, whatever the number of ranks."
    sizes = ", ".join(str(size.dp_size) for size in proof.sizes if not size.equal)
    return f"(!) {sizes} ranks got something else. This must not happen: please report it with the recipe and the output of --json"
