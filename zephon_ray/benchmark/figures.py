"""Figures: measurements put together."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from zephon_ray.benchmark.peers import PEERS, Peer, export
from zephon_ray.benchmark.processes import Measured, measure
from zephon_ray.errors import RunnerError
from zephon_ray.recipe import Recipe, load_recipe
from zephon_ray.recipe_yaml import write_yaml

START_S = 300.0
"""Seconds that a measurement may take besides what is measured: to start Ray, to come to a first batch, to open two streams more."""
PARTS_S = 6.0
"""CPU seconds for which parts are measured, at most; less where the whole is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What one runner's batches cost.

    Args:
        runner: its name.
        engine: what made the ids.
        workers: how many.
        tokens_per_s: next-token pairs delivered a second.
        cpu_s_per_mtok: CPU seconds of all processes a million of them. What was made before and delivered meanwhile, or the other way
            round, is accounted for at what making takes alone.
        limit_cpu_s_per_mtok: of the engine alone, on the same texts.
        ratio: of these two.
        first_batch_s: from the start of the process.
        peak_pss_mb: of all processes, in MB of 10^6 bytes.
        stages: CPU seconds a million tokens of each: `read`, `encode`, or `cache` where units come from there; `collect`; and `rest`: what
            the whole takes more than its parts alone (threads, processes, Ray).
        state_bytes: of a state.
        restore_s: from a state to the first batch, in a process that was at work before.
        cold_s: from the beginning, likewise.
        worker_utilisation: share of the workers' time, in [0, 1], that making units takes: 1 says that they are what bounds the speed.
        cached: share of units from the token cache.
        tokens: that were delivered while measured.
        seconds: that it was measured.
        load: processes that wanted a CPU in the minute before, on average.
        cpus: of this machine.
    """

    runner: str
    engine: str
    workers: int
    tokens_per_s: float
    cpu_s_per_mtok: float
    limit_cpu_s_per_mtok: float
    ratio: float
    first_batch_s: float
    peak_pss_mb: float
    stages: dict[str, float]
    state_bytes: int
    restore_s: float
    cold_s: float
    worker_utilisation: float
    cached: float
    tokens: int
    seconds: float
    load: float
    cpus: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerFigures:
    """What another loader costs on the same documents. Fields as in `Figures`.

    Args:
        title: of the loader.
        failed: why there is nothing, else None.
    """

    title: str
    tokens_per_s: float = 0.0
    cpu_s_per_mtok: float = 0.0
    first_batch_s: float = 0.0
    peak_pss_mb: float = 0.0
    failed: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Peers beside this loader on the same documents.

    Args:
        lines: the first is this loader.
        missing: what is not installed.
    """

    lines: tuple[PeerFigures, ...]
    missing: tuple[Peer, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What is to be measured.

    Args:
        recipe: path of a recipe.
        overrides: of its fields.
        workers: how many; None for what the recipe and the machine have.
        address: of a Ray cluster, whose processes are not measured; None for one of its own.
        seconds: each is measured for so long.
        say: told what goes on.
    """

    recipe: str
    overrides: tuple[str, ...]
    workers: int | None
    address: str | None
    seconds: float
    say: Callable[[str], None]

    def runner(self, name: str | None) -> Figures:
        """Measure one runner, by default the recipe's; and its parts, and the engine's limit.

        Raises:
            RunnerError: a measurement failed.
        """
        load = os.getloadavg()[0]
        common = {"recipe": self.recipe, "overrides": list(self.overrides)}
        parts_s = min(PARTS_S, self.seconds)
        self.say("the engine alone ...")
        engine = self._measure("engine", seconds=parts_s, **common).result
        self.say("the parts, in one thread ...")
        parts = self._measure("parts", seconds=parts_s, **common).result
        self.say("the whole ...")
        whole = self._measure("whole", runner=name, workers=self.workers, address=self.address, seconds=self.seconds, **common)
        return _figures(whole, parts, engine, load)

    def compare(self) -> Comparison:
        """Measure this loader, by its threads, and every peer that is installed, on documents of the recipe."""
        recipe = load_recipe(self.recipe, self.overrides)
        with tempfile.TemporaryDirectory(prefix="zephon-bench-") as name:
            folder = Path(name)
            self.say("writing documents for all ...")
            shape = export(recipe, folder)
            ours = self._ours(recipe, folder)
            lines = [ours, *(self._peer(key, asdict(shape)) for key, peer in PEERS.items() if peer.installed)]
        return Comparison(lines=tuple(lines), missing=tuple(peer for peer in PEERS.values() if not peer.installed))

    def _ours(self, recipe: Recipe, folder: Path) -> PeerFigures:
        path = folder / "recipe.yaml"
        path.write_text(write_yaml(_on_exported(recipe, folder)), encoding="utf-8")
        figures = replace(self, recipe=str(path), overrides=(), address=None).runner("threads")
        return PeerFigures(
            title=f"this loader, threads, {figures.engine}",
            tokens_per_s=figures.tokens_per_s,
            cpu_s_per_mtok=figures.cpu_s_per_mtok,
            first_batch_s=figures.first_batch_s,
            peak_pss_mb=figures.peak_pss_mb,
        )

    def _peer(self, key: str, shape: dict[str, Any]) -> PeerFigures:
        title = PEERS[key].title
        self.say(f"{title} ...")
        try:
            found = self._measure("peer", name=key, shape=shape, seconds=self.seconds)
        except RunnerError as error:
            return PeerFigures(title=title, failed=str(error))
        result = found.result
        return PeerFigures(
            title=title,
            tokens_per_s=result["tokens"] / result["seconds"],
            cpu_s_per_mtok=result["cpu_seconds"] / max(1, result["tokens"]) * 1e6,
            first_batch_s=result["first_batch_s"],
            peak_pss_mb=found.peak_pss_mb,
        )

    def _measure(self, what: str, *, seconds: float, **arguments: Any) -> Measured:
        return measure(what, {"seconds": seconds, **arguments}, START_S + 10 * seconds)


def _figures(measured: Measured, parts: dict[str, Any], engine: dict[str, Any], load: float) -> Figures:
    whole = measured.result
    make, collect = parts["make_cpu_s_per_mtok"], parts["collect_cpu_s_per_mtok"]
    tokens, made = whole["tokens"] / 1e6, whole["text_bytes"] * parts["pairs_per_byte"] / 1e6
    cost = max(0.0, whole["cpu_seconds"] + make * (tokens - made)) / max(1e-9, tokens)
    read, limit = engine["read_cpu_s_per_mtok"], engine["limit_cpu_s_per_mtok"]
    cached = whole["cached"] / max(1, whole["units"])
    making = {"cache": make} if cached > 0.5 else {"read": min(read, make), "encode": max(0.0, make - read)}
    return Figures(
        runner=whole["runner"],
        engine=engine["engine"],
        workers=whole["workers"],
        tokens_per_s=whole["tokens"] / whole["seconds"],
        cpu_s_per_mtok=cost,
        limit_cpu_s_per_mtok=limit,
        ratio=cost / max(1e-9, limit),
        first_batch_s=whole["first_batch_s"],
        peak_pss_mb=measured.peak_pss_mb,
        stages={**making, "collect": collect, "rest": max(0.0, cost - make - collect)},
        state_bytes=whole["state_bytes"],
        restore_s=whole["restore_s"],
        cold_s=whole["cold_s"],
        worker_utilisation=min(1.0, make * made / (whole["workers"] * whole["seconds"])),
        cached=cached,
        tokens=whole["tokens"],
        seconds=whole["seconds"],
        load=load,
        cpus=os.cpu_count() or 1,
    )


def _on_exported(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """The recipe over the documents that were written: the peers' rows, mixture and tokenizer, and no token cache."""
    data = recipe.model_dump(mode="json", by_alias=True, exclude={"sources", "execution"}, exclude_none=True)
    data["tokenizer"] = {"path": str(folder / "tokenizer.json"), "eos": recipe.tokenizer.eos, "pad": recipe.tokenizer.eos}
    data["sources"] = [
        {
            "name": source.name,
            "uri": str(folder / str(number)),
            "weight": recipe.shares()[number],
            "unit_bytes": min(recipe.unit_bytes, 1 << 18),
        }
        for number, source in enumerate(recipe.sources)
    ]
    data["execution"] = {"engine": recipe.execution.engine, "workers": {"max": recipe.execution.workers.max}}
    return data


def recommendation(found: Sequence[Figures]) -> str:
    """A paragraph: threads, processes or Ray, for what was measured."""
    by_name = {figures.runner: figures for figures in found}
    first = found[0]
    text = (
        "Threads or processes or Ray: on one machine take threads. The engine and the readers let go of the interpreter, all workers share"
        " one tokenizer, and nothing is copied between processes. Take processes where a worker may not end its trainer with it (memory,"
        " a library that crashes), at the price of a tokenizer each and a copy of the ids. Take Ray for more than one machine, for CPU"
        " workers that come and go, and for a feed that many ranks read: it costs some ms a block of 4 M ids or less, and a gigabyte."
    )
    threads, others = by_name.get("threads"), [figures for figures in found if figures.runner != "threads"]
    if threads and others:
        shown = ", ".join(f"{figures.runner} {figures.cpu_s_per_mtok / max(1e-9, threads.cpu_s_per_mtok):.2f} times" for figures in others)
        text += f" Measured here, in CPU a token: {shown} what threads take."
    more = "be faster" if first.worker_utilisation > 0.8 else "not help"
    busy = f"{first.worker_utilisation:.0%}"
    return f"{text} Making units took {busy} of the workers' time ({first.runner}, {first.workers}): more of them would {more}."
