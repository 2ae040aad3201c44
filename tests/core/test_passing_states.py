"""Where nothing can be appended to a file, a killed writer has little to make again: states are saved with what is sealed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.s3_server import Bucket
from tests.small import a_recipe
from zephon_ray.collector import prepare
from zephon_ray.ledger import writer as ledger_module
from zephon_ray.recipe import Recipe
from zephon_ray.rundir import STATE_EVERY, RunWriter
from zephon_ray.state import to_bytes
from zephon_ray.stream import Stream


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return a_recipe(tmp_path)


def killed(recipe: Recipe, out: str, last: int, save: int = 0) -> None:
    """A writer that writes the steps up to `last`, on from where the directory ends, and then is no more."""
    prepared = prepare(recipe)
    writer = RunWriter.open(recipe, out, prepared[1], prepared[0].manifests)
    state, recorded = writer.resume()
    stream = Stream(recipe, runner="inline", state=state, recorded=recorded, prepared=prepared)
    while (batch := stream.next_batch()) is not None:
        writer.write(batch.ledger_line, batch.state)
        if batch.step == save:
            writer.save_state(batch.state)
        if batch.step >= last:
            break
    stream.close()


def at_hand(recipe: Recipe, out: str) -> tuple[int, int, list[int]]:
    """The ledger's end, the state from which it is gone on, and all states."""
    prepared = prepare(recipe)
    writer = RunWriter.open(recipe, out, prepared[1], prepared[0].manifests)
    assert writer.last is not None
    found = writer.nearest(writer.last.step)
    assert found is not None
    assert found[1] == to_bytes(found[0], prepared[1])
    return writer.last.step, found[0].step, writer.directory.states.steps()


def test_in_a_bucket_a_state_is_saved_with_each_segment_and_only_the_newest_stay(
    bucket: Bucket, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = recipe.execution.model_copy(update={"storage": bucket.spec()})
    recipe, out = recipe.model_copy(update={"execution": spec}), f"{bucket.url}/run"
    monkeypatch.setattr(ledger_module, "SEAL_SECONDS", 0.0)  # each segment is one step
    killed(recipe, out, last=9, save=4)
    assert at_hand(recipe, out) == (9, 9, [4]), "nothing is made again"
    killed(recipe, out, last=14)
    assert at_hand(recipe, out) == (14, 14, [4])
    monkeypatch.setattr(ledger_module, "SEAL_SECONDS", 3600.0)
    killed(recipe, out, last=20)
    assert at_hand(recipe, out) == (14, 14, [4]), "what was not sealed is lost, and no state is ahead of it"
    files = sorted(path.name for path in (bucket.folder / "run" / "states").iterdir())
    assert files == ["000000000004.json", "passing-0.json", "passing-1.json"]
    for name in files[1:]:
        (bucket.folder / "run" / "states" / name).write_bytes(b'{"step":14,"sha256":"')
    assert at_hand(recipe, out) == (14, 4, [4]), "damaged ones are passed over"


def test_on_a_disk_where_no_line_is_lost_no_more_states_are_saved(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "SEAL_SECONDS", 0.0)
    killed(recipe, str(tmp_path / "run"), last=STATE_EVERY + 9)
    assert at_hand(recipe, str(tmp_path / "run")) == (STATE_EVERY + 9, STATE_EVERY, [STATE_EVERY])
