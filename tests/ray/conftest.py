"""All tests of this folder run in the session's cluster (`tests/ray_session.py`)."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def in_cluster(ray_session: None) -> None:
    """Nothing but that."""
