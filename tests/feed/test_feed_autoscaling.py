"""A feed on a cluster that scales by itself: nodes come for it, are used, and go when it is stopped.

The cluster is Ray's own autoscaler over its provider of nodes that are processes of this machine. The script is `autoscaling_script.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.feed.autoscaling_script import MOST
from tests.feed.feeds import ROOT
from tests.feed.test_jobs import BIN, START_S, end, free_ports

pytestmark = [pytest.mark.long, pytest.mark.timeout(420)]

HEAD_ID = "f" * 51 + "00000"
"""By which Ray's provider knows the head."""
STORE_BYTES = 200 << 20
IDLE_MINUTES = 0.2
LIMIT_S = 360.0
UNUSED_LISTS = [
    "cluster_synced_files", "head_setup_commands", "head_start_ray_commands", "initialization_commands", "rsync_exclude", "rsync_filter",
    "setup_commands", "worker_setup_commands", "worker_start_ray_commands",
]  # fmt: skip
"""Of what the description of a cluster must have."""
MORE_NODES = 3
"""That the provider would give; the feed is to ask for no more than it may use."""


def description(gcs: int) -> dict[str, object]:
    """Of a cluster whose head has no CPU, and whose nodes have one each."""
    worker = {
        "resources": {"CPU": 1, "object_store_memory": STORE_BYTES}, "labels": {"role": "tokenise"}, "node_config": {},
        "min_workers": 0, "max_workers": MORE_NODES,
    }  # fmt: skip
    provider = {
        "type": "external", "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
        "gcs_address": f"127.0.0.1:{gcs}", "launch_multiple": True, "head_node_id": HEAD_ID,
        "use_node_id_as_ip": True,
    }  # fmt: skip
    unused: dict[str, object] = {name: {} for name in ("auth", "docker", "file_mounts", "head_node", "worker_nodes")}
    unused |= {name: [] for name in UNUSED_LISTS}
    return {
        "cluster_name": "scales", "max_workers": MORE_NODES, "provider": provider, "upscaling_speed": 1.0,
        "available_node_types": {"ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}, "cpu": worker},
        "head_node_type": "ray.head.default", "idle_timeout_minutes": IDLE_MINUTES, "file_mounts_sync_continuously": False, **unused,
    }  # fmt: skip


@pytest.fixture(params=["v1", "v2"])
def scaling(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The address of a head with an autoscaler, the one of `ray up` or the one of KubeRay, and the environment in which it is used."""
    folder = tempfile.mkdtemp(prefix="zr")  # short, for its sockets
    gcs, dashboard = free_ports(2)
    config = tmp_path / "cluster.json"
    config.write_text(json.dumps(description(gcs)))
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
    autoscaler = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
    if request.param == "v2":
        autoscaler |= {"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": HEAD_ID, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID}
    command = (
        f"ray start --head --node-ip-address=127.0.0.1 --port={gcs} --include-dashboard=false --dashboard-port={dashboard} --num-cpus=0"
        f" --object-store-memory={STORE_BYTES} --temp-dir={folder} --disable-usage-stats --autoscaling-config={config}"
    )
    try:
        subprocess.run(command.split(), env={**environment, **autoscaler}, stdout=subprocess.DEVNULL, timeout=START_S, check=True)
        yield f"127.0.0.1:{gcs}", environment
    finally:
        end(folder)
        shutil.rmtree(folder, ignore_errors=True)


def test_nodes_come_for_a_feed_are_used_and_go_when_it_is_stopped(scaling: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    address, environment = scaling
    notes = tmp_path / "stderr"
    with notes.open("wb") as log:
        done = subprocess.run(
            [sys.executable, "-m", "tests.feed.autoscaling_script", address, str(tmp_path)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    assert not done.returncode, notes.read_text(errors="replace")[-3000:]
    found = json.loads(done.stdout)
    print(found)
    assert (found["before"], found["most"]) == (0, MOST), found
    assert None not in (found["first_s"], found["made_s"], found["more_s"], found["used_s"], found["went_on_s"], found["gone_s"]), found
    assert (found["same"], found["steps"] > 0) == (True, True), found
