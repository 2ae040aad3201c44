"""Cluster definitions: parsed, and held against the fields that KubeRay and Ray document and the metrics that exist."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

import zephon_ray
from zephon_ray.telemetry import EXPORTED, FEED_METRICS

ROOT = Path(__file__).parents[1]
INFRA = ROOT / "infra"
ROLE = "zephon-role"

# The fields of the custom resources as the reference of KubeRay 1.6.2 lists them ("KubeRay CRD API reference" in Ray's documentation,
# generated from the Go types; 2026). `pod`: a pod template of Kubernetes; `strings`: names to strings; others are plain.
AUTOSCALER = {
    "resources": "resources", "image": "str", "imagePullPolicy": "str", "securityContext": "any", "idleTimeoutSeconds": "int",
    "upscalingMode": ("Default", "Aggressive", "Conservative"), "version": ("v1", "v2"), "env": "any", "envFrom": "any",
    "volumeMounts": "any",
}  # fmt: skip
HEAD = {
    "template": "pod", "headService": "any", "enableIngress": "bool", "resources": "strings", "labels": "strings",
    "rayStartParams": "strings", "serviceType": ("ClusterIP", "NodePort", "LoadBalancer"),
}  # fmt: skip
WORKERS = {
    "suspend": "bool", "groupName": "str", "replicas": "int", "minReplicas": "int", "maxReplicas": "int", "idleTimeoutSeconds": "int",
    "resources": "strings", "labels": "strings", "rayStartParams": "strings", "template": "pod", "scaleStrategy": "any",
    "numOfHosts": "int",
}  # fmt: skip
AUTH = {"enableK8sTokenAuth": "bool", "secretName": "str", "mode": ("disabled", "token")}
CLUSTER: dict[str, Any] = {
    "upgradeStrategy": "any", "authOptions": AUTH, "suspend": "bool", "managedBy": "str", "autoscalerOptions": AUTOSCALER,
    "headServiceAnnotations": "strings", "enableInTreeAutoscaling": "bool", "gcsFaultToleranceOptions": "any", "headGroupSpec": HEAD,
    "rayVersion": "str", "workerGroupSpecs": [WORKERS],
}  # fmt: skip
JOB = {
    "activeDeadlineSeconds": "int", "backoffLimit": "int", "rayClusterSpec": CLUSTER, "submitterPodTemplate": "pod", "metadata": "strings",
    "clusterSelector": "strings", "submitterConfig": "any", "managedBy": "str", "deletionStrategy": "any", "entrypoint": "str",
    "runtimeEnvYAML": "str", "jobId": "str", "submissionMode": ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"),
    "entrypointResources": "str", "entrypointNumCpus": "number", "entrypointNumGpus": "number", "ttlSecondsAfterFinished": "int",
    "preRunningDeadlineSeconds": "int", "shutdownAfterJobFinishes": "bool", "suspend": "bool",
}  # fmt: skip
KINDS = {"RayCluster": CLUSTER, "RayJob": JOB}

# Of Kubernetes' pod templates and containers, what is used here (API reference v1.28: PodTemplateSpec, PodSpec, Container).
CONTAINER = {
    "name": "str", "image": "str", "resources": "resources", "env": "any", "envFrom": "any", "volumeMounts": "any",
    "ports": [{"name": "str", "containerPort": "int"}],
}  # fmt: skip
POD = {
    "metadata": {"labels": "strings", "annotations": "strings"},
    "spec": {"containers": [CONTAINER], "volumes": "any", "nodeSelector": "strings", "tolerations": "any", "serviceAccountName": "str"},
}
PLAIN: dict[str, Any] = {"str": str, "int": int, "bool": bool, "number": (int, float), "any": object}


def faults(value: Any, shape: Any, path: str) -> Iterator[str]:
    """What in a value is not of the documented shape."""
    if shape == "pod":
        shape = POD
    elif shape == "resources":
        shape = {"requests": "strings", "limits": "strings"}
    if isinstance(shape, dict):
        if not isinstance(value, Mapping):
            yield f"{path}: no mapping"
            return
        yield from (f"{path}.{name}: unknown" for name in value if name not in shape)
        for name in value.keys() & shape.keys():
            yield from faults(value[name], shape[name], f"{path}.{name}")
    elif isinstance(shape, list):
        for index, item in enumerate(value):
            yield from faults(item, shape[0], f"{path}[{index}]")
    elif isinstance(shape, tuple):
        if value not in shape:
            yield f"{path}: {value!r} is none of {shape}"
    elif shape == "strings":
        yield from (f"{path}.{name}: {item!r} is no string" for name, item in value.items() if not isinstance(item, str))
    elif not isinstance(value, PLAIN[shape]) or (isinstance(value, bool) and shape in ("int", "number")):
        yield f"{path}: {value!r} is no {shape}"


def load(path: str) -> dict[str, Any]:
    found = yaml.safe_load((INFRA / path).read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


MANIFESTS = ("kuberay/ray-cluster.yaml", "kuberay/ray-job-verify.yaml")


def clusters() -> list[tuple[str, dict[str, Any]]]:
    """Every cluster's specification, with the file that it stands in."""
    specs = [(path, load(path)["spec"]) for path in MANIFESTS]
    return [(path, spec.get("rayClusterSpec", spec)) for path, spec in specs]


