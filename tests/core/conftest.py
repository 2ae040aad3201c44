"""The core is tested where ray, torch and torchtitan cannot be imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

FORBIDDEN = frozenset({"ray", "torch", "torchtitan"})


class _Refuse(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] in FORBIDDEN:
            raise ImportError(f"the core and its tests must not import {fullname}")
        return None


@pytest.fixture(scope="module", autouse=True)
def _forbidden_imports_raise() -> Iterator[None]:
    """Refuses imports in this process while a module of this folder runs, and no longer; `test_imports.py` does so in a fresh one."""
    refuse = _Refuse()
    sys.meta_path.insert(0, refuse)
    yield
    sys.meta_path.remove(refuse)
