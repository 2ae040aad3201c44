"""Start-up: from a state to the first batch, beside a cold start, early and late in a run.

    python -m tests.bench.startup [--steps 10 15000] [--rounds 3] [--files 16] [--formats plain groups zst cut]

For each format a stream is run up to each step; then streams are opened at the beginning and from that state, in turn, in one process,
with one worker thread. Prints CPU seconds (of all threads) and seconds up to the first batch, the median of the rounds, and their ratio.
Where a group has several units (`zst`, `cut`) what lies before the state in it is decoded too: that is shown as MB, and as MB a CPU second.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.golden_cases import GOLDEN
from zephon_ray.recipe import Recipe, recipe_from_dict
from zephon_ray.stream import Stream
from zephon_ray.testing import documents

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

FORMATS = ("plain", "groups", "zst", "cut")
UNIT_BYTES = 32_768
DOCUMENTS = 1600
"""In a file: about 600 kB of text, 18 units."""


def write(folder: Path, form: str, files: int) -> None:
    """A corpus: `plain` JSON lines; Parquet with row `groups` of a unit each; `zst`: compressed lines; `cut`: one row group a file."""
    folder.mkdir(parents=True)
    for number in range(files):
        texts = documents(DOCUMENTS, words=60, seed=number)
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        if form == "plain":
            (folder / f"{number:04}.jsonl").write_bytes(lines)
        elif form == "zst":
            (folder / f"{number:04}.jsonl.zst").write_bytes(zstd.compress(lines))
        else:
            sink = io.BytesIO()
            size = DOCUMENTS if form == "cut" else max(1, DOCUMENTS * UNIT_BYTES // len(lines) // 2)
            pq.write_table(pa.table({"text": texts}), sink, row_group_size=size, use_dictionary=False, data_page_size=8192)
            (folder / f"{number:04}.parquet").write_bytes(sink.getvalue())


def a_recipe(folder: Path) -> Recipe:
    fields = {
        "schema": 1, "name": "startup", "seed": 5, "lanes": 8, "sequence_length": 64, "global_batch_size": 8, "unit_bytes": UNIT_BYTES,
        "tokenizer": {"path": str(GOLDEN / "tokenizer.json"), "eos": "<|eos|>"}, "sources": [{"name": "a", "uri": str(folder)}],
        "execution": {"runner": "threads", "engine": "hf"},
    }  # fmt: skip
    return recipe_from_dict(fields, "/")


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What it took to a first batch: CPU and wall clock seconds, and bytes that were decoded on the way and not used."""

    cpu_s: float
    wall_s: float
    skipped: int


def start(recipe: Recipe, state: bytes | None) -> Start:
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    with closing(Stream(recipe, workers=1, state=state)) as stream:
        assert stream.next_batch() is not None
        return Start(cpu_s=time.process_time() - cpu_s, wall_s=time.perf_counter() - wall_s, skipped=stream.stats().skipped_bytes)


def states(recipe: Recipe, steps: list[int]) -> list[bytes]:
    """Those after some steps, in order."""
    found = []
    with closing(Stream(recipe, workers=2)) as stream:
        for step in range(1, max(steps) + 1):
            stream.next_batch()
            if step in steps:
                found.append(stream.state_bytes())
    return found


def compare(recipe: Recipe, state: bytes, rounds: int) -> tuple[list[Start], list[Start]]:
    """Cold starts, and those from a state, taken in turn."""
    start(recipe, None)
    pairs = [(start(recipe, None), start(recipe, state)) for _ in range(rounds)]
    return [cold for cold, _ in pairs], [warm for _, warm in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[10, 15_000])
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print("| format | step | cold CPU s | restore CPU s | ratio | cold s | restore s | decoded, not used | MB a CPU s | state |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for form in args.formats:
            write(Path(folder) / form, form, args.files)
            recipe = a_recipe(Path(folder) / form)
            for step, state in zip(sorted(args.steps), states(recipe, args.steps), strict=True):
                cold, warm = compare(recipe, state, args.rounds)
                of = [statistics.median(getattr(one, kind) for one in some) for kind in ("cpu_s", "wall_s") for some in (cold, warm)]
                skipped = statistics.median(w.skipped for w in warm) / 1e6
                rate = f"{skipped / max(1e-3, of[1] - of[0]):.0f}" if skipped else ""
                print(
                    f"| {form} | {step} | {of[0]:.3f} | {of[1]:.3f} | {of[1] / of[0]:.2f} | {of[2]:.3f} | {of[3]:.3f}"
                    f" | {skipped:.2f} MB | {rate} | {len(state)} B |",
                    flush=True,
                )  # fmt: skip


if __name__ == "__main__":
    main()
