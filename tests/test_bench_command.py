"""`bench` measures what it says, in processes of its own, and says what it could not."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tests.small import a_recipe, documents, write_lines
from zephon_ray.benchmark import peers, processes
from zephon_ray.benchmark.figures import Figures, recommendation
from zephon_ray.cli.main import run_command
from zephon_ray.errors import RunnerError, UserError
from zephon_ray.telemetry import descendants

PROMISED = {
    "cpu_s_per_mtok", "limit_cpu_s_per_mtok", "ratio", "tokens_per_s", "first_batch_s", "peak_pss_mb", "stages", "state_bytes",
    "restore_s", "worker_utilisation",
}  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    for name in ("a", "b"):
        write_lines(tmp_path / name / "0.jsonl", documents(400))
    made = a_recipe(tmp_path, {"a": {"weight": 0.7}, "b": {"weight": 0.3}}, execution={"runner": "threads", "engine": "hf"})
    (tmp_path / "recipe.yaml").write_text(made.to_yaml())
    return str(tmp_path / "recipe.yaml")


def check(found: dict[str, object]) -> None:
    figures = Figures(**{field.name: found[field.name] for field in fields(Figures)})  # type: ignore[arg-type]
    assert set(found) >= PROMISED
    assert figures.tokens_per_s == pytest.approx(figures.tokens / figures.seconds)
    assert figures.ratio == pytest.approx(figures.cpu_s_per_mtok / figures.limit_cpu_s_per_mtok)
    assert figures.limit_cpu_s_per_mtok > 0
    assert set(figures.stages) in ({"read", "encode", "collect", "rest"}, {"cache", "collect", "rest"})
    assert sum(figures.stages.values()) >= 0.999 * figures.cpu_s_per_mtok > 0
    assert 0 < figures.state_bytes < 3000
    assert figures.restore_s > 0
    assert 20 < figures.peak_pss_mb < 2000
    assert 0 <= figures.worker_utilisation <= 1


@pytest.mark.timeout(300)
def test_bench_gives_every_figure_and_leaves_nothing_behind(recipe: str, capfd: pytest.CaptureFixture[str]) -> None:
    before = {process.pid for process in descendants()}
    assert run_command(["bench", recipe, "--seconds", "0.5", "--json"]) == 0
    (line,) = capfd.readouterr().out.splitlines()
    found = json.loads(line)
    check(found)
    assert found["runner"] == "threads"
    assert "tokenizers" in found["engine"]
    assert (found["others"], found["peers"], found["missing"]) == ([], None, None)
    assert found["recommendation"].startswith("Threads or processes or Ray:")
    assert {process.pid for process in descendants()} <= before


def test_what_is_wrong_with_a_measurement_is_said(recipe: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(["bench", recipe, "--set", "lanes=3"]) == 2
    assert "lanes" in capfd.readouterr().err
    with pytest.raises(RunnerError, match="took more than 0 s"):
        processes.measure("engine", {"recipe": recipe, "overrides": [], "seconds": 1000.0}, limit_s=0.0)
    with pytest.raises(RunnerError, match=r"(?s)'peer' ended with 1: .*KeyError: 'none'"):
        processes.measure("peer", {"name": "none", "shape": {}, "seconds": 1.0}, limit_s=100.0)
    arguments = {"runner": "inline", "workers": 1, "address": None, "recipe": recipe, "seconds": 1.0, "overrides": ["sources.a.epochs=1"]}
    with pytest.raises(UserError, match=r"^recipe 'small' ends after step \d+, before enough was measured"):
        processes.measure("whole", arguments, limit_s=100.0)


def test_the_recommendation_tells_what_was_measured() -> None:
    one = Figures(
        runner="threads", engine="x", workers=2, tokens_per_s=1.0, cpu_s_per_mtok=0.03, limit_cpu_s_per_mtok=0.02, ratio=1.5,
        first_batch_s=1.0, peak_pss_mb=100.0, stages={}, state_bytes=1, restore_s=1.0, cold_s=1.0, worker_utilisation=0.95, cached=0.0,
        tokens=1, seconds=1.0, load=0.0, cpus=2,
    )  # fmt: skip
    text = recommendation([replace(one, runner="ray", cpu_s_per_mtok=0.06, worker_utilisation=0.2), one])
    assert "ray 2.00 times" in text
    assert "20% of the workers' time (ray, 2): more of them would not help" in text
    assert "more of them would be faster" in recommendation([one])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_peers_that_are_installed_give_batches_of_the_same_documents_and_the_others_are_named(
    recipe: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["bench", recipe, "--seconds", "1", "--compare", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    titles = {line["title"] for line in found["peers"][1:]}
    assert titles == {peer.title for peer in peers.PEERS.values() if peer.installed}
    assert {missing["pip"] for missing in found["missing"]} == {peer.pip for peer in peers.PEERS.values() if not peer.installed}
    for line in found["peers"]:
        assert line["failed"] is None, line["failed"]
        assert line["tokens_per_s"] > 0
        assert line["cpu_s_per_mtok"] > 0
