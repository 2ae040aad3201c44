"""Ray Data without the actors that it starts beside any execution, in a cluster that we started for this process.

There they are processes that nobody asks anything: one collects what a dashboard would show, the other tells an autoscaler what is wanted.
Each takes some 120 MB and 2 CPU seconds, and reading waits for both (measured with Ray 2.60). There is no public way to do without. Where
Ray Data's private parts are not what we know them as, and in clusters of others, it starts them.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ray
from ray.data._internal import stats
from ray.data._internal.execution import streaming_executor

from zephon_ray.runners import ray_cluster

_AUTOSCALER, _STATS = "create_cluster_autoscaler", "get_or_create_stats_actor"


class _OneNode:
    """In place of Ray Data's autoscaler: an execution may use all that the node has. What it does use is limited by its context."""

    def __init__(self) -> None:
        self._total: Any = ray.data.ExecutionResources.from_resource_dict(ray.cluster_resources())  # type: ignore[no-untyped-call]

    def try_trigger_scaling(self) -> None:
        """Nothing scales."""

    def on_executor_shutdown(self) -> None:
        """Nothing was asked for."""

    def get_total_resources(self) -> Any:
        return self._total


def _method(answer: Callable[[], object] = lambda: None) -> Any:
    return SimpleNamespace(remote=lambda *_args, **_kwargs: answer())


_STATS_ACTOR = SimpleNamespace(
    gen_dataset_id=_method(lambda: ray.put(uuid.uuid4().hex)),
    register_dataset=_method(),
    update_execution_metrics=_method(),
    update_iteration_metrics=_method(),
)


def install() -> None:
    """From now on, wherever this process is in a cluster of its own."""
    if hasattr(streaming_executor, _AUTOSCALER) and hasattr(stats, _STATS):
        _instead(streaming_executor, _AUTOSCALER, _OneNode)
        _instead(stats, _STATS, lambda: _STATS_ACTOR)


def _instead(module: Any, name: str, ours: Callable[[], object]) -> None:
    theirs = getattr(module, name)

    def chosen(*args: Any, **kwargs: Any) -> Any:
        return ours() if ray_cluster.is_alone() else theirs(*args, **kwargs)

    setattr(module, name, chosen)
