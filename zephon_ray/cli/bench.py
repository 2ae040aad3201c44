"""`bench`: what a recipe's batches cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from zephon_ray.benchmark.figures import Bench, Comparison, Figures, recommendation
from zephon_ray.cli.render import emit, number, percent, say, show, size, table
from zephon_ray.recipe import load_recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The command line of `bench`."""

    recipe: str
    overrides: tuple[str, ...]
    runners: tuple[str | None, ...]
    seconds: float
    compare: bool
    workers: int | None
    address: str | None
    as_json: bool


def measure(wanted: Wanted) -> int:
    """Measure, and show what was found. Returns the exit code."""
    load_recipe(wanted.recipe, wanted.overrides)  # what is wrong with it is told here, and not by a process that fails
    bench = Bench(
        recipe=wanted.recipe, overrides=wanted.overrides, workers=wanted.workers, address=wanted.address, seconds=wanted.seconds, say=say
    )
    found = [bench.runner(name) for name in wanted.runners]
    compared = bench.compare() if wanted.compare else None
    text = recommendation(found)
    if wanted.as_json:
        first, *others = map(asdict, found)
        peers = None if compared is None else [asdict(line) for line in compared.lines]
        missing = None if compared is None else [{"title": peer.title, "pip": peer.pip} for peer in compared.missing]
        emit({**first, "others": others, "peers": peers, "missing": missing, "recommendation": text})
        return 0
    show(_table(found))
    if compared is not None:
        show(*_comparison(compared))
    show(text)
    return 0


def _table(found: Sequence[Figures]) -> object:
    facts: list[tuple[str, list[str]]] = [
        ("engine", [f.engine for f in found]),
        ("workers", [str(f.workers) for f in found]),
        ("tokens/s", [number(f.tokens_per_s) for f in found]),
        ("CPU s a million tokens", [f"{f.cpu_s_per_mtok:.4f}" for f in found]),
        ("of the engine alone", [f"{f.limit_cpu_s_per_mtok:.4f}" for f in found]),
        ("ratio", [f"{f.ratio:.2f}" for f in found]),
    ]
    names = list(dict.fromkeys(name for f in found for name in f.stages))
    facts += [(f"  {name}", [f"{f.stages[name]:.4f}" if name in f.stages else "" for f in found]) for name in names]
    facts += [
        ("units from the token cache", [percent(f.cached) for f in found]),
        ("first batch", [f"{f.first_batch_s:.2f} s" for f in found]),
        ("opened again, to the first batch", [f"{f.cold_s:.2f} s" for f in found]),
        ("from a state, to the first batch", [f"{f.restore_s:.2f} s" for f in found]),
        ("a state", [size(f.state_bytes) for f in found]),
        ("most memory (PSS)", [f"{f.peak_pss_mb:.0f} MB" for f in found]),
        ("workers at work", [percent(f.worker_utilisation) for f in found]),
        ("measured", [f"{f.seconds:.1f} s, {number(f.tokens)} tokens" for f in found]),
        ("load before, CPUs", [f"{f.load:.1f}, {f.cpus}" for f in found]),
    ]
    return table(["", *(f.runner for f in found)], ([name, *values] for name, values in facts))


def _comparison(compared: Comparison) -> list[object]:
    ours = compared.lines[0].cpu_s_per_mtok
    rows = [
        [line.title, "failed", "", "", "", ""] if line.failed else [
            line.title, number(line.tokens_per_s), f"{line.cpu_s_per_mtok:.4f}", f"{line.cpu_s_per_mtok / max(1e-9, ours):.1f}",
            f"{line.first_batch_s:.1f} s", f"{line.peak_pss_mb:.0f} MB",
        ]
        for line in compared.lines
    ]  # fmt: skip
    headings = ["on the same documents", "tokens/s", "CPU s/Mtok", "times ours", "first batch", "PSS"]
    told: list[object] = [table(headings, rows)]
    told += [f"{line.title}: {line.failed}" for line in compared.lines if line.failed]
    told += [f"{peer.title} is not installed: pip install {peer.pip}" for peer in compared.missing]
    return told