def containers(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return [container for group in groups for container in group["template"]["spec"]["containers"]]


# ------------------------------------------------------------------ KubeRay


@pytest.mark.parametrize("path", MANIFESTS)
def test_manifests_have_only_fields_that_kuberay_documents(path: str) -> None:
    manifest = load(path)
    assert manifest["apiVersion"] == "ray.io/v1"
    assert manifest.keys() == {"apiVersion", "kind", "metadata", "spec"}
    assert "name" in manifest["metadata"] or "generateName" in manifest["metadata"]
    assert list(faults(manifest["spec"], KINDS[manifest["kind"]], "spec")) == []


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda spec: spec.update(workerGroupSpec=[]), "spec.workerGroupSpec: unknown"),
        (lambda spec: spec["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}), "rayStartParams.num-cpus: 0 is no string"),
        (lambda spec: spec["workerGroupSpecs"][0].update(maxReplicas="16"), "spec.workerGroupSpecs[0].maxReplicas: '16' is no int"),
        (lambda spec: spec["autoscalerOptions"].update(upscalingMode="Fast"), "spec.autoscalerOptions.upscalingMode: 'Fast' is none of"),
        (lambda spec: containers(spec)[1]["resources"]["limits"].update(cpu=8), "limits.cpu: 8 is no string"),
    ],
)  # fmt: skip
def test_a_field_that_is_misspelt_or_of_the_wrong_type_is_found(change: Any, found: str) -> None:
    spec = copy.deepcopy(load(MANIFESTS[0])["spec"])
    change(spec)
    (said,) = faults(spec, CLUSTER, "spec")
    assert found in said


def test_the_kinds_that_the_cluster_needs_are_there() -> None:
    assert [load(path)["kind"] for path in MANIFESTS] == ["RayCluster", "RayJob"]


@pytest.mark.parametrize(("path", "spec"), clusters(), ids=MANIFESTS)
def test_no_unit_can_be_tokenised_on_heads_and_where_ranks_train(path: str, spec: dict[str, Any]) -> None:
    """And everywhere else it can, on as many nodes as there is work for."""
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    trains = [g for g in spec["workerGroupSpecs"] if "nvidia.com/gpu" in g["template"]["spec"]["containers"][0]["resources"]["limits"]]
    reads = [g for g in spec["workerGroupSpecs"] if g not in trains]
    assert all(group["rayStartParams"]["num-cpus"] == "0" for group in trains)
    assert all("num-cpus" not in group["rayStartParams"] for group in reads)
    assert spec["enableInTreeAutoscaling"]
    assert any(group["minReplicas"] < group["maxReplicas"] for group in reads)
    assert all(group["minReplicas"] <= group["replicas"] <= group["maxReplicas"] for group in spec["workerGroupSpecs"])
    if path == MANIFESTS[0]:
        assert [group["groupName"] for group in trains] == ["gpu"]
        assert [group["labels"][ROLE] for group in (*reads, *trains)] == ["tokenise", "train"]


@pytest.mark.parametrize(("path", "spec"), clusters(), ids=MANIFESTS)
def test_every_pod_can_be_scraped_and_asks_for_a_token(path: str, spec: dict[str, Any]) -> None:
    assert spec["authOptions"] == {"mode": "token", "secretName": "zephon-ray-token"}
    for container in containers(spec):
        assert {"name": "metrics", "containerPort": 8080} in container["ports"], path
        assert container["resources"]["requests"] == container["resources"]["limits"], "Ray counts limits; less would be promised twice"


def test_image_and_ray_are_of_one_version_everywhere() -> None:
    dockerfile = (INFRA / "Dockerfile").read_text()
    (ray,) = re.findall(r"^ARG RAY_VERSION=(\S+)$", dockerfile, re.MULTILINE)
    tags = {f"zephon-ray:{zephon_ray.__version__}", f"zephon-ray-train:{zephon_ray.__version__}"}
    for _, spec in clusters():
        assert spec["rayVersion"] == ray
        assert {container["image"] for container in containers(spec)} <= tags
    docker = load("ray-up/aws.yaml")
    images = {docker["docker"]["image"], docker["available_node_types"]["gpu"]["docker"]["worker_image"]}
    assert {image.removeprefix("REGISTRY/") for image in images} == tags


def test_a_rayjob_runs_a_job_that_exists() -> None:
    entrypoint = load(MANIFESTS[1])["spec"]["entrypoint"].split()
    assert entrypoint[0] == "python"
    assert (ROOT / entrypoint[1]).is_file()


