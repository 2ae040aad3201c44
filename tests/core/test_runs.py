"""A run's directory: continued exactly, wherever it was stopped; verified; and never gone on with over another run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.small import a_recipe, documents, write_lines
from zephon_ray import runs
from zephon_ray.batches import GlobalBatch
from zephon_ray.errors import DataChangedError, DifferenceError, RecipeError, ReplayError, RunDirectoryError, UserError
from zephon_ray.ledger import LedgerReader
from zephon_ray.loader import Loader
from zephon_ray.recipe import Recipe
from zephon_ray.runs import produce, verify
from zephon_ray.storage import Storage
from zephon_ray.telemetry import descendants

pytestmark = pytest.mark.xdist_group("processes")  # it looks at all threads and children of this process: no cluster

TWO = {"a": {"weight": 0.7}, "b": {"weight": 0.3}}


def lines(recipe: Recipe, out: Path | str) -> list[bytes]:
    storage = Storage(recipe.execution.storage)
    return [line.to_json() for line in LedgerReader.open(storage, storage.join(str(out), "ledger")).lines()]


def test_a_run_stopped_and_continued_has_the_ledger_of_an_unbroken_one(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, TWO)
    produce(recipe, steps=250, out=str(tmp_path / "whole"))
    seen: list[int] = []
    for steps in (3, 3, 99, 100, 101, 205, 250):
        summary = produce(recipe, steps=steps, out=str(tmp_path / "parts"), on_step=lambda b: seen.append(b.step))
        assert summary.last_step == steps
        assert not summary.ended
    assert seen == list(range(1, 251))
    assert lines(recipe, tmp_path / "parts") == lines(recipe, tmp_path / "whole")


def test_the_ledger_does_not_depend_on_runner_or_read_ahead(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, TWO)
    for runner in ("inline", "threads", "processes"):
        produce(recipe, steps=60, out=str(tmp_path / runner), runner=runner, workers=2)
    assert lines(recipe, tmp_path / "inline") == lines(recipe, tmp_path / "threads") == lines(recipe, tmp_path / "processes")


def test_the_ledger_counts_what_was_left_out_at_the_step_that_first_uses_it(tmp_path: Path) -> None:
    docs = documents(200)
    docs[3], docs[150] = "", ""
    write_lines(tmp_path / "a" / "0.jsonl", docs)
    recipe = a_recipe(tmp_path, {"a": {"epochs": 1, "window_groups": 1}}, shuffle={"groups": False, "documents": False})
    counted: list[tuple[int, int]] = []
    produce(recipe, steps=10_000, on_step=lambda b: counted.extend((b.step, counts[1]) for counts in b.left_out.values()))
    assert [n for _, n in counted] == [1, 1]
    assert counted[0][0] == 1
    assert counted[1][0] > 100


@pytest.mark.fault
def test_a_run_that_is_to_stop_does_not_wait_for_workers_that_were_stopped_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "LAST_STEP_S", 0.3)
    recipe = a_recipe(tmp_path, execution={"runner": "processes", "prefetch_steps": 0, "workers": {"max": 1}})
    frozen, waiting, main = threading.Event(), threading.Event(), threading.get_ident()

    def freeze(batch: GlobalBatch) -> None:
        if batch.step == 2:
            for process in descendants():
                if b"zephon_ray.runners.worker" in Path(f"/proc/{process.pid}/cmdline").read_bytes():
                    os.kill(process.pid, signal.SIGSTOP)
                    frozen.set()

    def stop() -> bool:
        """True as soon as the run waits for a step after the workers were frozen."""
        if frozen.is_set() and threading.get_ident() == main and not waiting.is_set():
            waiting.set()
            return False
        return waiting.is_set()

    began = time.monotonic()
    summary = produce(recipe, steps=10**6, out=str(tmp_path / "run"), on_step=freeze, stop=stop)
    assert time.monotonic() - began < 60
    assert frozen.is_set()
    assert summary.last_step >= 2
    assert not summary.ended
    assert (tmp_path / "run" / "states" / f"{summary.last_step:012d}.json").exists()
    last = summary.last_step + 3
    assert produce(recipe, steps=last, out=str(tmp_path / "run"), runner="inline").last_step == last
    assert verify(str(tmp_path / "run"), runner="inline").steps == last


def test_an_address_is_for_ray_alone_and_refused_before_anything_is_written(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path)
    for act in (
        lambda: produce(recipe, steps=1, out=str(tmp_path / "run"), address="127.0.0.1:1"),
        lambda: next(Loader(recipe, runner="threads", address="127.0.0.1:1")),
    ):
        with pytest.raises(UserError, match=r"address=127.0.0.1:1 .* runner is '(inline|threads)'"):
            act()
    assert not (tmp_path / "run").exists()


def test_the_end_of_the_stream_is_the_end_of_the_run(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, {"a": {"epochs": 1}})
    summary = produce(recipe, steps=10_000, out=str(tmp_path / "out"))
    assert summary.ended
    again = produce(recipe, steps=10_000, out=str(tmp_path / "out"))
    assert again.ended
    assert (again.last_step, again.chain, again.made_pairs) == (summary.last_step, summary.chain, (0,))


def test_ranks_rows_are_proven_to_be_the_batch(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, TWO, global_batch_size=12)
    chains = {produce(recipe, steps=5, dp_size=size).chain for size in (1, 2, 3, 4, 6, 12)}
    assert len(chains) == 1
    with pytest.raises(RecipeError, match="5"):
        produce(recipe, steps=5, dp_size=5)
    with pytest.raises(UserError):
        produce(recipe, steps=-1)


def test_another_recipe_or_data_is_refused_with_both_values(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    produce(a_recipe(tmp_path, TWO), steps=3, out=out)
    with pytest.raises(RunDirectoryError, match=r"seed: the directory has 7, this run 8"):
        produce(a_recipe(tmp_path, TWO, seed=8), steps=5, out=out)
    write_lines(tmp_path / "b" / "9.jsonl", documents(3))
    with pytest.raises(RunDirectoryError, match=r"9\.jsonl"):
        produce(a_recipe(tmp_path, TWO), steps=5, out=out)
    with pytest.raises(RunDirectoryError, match=r"9\.jsonl"):
        verify(out)


def change_in_place(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert len(old) == len(new)
    assert old in text
    file.write_text(text.replace(old, new, 1))


def test_data_changed_in_place_is_an_error_that_names_the_shard(tmp_path: Path) -> None:
    for n in range(2):
        write_lines(tmp_path / "a" / f"{n}.jsonl", documents(60, seed=n))
    recipe = a_recipe(tmp_path, {"a": {"window_groups": 2}}, unit_bytes=65536)
    out = str(tmp_path / "out")
    produce(recipe, steps=10, out=out)
    change_in_place(tmp_path / "a" / "1.jsonl", "w7", "w8")
    with pytest.raises(DataChangedError, match=r"shard 1\.jsonl"):
        produce(recipe, steps=20, out=out)
    with pytest.raises(DataChangedError, match=r"shard 1\.jsonl"):
        verify(out)
    assert len(lines(recipe, out)) == 10


def test_verify_makes_the_steps_again_and_compares_every_field(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, TWO)
    out = str(tmp_path / "out")
    produce(recipe, steps=230, out=out)
    before = sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "out").rglob("*"))
    assert verify(out).steps == 230
    seen: list[int] = []
    summary = verify(out, first=150, last=160, on_step=lambda b: seen.append(b.step))
    assert summary.steps == 11
    assert seen[0] == 101, "the nearest state is that after step 100"
    assert verify(out, runner="threads", first=230).steps == 1
    assert before == sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "out").rglob("*")), "verify writes nothing"
    for first, last in ((0, 5), (5, 4), (200, 231)):
        with pytest.raises(RunDirectoryError, match="230"):
            verify(out, first=first, last=last)
    with pytest.raises(RunDirectoryError, match="not the directory of a run"):
        verify(str(tmp_path))


def test_a_step_that_differs_from_the_ledger_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when code changes under a run: the padding of a step that is made again is told wrong."""
    recipe = a_recipe(tmp_path, TWO)
    out = str(tmp_path / "out")
    produce(recipe, steps=10, out=out)
    (tmp_path / "out" / "states" / f"{10:012d}.json").unlink()
    import zephon_ray.runs as runs

    class Wrong(runs.Stream):
        def next_batch(self):  # type: ignore[no-untyped-def]
            import dataclasses

            batch = super().next_batch()
            return dataclasses.replace(batch, padding=99) if batch is not None and batch.step == 4 else batch

    with monkeypatch.context() as patched:
        patched.setattr(runs, "Stream", Wrong)
        with pytest.raises(ReplayError, match=r"step 4.*padding"):
            produce(recipe, steps=12, out=out)
        with pytest.raises(DifferenceError, match=r"step 4.*padding"):
            verify(out)
    assert produce(recipe, steps=12, out=out).last_step == 12
    assert verify(out).steps == 12


