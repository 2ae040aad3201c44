"""One Ray cluster for all tests that ask for it, in whatever folder; those that need one of their own start it themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

NAME = "ray_session"


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """This process is in a cluster of two CPUs on this machine, which is ended with the session."""
    import ray  # most tests do without

    from zephon_ray.runners import ray_cluster

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", configure_logging=False)
    ray_cluster._hide_raylets_lines()  # as in a cluster that we start: some tests look at what is printed
    yield
    ray.shutdown()


def living(*classes: str) -> list[str]:
    """The actors of this process's cluster that are of these classes and not dead, as the cluster's head has it: without a dashboard."""
    from ray._private import state

    actors = state.actors().values()  # type: ignore[no-untyped-call]
    return [actor["ActorClassName"] for actor in actors if actor["ActorClassName"] in classes and actor["State"] != "DEAD"]


def group(items: list[pytest.Item]) -> None:
    """One process runs all that ask for the cluster, so that one is enough (`--dist loadgroup`).

    Tests that look at all threads and children of their process are a group too. Groups, being the largest, are dealt out first,
    so that they meet no cluster.
    """
    for item in items:
        if NAME in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ray"))
