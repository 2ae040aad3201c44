"""The cluster that the Ray runner works on: one of its own, the one this process is in, or one at an address.

It joins and leaves quietly: no message of Ray's, no signal handler replaced, nothing of ours left behind.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from zephon_ray.errors import RunnerError
from zephon_ray.recipe import WorkersSpec

CONNECT_S = 5.0
_SLOTS_S = 1.0
_REAP_S = 5.0


class Cluster:
    """A cluster that this process is connected to.

    Args:
        ours: it was started or joined by us, and is left with `leave`.
    """

    def __init__(self, *, ours: bool) -> None:
        self._ours = ours
        self._counted: tuple[float, int] | None = None

    def here(self) -> Any:
        """Schedule on the node of this process."""
        return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)

    def slots(self, workers: WorkersSpec) -> int:
        """How many workers the nodes that are alive have room for, whatever else runs there. Looked up at most once a second."""
        now = time.monotonic()
        if self._counted is None or now - self._counted[0] > _SLOTS_S:
            nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
            self._counted = now, sum(_room(node, workers) for node in nodes if node["Alive"])
        return self._counted[1]

    def reap(self, processes: Any, title: str) -> None:
        """Kill processes that are at work still, and so hold the room of those that are to replace them.

        Ray cancels a task by asking its process, and one that is stopped or hangs does not answer.

        Args:
            processes: reference to (node, process id) of each.
            title: part of the command line of those at work.
        """
        try:
            found: set[tuple[str, int]] = ray.get(processes, timeout=_REAP_S)
        except ray.exceptions.RayError:
            return  # who kept the list is gone, and they end with an error when they ask for more
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
        here = ray.get_runtime_context().get_node_id()
        reaps = []
        for node in {node for node, _ in found} & alive:
            pids = [pid for at, pid in found if at == node]
            if node == here:
                _kill(pids, title)
                continue
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            reaps.append(ray.remote(_kill).options(num_cpus=0, scheduling_strategy=there).remote(pids, title))
        if reaps:
            ray.wait(reaps, num_returns=len(reaps), timeout=_REAP_S)

    def leave(self) -> None:
        """Shut down a cluster that we started, or part from one that we joined."""
        if self._ours and ray.is_initialized():
            ray.shutdown()
        self._ours = False


def _room(node: dict[str, Any], workers: WorkersSpec) -> int:
    have = node["Resources"]
    if any(node.get("Labels", {}).get(k) != v for k, v in workers.labels.items()):
        return 0
    needs = {"CPU": workers.num_cpus, **workers.resources}
    return min((int(have.get(name, 0) // amount) for name, amount in needs.items() if amount), default=0)


def _kill(pids: Sequence[int], title: str) -> None:
    """Kill those of the processes on this machine whose command line has the title."""
    for pid in pids:
        with suppress(OSError):
            if title.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


def connect(address: str | None, workers: WorkersSpec) -> Cluster:
    """The cluster to work on.

    Args:
        address: "host:port" of a cluster's head; None for a new one on this machine, whatever other clusters run here. A
            process that is in a cluster already stays in it, whatever the address.
        workers: a cluster of our own gets as many CPUs as they need, and this machine has.

    Raises:
        RunnerError: the address does not answer, or refuses us.
    """
    _hush()
    if ray.is_initialized():
        return Cluster(ours=False)
    if address is None:
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        with _quiet():
            ray.init(address="local", num_cpus=max(1, cpus), include_dashboard=False, **_SILENT)
        return Cluster(ours=True)
    _knock(address)
    try:
        with _quiet():
            ray.init(address=address, **_SILENT)
    except Exception as error:
        raise RunnerError(f"the Ray cluster at {address} does not take us: {_explained(error)}") from error
    return Cluster(ours=True)


_SILENT: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}


def _knock(address: str) -> None:
    """Find out in seconds what `ray.init` takes minutes for."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise RunnerError(f"address={address!r}: expected host:port, as of `ray start --head`")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise RunnerError(f"nothing answers at {address} ({error}). Is the Ray head running, and its port reachable from here?") from error


def _explained(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    if "version" in text.lower():
        return f"{text}. Use the Ray and Python versions of the cluster (here Ray {ray.__version__})"
    if os.environ.get("RAY_AUTH_MODE") != "token":
        return f"{text}. If the cluster uses token authentication, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH on both sides"
    return text


def _hush() -> None:
    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def _quiet() -> Iterator[None]:
    """Join without Ray's messages, and put back the signal handler that it replaces."""
    os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if main else None
    try:
        yield
    finally:
        if main and handler is not None:
            signal.signal(signal.SIGTERM, handler)
