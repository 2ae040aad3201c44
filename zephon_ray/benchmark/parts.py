"""The parts of a stream, each alone in one thread: reading, the engine, making units, and the ordered part."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from zephon_ray.collector import Collector, prepare
from zephon_ray.plan.windows import Position, SourceCursor, UnitTask
from zephon_ray.recipe import Recipe, load_recipe
from zephon_ray.runners.base import FailedUnit, Job, Runner, RunnerStats
from zephon_ray.runners.local import InlineRunner
from zephon_ray.stages.engines import encoder_of
from zephon_ray.stages.reading import UnitReader
from zephon_ray.stages.texts import UnitTexts
from zephon_ray.stages.tokenise import make_options
from zephon_ray.stages.unit import TokenisedUnit
from zephon_ray.storage import Storage


def cpu_s() -> float:
    """CPU seconds of all threads of this process."""
    return time.process_time()


class _Timed(Runner):
    """A runner in the caller's thread that knows how long it took, and how much it made."""

    reads_ahead = False

    def __init__(self) -> None:
        self._runner = InlineRunner()
        self.cpu_s = 0.0
        self.pairs = 0

    def start(self, job: Job, positions: Sequence[Position]) -> None:
        self._runner.start(job, positions)

    def allow(self, source: int, windows: int) -> None:
        self._runner.allow(source, windows)

    def take(self, timeout_s: float) -> TokenisedUnit | FailedUnit:
        began = cpu_s()
        unit = self._runner.take(timeout_s)
        self.cpu_s += cpu_s() - began
        self.pairs += unit.pairs if isinstance(unit, TokenisedUnit) else 0
        return unit

    def close(self) -> None:
        self._runner.close()

    def stats(self) -> RunnerStats:
        return self._runner.stats()


def measure_parts(*, spawned: float, recipe: str, overrides: list[str], seconds: float) -> dict[str, Any]:
    """Batches made in one thread, for some CPU seconds after the first.

    Args:
        spawned: not used; every measurement is told.
        recipe: path of a recipe.
        overrides: of its fields.
        seconds: of CPU.

    Returns:
        make_cpu_s_per_mtok (units), collect_cpu_s_per_mtok (dealing, mixing, packing, digests, ledger lines), pairs_per_byte of text.
    """
    del spawned
    job, _ = prepare(load_recipe(recipe, overrides))
    runner = _Timed()
    with runner:
        collector = Collector(job, runner)
        collector.next_batch()
        made, making, text_bytes = runner.pairs, runner.cpu_s, runner.stats().text_bytes
        began, delivered = cpu_s(), 0
        while cpu_s() - began < seconds or runner.pairs == made:
            batch = collector.next_batch()
            if batch is None:
                break
            delivered += batch.rows.shape[0] * batch.rows.shape[2] - batch.padding
            assert batch.ledger_line is not None
        spent = cpu_s() - began
        made, making, text_bytes = runner.pairs - made, runner.cpu_s - making, runner.stats().text_bytes - text_bytes
    return {
        "make_cpu_s_per_mtok": making / max(1, made) * 1e6,
        "collect_cpu_s_per_mtok": (spent - making) / max(1, delivered) * 1e6,
        "pairs_per_byte": made / max(1, text_bytes),
    }


def measure_engine(*, spawned: float, recipe: str, overrides: list[str], seconds: float) -> dict[str, Any]:
    """The texts of a recipe read, and encoded by its engine alone: what no loader around it can be cheaper than.

    Args:
        spawned: not used; every measurement is told.
        recipe: path of a recipe.
        overrides: of its fields.
        seconds: of CPU.

    Returns:
        limit_cpu_s_per_mtok (the engine), read_cpu_s_per_mtok, engine (its name), tokens.
    """
    del spawned
    made = load_recipe(recipe, overrides)
    options = make_options(made)
    encoder = encoder_of(options.tokenizer_json, options.tokenizer_sha256, plain=options.encode_special_tokens, engine=options.engine)
    reading = encoding = 0.0
    tokens = 0
    units = texts_of(made)
    task, read = next(units)
    encoder.encode(read.texts, task.key)  # checks and loads
    while reading + encoding < seconds:
        began = cpu_s()
        found = next(units, None)
        if found is None:
            break
        read_at = cpu_s()
        encoded, _ = encoder.encode(found[1].texts, found[0].key)
        reading, encoding, tokens = reading + read_at - began, encoding + cpu_s() - read_at, tokens + len(encoded.ids)
    per = 1e6 / max(1, tokens)
    return {"limit_cpu_s_per_mtok": encoding * per, "read_cpu_s_per_mtok": reading * per, "engine": encoder.engine_name, "tokens": tokens}


def texts_of(recipe: Recipe) -> Iterator[tuple[UnitTask, UnitTexts]]:
    """The units of a recipe as they are read, in the order of windows, the sources in turn by their shares; for ever if they are."""
    job, _ = prepare(recipe)
    options = job.options
    reader = UnitReader(Storage(options.storage), options.max_document_bytes, options.on_bad_record == "fail", options.max_streams)
    walks = [_walk(recipe, job, reader, source) for source in range(len(recipe.sources))]
    given = [0.0] * len(walks)
    while True:
        source = min(range(len(walks)), key=lambda number: given[number])
        found = next(walks[source], None)
        if found is None:
            return
        given[source] += max(1, found[1].texts.nbytes) / recipe.shares()[source]
        yield found


def _walk(recipe: Recipe, job: Job, reader: UnitReader, source: int) -> Iterator[tuple[UnitTask, UnitTexts]]:
    cursor = SourceCursor(recipe, job.manifests[source])
    while not cursor.done:
        lasts = []
        for task in cursor.tasks():
            read = reader.read(task)
            lasts.append(read.last)
            yield task, read
        cursor.advance(lasts)
