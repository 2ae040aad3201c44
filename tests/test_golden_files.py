"""The golden cases are the bytes that were agreed."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tests.golden_cases import ENDING, GOLDEN, GoldenCase


def _sums() -> dict[str, str]:
    lines = (GOLDEN / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    return {path.removeprefix("./"): digest for digest, _, path in (line.partition("  ") for line in lines)}


def test_no_golden_file_was_changed_added_or_lost() -> None:
    files = [p for p in GOLDEN.rglob("*") if p.is_file() and p.name != "SHA256SUMS"]
    assert {_name(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files} == _sums()


def test_there_are_34_cases_with_consecutive_steps(golden_cases: dict[str, GoldenCase]) -> None:
    assert len(golden_cases) == 34
    assert golden_cases.keys() >= ENDING
    for case in golden_cases.values():
        assert [x.step for x in case.steps] == list(range(1, len(case.steps) + 1)), case.name


def _name(path: Path) -> str:
    return path.relative_to(GOLDEN).as_posix()
