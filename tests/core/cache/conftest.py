"""Corpora are made right before they are read; the cache waits until a file is old enough to be told from one that is changed again."""

from __future__ import annotations

import pytest

from zephon_ray.storage import versions


@pytest.fixture(autouse=True)
def young_files_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "FINE_S", -3600.0)
    monkeypatch.setattr(versions, "COARSE_S", -3600.0)
