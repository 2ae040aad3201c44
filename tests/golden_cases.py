"""The golden cases: 34 recipes with their data, and the digests that the contract gives for their first steps.

They lie in `tests/golden` as bytes (`.gitattributes`), and `tests/golden/SHA256SUMS` says which bytes. A golden file is never made
again to please a test: other digests are another version of the contract.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"

ENDING = frozenset({"best_fit_pad", "epochs_continue", "epochs_stop", "pad_stop_no_pad_token", "validation_pad"})
"""The cases whose stream ends with their last expected step; the others go on for ever."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldenStep:
    """What one step must give.

    Args:
        step: from 1.
        digest: of the global batch, 32 hex digits.
        chain: after this step, 32 hex digits.
        pairs: of each source, those of all pieces begun so far.
    """

    step: int
    digest: str
    chain: str
    pairs: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldenCase:
    """One recipe and its first steps.

    Args:
        name: that of its folder.
        recipe: the path of its recipe.yaml.
        steps: consecutive, from 1.
        ends: the stream ends after the last of them; else it goes on for ever.
    """

    name: str
    recipe: Path
    steps: tuple[GoldenStep, ...]
    ends: bool


@cache
def load_golden_cases() -> dict[str, GoldenCase]:
    """All cases by name, in the order of their names."""
    return {folder.name: _load(folder) for folder in sorted(GOLDEN.iterdir()) if folder.is_dir()}


def _load(folder: Path) -> GoldenCase:
    lines = [json.loads(line) for line in (folder / "expected.jsonl").read_text().splitlines()]
    steps = tuple(GoldenStep(step=x["step"], digest=x["digest"], chain=x["chain"], pairs=tuple(x["pairs"])) for x in lines)
    return GoldenCase(name=folder.name, recipe=folder / "recipe.yaml", steps=steps, ends=folder.name in ENDING)
