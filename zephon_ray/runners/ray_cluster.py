"""The cluster that the Ray runner works on: one of its own, the one this process is in, or one at an address.

It joins and leaves quietly: no message of Ray's, no signal handler replaced, nothing of ours left behind.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from zephon_ray.errors import RunnerError, UserError
from zephon_ray.recipe import WorkersSpec

CONNECT_S = 5.0
_SLOTS_S = 1.0
_LEAN = {"no_monitor": True, "include_log_monitor": False}
"""What Ray is told when a cluster of ours starts; `ray.init` has no such arguments."""


class _Membership:
    """How many hold the cluster that we started or joined for this process; who leaves last, ends it.

    Attributes:
        address: of its head.
        alone: we started it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holders = 0
        self.address = ""
        self.alone = False

    @property
    def is_here(self) -> bool:
        """This process is in that cluster: nobody ended it under us, and went elsewhere."""
        return self.holders > 0 and bool(ray.is_initialized()) and ray.get_runtime_context().gcs_address == self.address


_membership = _Membership()


class Cluster:
    """A cluster that this process is connected to.

    Args:
        ours: it was started or joined by us, and is left with `leave`.
    """

    def __init__(self, *, ours: bool) -> None:
        self._held = _membership.address if ours else None
        self._counted: tuple[float, int] | None = None

    def here(self) -> Any:
        """Schedule on the node of this process."""
        return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)

    def slots(self, workers: WorkersSpec) -> int:
        """How many workers the nodes that are alive have room for, whatever else runs there, as it was when `look` was called last."""
        if self._counted is None:
            self.look(workers)
        assert self._counted is not None
        return self._counted[1]

    def look(self, workers: WorkersSpec) -> None:
        """See what room there is, at most once a second. It waits for the cluster's head, and where that is gone it waits for long."""
        now = time.monotonic()
        if self._counted is None or now - self._counted[0] > _SLOTS_S:
            nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
            self._counted = now, sum(_room(node, workers) for node in nodes if node["Alive"])

    def spread(self, workers: WorkersSpec, count: int) -> list[Any]:
        """Where to schedule `count` actors that work beside workers: nodes with room for these in turn; here where there is none.

        Not elsewhere, even where such a node dies meanwhile, which Ray says. A soft affinity is no choice: Ray 2.60 does not heed it for
        actors that take nothing (measured: 3 of 10 came where they were sent).
        """
        nodes = sorted((-_room(node, workers), node["NodeID"]) for node in ray.nodes() if node["Alive"])  # type: ignore[no-untyped-call]
        with_room = [node for room, node in nodes if room] or [ray.get_runtime_context().get_node_id()]
        return [NodeAffinitySchedulingStrategy(with_room[i % len(with_room)], soft=False) for i in range(count)]

    def leave(self) -> None:
        """Be done with it. The last one to be so shuts down a cluster that we started, or parts from one that we joined."""
        with _membership.lock:
            holds, self._held = self._held == _membership.address, None  # another cluster may have taken its place, where it was ended
            try:
                if holds and _membership.holders == 1 and _membership.is_here:
                    ray.shutdown()
            finally:
                _membership.holders -= holds


