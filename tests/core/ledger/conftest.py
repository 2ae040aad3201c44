"""Where ledgers lie in these tests: on a local disk and in fsspec's memory. Their segments are short."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

import zephon_ray.ledger.writer as writer_module
from tests.ledgers import Watched
from zephon_ray.recipe_fields import StorageSpec
from zephon_ray.storage import Storage


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "ledger")
        return
    folder = f"/{uuid.uuid4().hex}"
    yield f"memory:/{folder}/ledger"
    fsspec.filesystem("memory").rm(folder, recursive=True)


@pytest.fixture
def local(tmp_path: Path) -> str:
    return str(tmp_path / "ledger")


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "SEAL_STEPS", 50)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str, str], None]], Storage]:
    def watch(hook: Callable[[str, str], None]) -> Storage:
        monkeypatch.setattr(Watched, "hook", staticmethod(hook))
        return Watched(StorageSpec())

    return watch
