"""Ranks of a trainer that share one stream: a feed that is served, or one that the ranks of a host start among themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.feed.feeds import serving
from tests.training.loops import STEPS, corpus, digests_of, folded, held_out, row_digests
from zephon_ray import runs
from zephon_ray.errors import RecipeError
from zephon_ray.loader import Loader
from zephon_ray.recipe import load_recipe
from zephon_ray.training import sources
from zephon_ray.training.microbatches import MicroBatches
from zephon_ray.training.sources import SourceOptions

ROOT = Path(__file__).parents[2]
RANKS = 2


def _joined(ranks: list[MicroBatches]) -> str:
    """The digest of the next global batch, of all ranks' micro-batches of one row."""
    rows = []
    for batches in ranks:
        for _ in range(4 // len(ranks)):
            batch = next(batches)
            rows += row_digests(batch.input, batch.labels, batch.positions)
    return folded(rows)


@pytest.mark.usefixtures("ray_session")
def test_ranks_of_a_served_feed_train_validate_again_and_again_and_have_one_state(tmp_path: Path) -> None:
    recipe, held = corpus(tmp_path / "a"), load_recipe(held_out(tmp_path / "b", texts=4))

    def ranks(state: bytes | None = None, count: str = "0", **options: Any) -> list[MicroBatches]:
        made = SourceOptions(**{"recipe": recipe, "feed": "served", "incarnation": f"run:{count}"} | options)
        sources.check(made)
        return [MicroBatches(sources.open_loader(made, rank, RANKS, state), 1) for rank in range(RANKS)]

    with serving("served", recipe, tmp_path, validation=held):
        training = ranks()
        assert [_joined(training) for _ in range(3)] == digests_of(recipe, 3)
        for _ in range(2):
            validating = ranks(recipe=None, stream="validation")
            batches = digests_of(held, 10**6)
            assert [_joined(validating) for _ in batches] == batches
            assert [next(rank, None) for rank in validating] == [None] * RANKS, "all end at the same step"
            for rank in validating:
                rank.close()
        assert _joined(training) == digests_of(recipe, 4)[3], "validation takes nothing from training"
        (state,) = {rank.state_dict()["zephon_ray"] for rank in training}
        assert _joined(ranks(state, count="1")) == digests_of(recipe, 5)[4]
        with pytest.raises(RecipeError, match="feed 'served' serves another recipe: seed=8 here, 7 there"):
            ranks(recipe=corpus(tmp_path / "c", seed=8), count="1")


def _torchrun(stack: ExitStack, folder: Path, arguments: list[str]) -> list[subprocess.Popen[str]]:
    ranks = []
    for number in range(RANKS):
        environment = {
            **os.environ, "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
            "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "XDG_RUNTIME_DIR": str(folder), "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.training.host_script", *arguments]
        process = stack.enter_context(subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True))
        stack.callback(process.kill)
        ranks.append(process)
    return ranks


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("ray")
def test_ranks_of_a_host_share_one_feed_for_training_and_one_for_validation_and_end_both(tmp_path: Path) -> None:
    recipe, validation = corpus(tmp_path / "a"), held_out(tmp_path / "b", texts=4)
    arguments = [str(tmp_path / "a" / "recipe.yaml"), str(validation), str(tmp_path), str(2 * STEPS)]
    with ExitStack() as stack:
        ranks = _torchrun(stack, tmp_path, arguments)
        said = [[json.loads(line) for line in rank.communicate(timeout=240)[0].splitlines()] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0]
    assert [[line["what"] for line in lines] for lines in said] == [["train", "validation", "validation", "train", "state"]] * RANKS
    assert _digests(said, 0) + _digests(said, 3) == digests_of(recipe, 2 * STEPS)
    assert _digests(said, 1) == _digests(said, 2) == digests_of(load_recipe(validation), 10**6)
    assert len({lines[4]["rows"][0] for lines in said}) == 1
    with Loader(recipe, state=bytes.fromhex(said[0][4]["rows"][0])) as loader:
        assert next(loader).step == 2 * STEPS + 1
    assert runs.verify(str(tmp_path / "run"), runner="inline").last_step >= 2 * STEPS
    left = [
        process for process in psutil.process_iter(["environ"]) if (process.info["environ"] or {}).get("XDG_RUNTIME_DIR") == str(tmp_path)
    ]
    assert psutil.wait_procs(left, timeout=30)[1] == [], "the cluster ends with the ranks"


def _digests(said: list[list[dict[str, Any]]], line: int) -> list[str]:
    """Of the global batches that all ranks together got."""
    size = 4 // RANKS
    rows = [[bytes.fromhex(row) for row in lines[line]["rows"]] for lines in said]
    return [folded(row for mine in rows for row in mine[at : at + size]) for at in range(0, len(rows[0]), size)]