def _room(node: dict[str, Any], workers: WorkersSpec) -> int:
    have = node["Resources"]
    if any(node.get("Labels", {}).get(k) != v for k, v in workers.labels.items()):
        return 0
    needs = {"CPU": workers.num_cpus, **workers.resources}
    return min((int(have.get(name, 0) // amount) for name, amount in needs.items() if amount), default=0)


def connect(address: str | None) -> Cluster:
    """The cluster to work on. Those who connect in one process share one; it is left when the last of them leaves.

    Args:
        address: "host:port" of a cluster's head; None for a new one on this machine with all of its CPUs, whatever other
            clusters run here. A process that is in a cluster already stays in it.

    Raises:
        UserError: the address is none.
        RunnerError: it does not answer, refuses us, or is not that of the cluster that this process is in; or Ray does not start here.
    """
    with _membership.lock:
        _hush()
        if ray.is_initialized():
            if address is not None:
                _check_same(address, ray.get_runtime_context().gcs_address)
            ours = _membership.is_here
            _membership.holders += ours
            return Cluster(ours=ours)
        with _quiet():
            if address is None:
                _start()
            else:
                _join(address)
        _membership.holders, _membership.alone = 1, address is None
        _membership.address = ray.get_runtime_context().gcs_address
        return Cluster(ours=True)


def is_alone() -> bool:
    """This process is in a cluster that we started for it."""
    return _membership.alone and _membership.is_here


def join(address: str | None) -> Cluster:
    """The cluster that exists already: as `connect`, but never a new one.

    Args:
        address: "host:port" of its head; None for the one that this process is in, else for that of RAY_ADDRESS.

    Raises:
        UserError: no cluster is named.
        RunnerError: as `connect`.
    """
    if address is None and not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS")
        if address is None:
            raise UserError("which cluster? Give its address, as `ray start --head` prints it (host:port), or set RAY_ADDRESS")
    return connect(address)


def _start() -> None:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with _apart_and_lean():
            ray.init(address="local", num_cpus=max(1, cpus), include_dashboard=False, **_SILENT)
    except Exception as error:
        raise RunnerError(
            f"Ray does not start on this machine: {_explained(error)}. Where the machine was too busy to start it in Ray's 30 s, try again;"
            " or use the runner 'threads', which does without"
        ) from error


@contextmanager
def _apart_and_lean() -> Iterator[None]:
    """How Ray starts a cluster of ours, as far as its private parts are what we know them as. There is no public way.

    *Apart*: its processes get process groups of their own, so that a signal to ours, as schedulers send it, lets us end them in order. In
    our group they would end first, and Ray ends a process whose cluster is gone, with exit code 1. They die with this process all the
    same, where Linux sees to it; elsewhere Ray needs them in our group for that.

    *Lean*: without autoscaler, log monitor and API server, which nobody asks anything in a cluster of one process on one machine: three of
    nine processes, 3 of 7 CPU seconds, and 2 of 5.5 seconds on two cores (measured with Ray 2.60). Its agent is that of a Ray which was
    installed without a dashboard.
    """
    services, parameter, node, utils = (getattr(ray._private, name, None) for name in ("services", "parameter", "node", "utils"))
    changes: list[tuple[Any, str, Any]] = []
    if sys.platform == "linux" and (popen := getattr(services, "ConsolePopen", None)):
        changes.append((services, "ConsolePopen", functools.partial(popen, process_group=0)))
    parameters = getattr(parameter, "RayParams", None)
    if parameters and _LEAN.keys() <= inspect.signature(parameters).parameters.keys():
        changes.append((parameter, "RayParams", functools.partial(parameters, **_LEAN)))
    head = getattr(node, "Node", None)
    if hasattr(head, "start_api_server"):
        changes.append((head, "start_api_server", lambda *_args, **_kwargs: None))
    if hasattr(utils, "get_dashboard_dependency_error"):
        changes.append((utils, "get_dashboard_dependency_error", lambda: ImportError("nobody looks at a dashboard here")))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _join(address: str) -> None:
    _knock(address)
    _reread_environment()
    try:
        ray.init(address=address, **_SILENT)
    except Exception as error:
        raise RunnerError(f"the Ray cluster at {address} does not take us: {_explained(error)}") from error


def _check_same(address: str, there: str) -> None:
    """Refuse an address that is not that of the cluster `there`, which this process is in."""
    (host, port), (there_host, there_port) = _host_and_port(address), _host_and_port(there)
    hosts = {host, *_resolved(host)}
    same_host = there_host in hosts or bool(hosts & {*_resolved(there_host), *_resolved(socket.gethostname()), "127.0.0.1", "::1"})
    if port != there_port or not same_host:
        raise RunnerError(
            f"this process is in the Ray cluster at {there} and cannot join that at {address} too. Leave the address out, or use it"
        )


def _resolved(host: str) -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return set()


_SILENT: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if address.startswith("ray://") or not host or not port.isdigit():
        raise UserError(
            f"address={address!r}: expected host:port, as `ray start --head` prints it; this process must run on a node of the cluster"
        )
    return host.strip("[]"), int(port)


def _knock(address: str) -> None:
    """Find out in seconds what `ray.init` takes minutes for."""
    try:
        socket.create_connection(_host_and_port(address), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise RunnerError(f"nothing answers at {address} ({error}). Is the Ray head running, and its port reachable from here?") from error
    if os.environ.get("RAY_USE_TLS", "0") in ("", "0"):
        _ask_for_entry(address)


def _ask_for_entry(address: str) -> None:
    """Make the first call that Ray would make, once. Ray makes it for 20 s and writes a line each second, or hangs for minutes.

    Source: the service and the header of Ray 2.60, as its client sends them.
    """
    token = _auth_token()
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")
        try:
            call(b"", timeout=CONNECT_S, metadata=[("authorization", f"Bearer {token}")] if token else None)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                return  # a Ray of another version, which Ray itself explains
            if error.code() != grpc.StatusCode.UNAUTHENTICATED:
                raise RunnerError(f"what answers at {address} is no Ray head ({error.code().name}). Give the address of one") from error
            told = "refuses the token of this process" if token else "uses token authentication, and this process has no token"
            raise RunnerError(f"the Ray cluster at {address} {told}. {_how_to_authenticate(token)}") from error


def _how_to_authenticate(token: str | None) -> str:
    mend = "Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a file with the cluster's token"
    if token is None and os.environ.get("RAY_AUTH_MODE") == "token":
        return f"RAY_AUTH_MODE=token is set, and {_token_file()} cannot be read. Set RAY_AUTH_TOKEN_PATH to a file with the cluster's token"
    if token is None and _token_file().is_file():
        return f"{mend}; for a cluster that was started by you on this machine, RAY_AUTH_MODE=token alone takes the one in {_token_file()}"
    return mend


def _reread_environment() -> None:
    """Ray reads RAY_AUTH_MODE and its like when it is imported. Here it counts what they are now, as everywhere else in Python.

    There is no public way: without it a process that sets them later would be turned away.
    """
    config = getattr(getattr(ray, "_raylet", None), "Config", None)
    if config is not None:
        config.initialize("")


def _auth_token() -> str | None:
    """The token that Ray would send, from where it would take it."""
    if os.environ.get("RAY_AUTH_MODE") != "token":
        return None
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token.strip()
    try:
        return _token_file().read_text().strip() or None
    except OSError:
        return None


def _token_file() -> Path:
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def _explained(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(".")
    if "version" in text.lower():
        return f"{text}. Use the Ray and Python versions of the cluster (here Ray {ray.__version__})"
    return text


def _hush() -> None:
    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def _quiet() -> Iterator[None]:
    """Join without Ray's messages, and put back the signal handler that it replaces."""
    os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
    _hide_raylets_lines()
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if main else None
    try:
        yield
    finally:
        if main and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _hide_raylets_lines() -> None:
    """Raylets write to the driver's stdout that a worker died, whatever `log_to_driver` says. The runner sees to it, and says so."""
    lines = getattr(ray._private.worker, "stdout_deduplicator", None)
    if lines is not None:
        lines.skip_re = re.compile("")


NO_ROOM = (ObjectStoreFullError, OutOfDiskError)
"""What Ray raises where a node's object store is full; the latter where it cannot spill either."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def one_line(error: BaseException | str) -> str:
    """What Ray says, in a line of at most 300 characters. Of a store without room it says nothing that can be read."""
    if isinstance(error, OutOfDiskError):
        return "the object store of a node is full, and so is the disk that Ray spills to. Look at `ray memory` and `df` there"
    if isinstance(error, ObjectStoreFullError):
        return "the object store of a node is full. Look at `ray memory` there"
    return " ".join(_COLOURS.sub("", str(error) or type(error).__name__).split())[:300]
