"""One cluster for all tests of this folder; those that need their own start it themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="session", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=True, log_to_driver=False, logging_level="ERROR", configure_logging=False)
    yield
    ray.shutdown()