def test_the_pod_monitor_finds_every_pod_of_the_cluster() -> None:
    monitor = load("kuberay/pod-monitor.yaml")
    labels = monitor["spec"]["selector"]["matchLabels"]
    spec = load(MANIFESTS[0])["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert labels.items() <= group["template"]["metadata"]["labels"].items()
    assert [endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]] == ["metrics"]


# ------------------------------------------------------------------ machines


def test_ray_takes_the_cluster_file() -> None:
    """By the schema that comes with Ray, and with its defaults filled in as `ray up` does."""
    cluster = load("ray-up/aws.yaml")
    validate_config(prepare_config(copy.deepcopy(cluster)))
    kinds = cluster["available_node_types"]
    assert [kinds[name]["resources"].get("CPU") for name in ("head", "cpu", "gpu")] == [0, None, 0]
    assert kinds["gpu"]["resources"]["GPU"] > 0
    assert kinds["cpu"]["min_workers"] < kinds["cpu"]["max_workers"]
    assert cluster["max_workers"] == sum(kind.get("max_workers", 0) for kind in kinds.values())
    starts = [*cluster["head_start_ray_commands"], *cluster["worker_start_ray_commands"]]
    assert not any("ray stop" in command for command in starts), "it would end every cluster on the machine"


def test_a_cluster_file_that_ray_does_not_take_is_found() -> None:
    cluster = load("ray-up/aws.yaml")
    cluster["head_node"] = {"InstanceType": "m6i.xlarge"}
    with pytest.raises(Exception, match="head_node"):
        validate_config(prepare_config(cluster))


def test_the_image_is_made_of_files_that_exist() -> None:
    dockerfile = (INFRA / "Dockerfile").read_text()
    sent = (INFRA / "Dockerfile.dockerignore").read_text().splitlines()
    copied = [word for line in re.findall(r"^COPY --chown=ray (.*)$", dockerfile, re.MULTILINE) for word in line.split()[:-1]]
    assert copied
    for path in copied:
        assert (ROOT / path).exists(), path
        assert f"!{path.partition('/')[0]}" in sent, f"{path} is not sent to the builder"


# ------------------------------------------------------------------ metrics


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((INFRA / "monitoring" / "grafana-dashboard.json").read_text())
    return found


def expressions() -> Iterator[tuple[str, str]]:
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def names_in(expression: str) -> set[str]:
    return set(re.findall(rf"\b{EXPORTED}\w+", expression))


METRICS = {EXPORTED + metric.name: metric for metric in FEED_METRICS}


def test_every_metric_that_exists_stands_on_the_dashboard_and_no_other() -> None:
    shown = set().union(*(names_in(expression) for _, expression in expressions()))
    assert shown == set(METRICS)


def test_counters_are_shown_as_rates_and_gauges_as_they_are() -> None:
    for title, expression in expressions():
        for name in names_in(expression):
            grows = re.search(rf"(rate|increase)\({name}\b", expression) is not None
            assert grows == (METRICS[name].kind == "counter"), f"{title}: {expression}"


def test_panels_ask_by_tags_that_the_metrics_have() -> None:
    for title, expression in expressions():
        tags = set().union(*(METRICS[name].tags for name in names_in(expression)))
        filtered = set(re.findall(r"(\w+)=~", expression))
        (grouped,) = re.findall(r"by \(([^)]*)\)", expression)
        assert filtered | set(grouped.split(", ")) <= tags, f"{title}: {expression}"


def test_panels_have_ids_and_places_of_their_own_and_variables_that_exist() -> None:
    found = dashboard()
    panels = found["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)
    variables = {variable["name"] for variable in found["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels)))
    assert used == variables == {"datasource", "feed", "stream"}
    for variable in found["templating"]["list"][1:]:
        assert names_in(variable["query"]["query"]) <= set(METRICS)


def test_prometheus_scrapes_the_nodes_that_ray_lists_and_keeps_what_the_dashboard_shows() -> None:
    (job,) = load("monitoring/prometheus.yaml")["scrape_configs"]
    assert job["file_sd_configs"] == [{"files": ["/tmp/ray/prom_metrics_service_discovery.json"]}]
    (keep,) = job["metric_relabel_configs"]
    assert keep["action"] == "keep"
    assert all(re.fullmatch(keep["regex"], name) for name in METRICS)


def test_names_of_metrics_end_with_their_unit() -> None:
    for metric in FEED_METRICS:
        assert re.fullmatch(r"zephon_feed_[a-z_]+", metric.name)
        assert metric.name.removesuffix("_total").endswith(metric.unit), metric.name
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.tags[0] == "feed"
        assert metric.description.endswith(".")
    assert len({metric.name for metric in FEED_METRICS}) == len(FEED_METRICS)
