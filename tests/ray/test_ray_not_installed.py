"""Where the nodes of a cluster lack the package, that is said at once, and not that workers go on dying."""

from __future__ import annotations

import ray

from zephon_ray.errors import RunnerError
from zephon_ray.runners.ray_data import fault_of_ours


def test_nodes_without_the_package_are_one_clear_error() -> None:
    fault = fault_of_ours(ray.exceptions.RaySystemError("System error: No module named 'zephon_ray'\ntraceback: ..."))
    assert isinstance(fault, RunnerError)
    assert "Install it there" in str(fault)
    assert fault_of_ours(ray.exceptions.RaySystemError("System error: Broken pipe")) is None
