"""One cluster for all tests of this folder; those that need their own start it themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from zephon_ray.runners import ray_cluster

HERE = Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=True, log_to_driver=False, logging_level="ERROR", configure_logging=False)
    ray_cluster._hide_raylets_lines()  # as in a cluster that we start: some tests look at what is printed
    yield
    ray.shutdown()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One process runs them all, so that one cluster is enough (`--dist loadgroup`)."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.xdist_group("ray"))