RUN = """
import sys
from zephon_ray.recipe import load_recipe
from zephon_ray.runs import produce
tell = lambda batch: print(batch.step, flush=True)
produce(load_recipe(sys.argv[1]), steps=1_000_000, out=sys.argv[2], runner=sys.argv[3], workers=2, on_step=tell)
"""


@pytest.mark.fault
@pytest.mark.parametrize("runner", ["threads", "processes"])
def test_a_killed_run_goes_on_exactly_and_leaves_no_orphan(tmp_path: Path, runner: str) -> None:
    recipe = a_recipe(tmp_path, TWO)
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    out = tmp_path / "out"
    for target in (3, 130):
        command = [sys.executable, "-c", RUN, str(tmp_path / "recipe.yaml"), str(out), runner]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if int(line) >= target:
                    break
            children = psutil.Process(process.pid).children(recursive=True)
            assert runner == "threads" or children
            process.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive
    at = max(len(lines(recipe, out)), 130)
    produce(recipe, steps=at + 50, out=str(out))
    produce(recipe, steps=at + 50, out=str(tmp_path / "whole"))
    assert lines(recipe, out) == lines(recipe, tmp_path / "whole")


def test_a_run_can_be_kept_under_any_url(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, TWO)
    out = f"memory://{tmp_path.name}/out"
    produce(recipe, steps=5, out=out)
    produce(recipe, steps=12, out=out)
    assert verify(out).steps == 12
    produce(recipe, steps=12, out=str(tmp_path / "local"))
    assert lines(recipe, out) == lines(recipe, tmp_path / "local")
