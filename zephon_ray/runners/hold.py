"""Holding a cluster: what several streams share, one after the other, is started once and ended after the last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held(name: str, *, address: str | None = None) -> Iterator[None]:
    """Be in the cluster of a runner meanwhile, so that no stream starts one of its own. Does nothing where a runner has none.

    Args:
        name: of the runner.
        address: of a Ray cluster; None for the one that this process is in, else for one of its own.

    Raises:
        RunnerError: the address does not answer, or refuses us.
    """
    if name != "ray":
        yield
        return
    from zephon_ray.runners.ray_cluster import connect  # the core does without ray

    cluster = connect(address)
    try:
        yield
    finally:
        cluster.leave()
