"""The measurements run: in short, so that they cannot rot; and as bars, when asked for (`make bench`)."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.bench import growth
from tests.bench.adapters import ours
from tests.bench.collector import pairs_per_cpu_second
from tests.bench.feed import latency
from tests.bench.startup import a_recipe, compare, states, write
from tests.golden_cases import GOLDEN
from zephon_ray.testing import documents


def test_the_collectors_measurement_runs() -> None:
    assert pairs_per_cpu_second(8, 600, "wrap", seconds=0.01, warm_pairs=4_000_000) > 0


@pytest.mark.parametrize("form", ["plain", "zst"])
def test_the_measurement_of_starts_runs(form: str, tmp_path: Path) -> None:
    write(tmp_path / form, form, files=1)
    recipe = a_recipe(tmp_path / form)
    (state,) = states(recipe, [5])
    assert all(one.cpu_s > 0 for some in compare(recipe, state, rounds=1) for one in some)


@pytest.mark.bench
@pytest.mark.parametrize("form", ["plain", "groups"])
def test_a_restore_costs_at_most_half_more_than_a_cold_start_early_and_late(form: str, tmp_path: Path) -> None:
    write(tmp_path / form, form, files=16)
    recipe = a_recipe(tmp_path / form)
    for state in states(recipe, [10, 15_000]):
        cold, warm = compare(recipe, state, rounds=5)
        assert median(start.cpu_s for start in warm) < 1.5 * median(start.cpu_s for start in cold)


@pytest.mark.long
@pytest.mark.usefixtures("ray_session")
def test_the_feeds_measurement_runs(tmp_path: Path) -> None:
    assert latency(tmp_path, 5, 0.0)["fetch_ms"] > 0


def test_the_harness_adapter_gives_whole_batches(tmp_path: Path) -> None:
    for name in ("prose", "code"):
        (tmp_path / "parquet" / name).mkdir(parents=True)
        pq.write_table(pa.table({"text": documents(300)}), tmp_path / "parquet" / name / "0.parquet")
    tokenizer = json.loads((GOLDEN / "tokenizer.json").read_text().replace("<|eos|>", "<|endoftext|>"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    cfg = SimpleNamespace(data=str(tmp_path), tok=str(tmp_path / "tokenizer.json"), seq=128, batch=8, mix=[0.7, 0.3], runner="threads")
    assert [batch.shape for batch in islice(ours.batches(cfg), 2)] == [(8, 128)] * 2
    assert ours.report(cfg)["ckpt_bytes"] > 0
    ours.STATE.pop("loader").close()


@pytest.mark.bench
@pytest.mark.parametrize("packing", ["wrap", "best_fit"])
def test_the_collector_makes_sixty_million_pairs_a_cpu_second_and_lanes_cost_little(packing: str) -> None:
    rates = {lanes: max(pairs_per_cpu_second(lanes, 600, packing, seconds=2, rows=1024) for _ in range(3)) for lanes in (8, 1024)}
    print({lanes: f"{rate / 1e6:.0f} M pairs / CPU-s" for lanes, rate in rates.items()})
    assert rates[8] > 60e6
    assert rates[1024] > rates[8] / 1.2


def test_the_measurements_of_growth_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert [row["shards"] for row in growth.table("shards", 10)] == [10]
    assert [row["step"] for row in growth.table("steps", 10)] == [10]
    assert capsys.readouterr().out.count("|---|") >= 2
