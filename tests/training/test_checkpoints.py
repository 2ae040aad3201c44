"""Checkpoints of several ranks, through TorchTitan's manager over gloo: what two have saved, one and four go on from."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.training.loops import corpus, digests_of, folded

pytest.importorskip("torchtitan")

ROOT = Path(__file__).parents[2]
SAVE_AT, LAST = 3, 5


def trained(folder: Path, mode: str, ranks: int) -> dict[int, str]:
    """Step -> digest of the global batch that all ranks together trained on."""
    with ExitStack() as stack:
        words = [sys.executable, "-m", "tests.training.checkpoint_script", str(folder), mode]
        started = []
        for rank in range(ranks):
            numbers = map(str, (rank, ranks, SAVE_AT, LAST))
            process = stack.enter_context(subprocess.Popen([*words, *numbers], cwd=ROOT, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            started.append(process)
        said = [[json.loads(line) for line in process.communicate(timeout=240)[0].splitlines()] for process in started]
        assert [process.returncode for process in started] == [0] * ranks
    return {steps[0]["step"]: folded(bytes.fromhex(row) for step in steps for row in step["rows"]) for steps in zip(*said, strict=True)}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.xdist_group("torch")
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_checkpoint_of_two_ranks_goes_on_with_any_number(tmp_path: Path, mode: str) -> None:
    expected = dict(enumerate(digests_of(corpus(tmp_path), LAST), 1))
    assert trained(tmp_path, mode, 2) == expected, "training went on while the checkpoint of step 3 was written"
    rest = {step: expected[step] for step in range(SAVE_AT + 1, LAST + 1)}
    for ranks in (1, 4):
        assert trained(tmp_path, mode, ranks) == rest
