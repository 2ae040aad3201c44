"""The token cache saves work and changes nothing: the same batches, ledgers and errors, whatever state its entries are in."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.core.runner_suite import FILES, job_of, walk
from tests.golden_cases import GoldenCase
from tests.small import a_recipe, documents, write_lines
from zephon_ray import runs
from zephon_ray.cache import CachedTokeniser, TokenCache, open_tokeniser
from zephon_ray.cache import store as cache_store
from zephon_ray.errors import BadRecordError, DataChangedError
from zephon_ray.hashing import sha256_hex
from zephon_ray.ledger import LedgerReader
from zephon_ray.loader import Loader
from zephon_ray.recipe import Recipe, load_recipe, recipe_from_dict
from zephon_ray.runners.base import Job, RunnerStats
from zephon_ray.stages.tokenise import UnitTokeniser, make_options
from zephon_ray.stages.unit import TokenisedUnit, UnitTask
from zephon_ray.storage import Storage, versions
from zephon_ray.stream import Stream

TWO = {"a": {"weight": 0.7}, "b": {"weight": 0.3}}


def cached(recipe: Recipe, cache: Path | str, **fields: Any) -> Recipe:
    """The recipe with a cache, and other fields changed."""
    data = yaml.safe_load(recipe.to_yaml()) | fields
    data["execution"] |= {"token_cache": str(cache)}
    return recipe_from_dict(data, "/")


def entries(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


@dataclass(frozen=True)
class Run:
    """What a run gave, and what it took."""

    chains: list[str]
    stats: RunnerStats


def run(recipe: Recipe, steps: int, runner: str = "threads") -> Run:
    with Loader(recipe, runner=runner, workers=2) as loader:
        chains = [batch.chain.hex() for _, batch in zip(range(steps), loader, strict=False)]
    return Run(chains=chains, stats=loader.stats())


def a_unit(job: Job, source: int = 0, group: int = 0, unit: int = 0) -> UnitTask:
    return UnitTask(group=job.manifests[source].group(group), epoch=0, unit=unit)


def same(one: TokenisedUnit, other: TokenisedUnit) -> bool:
    plain = one.to_arrow().equals(other.to_arrow())
    return plain and one.ids.dtype == other.ids.dtype and one.offsets.dtype == other.offsets.dtype


# ------------------------------------------------------------------ the same bytes

EVERY_FORMAT = ["arrow_units", "compressed_edges", "forged_specials", "json_as_python", "slots_of_unequal_files", "validation_pad"]


def golden_twice(case: GoldenCase, cache: Path) -> None:
    recipe = cached(load_recipe(case.recipe), cache)
    for again in (False, True):
        stream = Stream(recipe, runner="inline")
        for step in case.steps:
            batch = stream.next_batch()
            assert batch is not None
            assert (batch.digest.hex(), batch.chain.hex(), batch.pairs) == (step.digest, step.chain, step.pairs)
        stats = stream.stats()
        stream.close()
        assert stats.units > 0
        assert stats.corrupt == 0
        assert stats.cached == (stats.units if again else 0) or (not again and stats.cached < stats.units)


@pytest.mark.parametrize("name", EVERY_FORMAT)
def test_golden_cases_from_the_cache_are_the_contracts(name: str, golden_cases: dict[str, GoldenCase], tmp_path: Path) -> None:
    golden_twice(golden_cases[name], tmp_path)


@pytest.mark.long
def test_all_golden_cases_from_the_cache_are_the_contracts(golden_case: GoldenCase, tmp_path: Path) -> None:
    golden_twice(golden_case, tmp_path)


def test_a_unit_from_the_cache_is_the_unit_in_every_field_and_format(tmp_path: Path) -> None:
    sources = [{"name": name, "uri": name} for name in ("plain", "packed", "rows")]
    job = job_of(tmp_path / "data", FILES, sources, execution={"token_cache": str(tmp_path / "cache")})
    for again in (False, True):
        tokeniser = open_tokeniser(job.options)
        assert isinstance(tokeniser, CachedTokeniser)
        found = 0
        for source in range(len(sources)):
            for _, units in walk(job, source, 20)[0]:
                for unit in units:
                    task = a_unit(job, source, unit.group, unit.unit)
                    assert same(tokeniser.tokenise(replace(task, epoch=unit.epoch)), unit)
                    found += 1
        assert found > 50
        assert tokeniser.given == (found if again else tokeniser.given)
        assert (tokeniser.counters.units == 0) is again


def test_the_ledger_is_the_same_with_records_left_out_and_named(tmp_path: Path) -> None:
    texts: list[Any] = documents(200)
    texts[3], texts[50], texts[150] = "", 7, None
    write_lines(tmp_path / "a" / "0.jsonl", texts)
    recipe = a_recipe(tmp_path, {"a": {"epochs": 1}}, on_bad_record="skip")
    for out, used in {"without": recipe, "first": cached(recipe, tmp_path / "c"), "second": cached(recipe, tmp_path / "c")}.items():
        runs.produce(used, steps=20, out=str(tmp_path / out), runner="threads")
    first, *others = (ledger(recipe, tmp_path / out) for out in ("without", "first", "second"))
    assert others == [first, first]
    assert sum(b'"bad":1' in line or b"bad" in line for line in first) > 0

    options = make_options(cached(recipe, tmp_path / "c"))
    job = Job(recipe=recipe, manifests=[], options=options)
    task = UnitTask(group=manifests(recipe)[0].group(bad_group(recipe, options)), epoch=0, unit=0)
    found = open_tokeniser(job.options)
    unit = found.tokenise(task)
    assert isinstance(found, CachedTokeniser)
    assert found.given == 1
    assert unit.bad_examples
    assert unit.bad_examples == UnitTokeniser(options).tokenise(task).bad_examples


def manifests(recipe: Recipe) -> list[Any]:
    from zephon_ray.manifest import build_manifests

    return build_manifests(recipe, Storage(recipe.execution.storage))


def bad_group(recipe: Recipe, options: Any) -> int:
    tokeniser, manifest = UnitTokeniser(options), manifests(recipe)[0]
    return next(g for g in range(manifest.num_groups) if tokeniser.tokenise(UnitTask(group=manifest.group(g), epoch=0, unit=0)).bad)


def ledger(recipe: Recipe, out: Path) -> list[bytes]:
    storage = Storage(recipe.execution.storage)
    return [line.to_json() for line in LedgerReader.open(storage, str(out / "ledger")).lines()]


# ------------------------------------------------------------------ what is shared, and what is not


def test_another_mixture_lanes_rows_and_packing_tokenise_nothing_again(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, {name: {"weight": spec["weight"], "epochs": 1} for name, spec in TWO.items()})
    first = run(cached(recipe, tmp_path / "cache"), 1000)
    assert first.stats.cached == 0
    data = yaml.safe_load(recipe.to_yaml())
    for number, source in enumerate(data["sources"]):
        source |= {"weight": 1 + number, "name": f"other-{number}", "epochs": 3, "window_groups": 2}
    other = cached(
        recipe, tmp_path / "cache", seed=9, lanes=4, sequence_length=48, global_batch_size=8, packing={"algorithm": "best_fit"},
        sources=data["sources"][::-1], shuffle={"documents": False},
    )  # fmt: skip
    plain = recipe_from_dict({**yaml.safe_load(other.to_yaml()), "execution": {"runner": "threads"}}, "/")
    second = run(other, 1000)
    assert second.chains == run(plain, 1000).chains
    assert second.stats.cached == second.stats.units > 0


CHANGES: dict[str, dict[str, Any]] = {
    "eos": {"tokenizer": {"eos": None}},
    "bos": {"tokenizer": {"bos": None}},
    "special tokens in text": {"tokenizer": {"special_tokens_in_text": "control"}},
    "max_document_bytes": {"max_document_bytes": 1 << 20},
    "the reference alone": {"execution": {"runner": "threads", "engine": "hf"}},
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_ids_depend_on_is_told_apart(name: str, tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, {"a": {"epochs": 1}})
    assert run(cached(recipe, tmp_path / "cache"), 5).stats.cached == 0
    data = yaml.safe_load(recipe.to_yaml())
    changed = {key: {**data[key], **value} if isinstance(value, dict) else value for key, value in CHANGES[name].items()}
    found = run(cached(recipe, tmp_path / "cache", **changed), 5)
    assert found.chains == run(recipe_from_dict(data | changed, "/"), 5).chains
    assert found.stats.cached == 0


def test_another_tokenizer_file_text_field_or_size_of_units_is_told_apart(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, {"a": {"epochs": 1}})
    lines = [f'{{"text": "{text}", "body": "{text[::-1]}"}}' for text in documents(60)]
    (tmp_path / "a" / "0.jsonl").write_text("\n".join(lines))
    run(cached(recipe, tmp_path / "cache"), 5)
    data = yaml.safe_load(recipe.to_yaml())
    tokenizer = tmp_path / "other.json"
    tokenizer.write_bytes(Path(data["tokenizer"]["path"]).read_bytes() + b"\n")
    assert run(cached(recipe, tmp_path / "cache", tokenizer=data["tokenizer"] | {"path": str(tokenizer)}), 5).stats.cached == 0
    only = data["sources"][0] | {"uri": str(tmp_path / "a" / "0.jsonl")}
    assert run(cached(recipe, tmp_path / "cache", sources=[only]), 5).stats.cached > 0
    for change in ({"text_field": "body"}, {"unit_bytes": 1500}):
        assert run(cached(recipe, tmp_path / "cache", sources=[only | change]), 5).stats.cached == 0


def test_a_unit_with_a_bad_record_stops_the_run_that_says_so(tmp_path: Path) -> None:
    texts: list[Any] = documents(60)
    texts[20] = 7
    write_lines(tmp_path / "a" / "0.jsonl", texts)
    recipe = a_recipe(tmp_path, {"a": {"epochs": 1}}, on_bad_record="skip")
    run(cached(recipe, tmp_path / "cache"), 100)
    with pytest.raises(BadRecordError, match=r"shard 0\.jsonl, at byte \d+: field 'text' holds a number"):
        run(cached(recipe, tmp_path / "cache", on_bad_record="fail"), 100)


# ------------------------------------------------------------------ streams


def test_a_unit_in_the_middle_of_a_stream_costs_nothing_of_what_lies_before_it(tmp_path: Path) -> None:
    sources = [{"name": "packed", "uri": "packed/a.jsonl.gz"}, {"name": "rows", "uri": "rows/a.parquet"}]
    job = job_of(tmp_path / "data", FILES, sources, execution={"token_cache": str(tmp_path / "cache")})
    for source in range(2):
        first = open_tokeniser(job.options)
        units, last = 0, False
        while not last:
            last, units = first.tokenise(a_unit(job, source, unit=units)).last, units + 1
        assert units > 2
        again = open_tokeniser(job.options)
        assert again.tokenise(a_unit(job, source, unit=units - 1)).last
        assert (again.counters.skipped_bytes, again.counters.bytes_read) == (0, 0)


# ------------------------------------------------------------------ data that changed


def test_data_changed_in_place_is_found_though_size_and_time_stay(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a" / "0.jsonl", documents(300))
    plain = a_recipe(tmp_path, {"a": {"epochs": 1}})
    recipe = cached(plain, tmp_path / "cache")
    runs.produce(recipe, steps=8, out=str(tmp_path / "run"), runner="threads")
    before, data = path.stat(), path.read_bytes()
    path.write_bytes(data.replace(b"w7", b"w8"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)

    with pytest.raises(DataChangedError, match=r"shard 0\.jsonl"):
        runs.produce(recipe, steps=60, out=str(tmp_path / "run"), runner="threads")
    assert run(recipe, 8).chains == run(plain, 8).chains


def test_what_was_read_while_its_shard_changed_is_not_taken_for_what_it_is_now(tmp_path: Path) -> None:
    job = job_of(tmp_path / "data", FILES, [{"name": "a", "uri": "packed/a.jsonl.gz"}], execution={"token_cache": str(tmp_path / "cache")})
    shard = tmp_path / "data" / "packed" / "a.jsonl.gz"
    tokeniser = open_tokeniser(job.options)
    tokeniser.tokenise(a_unit(job, unit=0))
    kept = tmp_path / "data" / "kept"
    kept.write_bytes(shard.read_bytes())
    kept.replace(shard)  # the reader has the old file open
    tokeniser.tokenise(a_unit(job, unit=1))
    tokeniser.tokenise(a_unit(job, unit=2))
    other = open_tokeniser(job.options)
    assert isinstance(other, CachedTokeniser)
    for unit in range(3):
        other.tokenise(a_unit(job, unit=unit))
    assert other.given == 0


def test_a_file_that_could_still_change_without_a_trace_is_looked_up_by_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[Any] = documents(60)
    texts[3], texts[20] = "", 7
    path = write_lines(tmp_path / "a" / "0.jsonl", texts)
    recipe = cached(a_recipe(tmp_path, {"a": {"epochs": 1}}, on_bad_record="skip"), tmp_path / "cache")
    monkeypatch.setattr(versions, "FINE_S", 3600.0)
    monkeypatch.setattr(versions, "COARSE_S", 3600.0)
    assert not Storage(recipe.execution.storage).version(str(path)).settled
    manifest, options = manifests(recipe)[0], make_options(recipe)
    for given in (0, manifest.num_groups):
        tokeniser = open_tokeniser(options)
        assert isinstance(tokeniser, CachedTokeniser)
        for group in range(manifest.num_groups):
            task = UnitTask(group=manifest.group(group), epoch=0, unit=0)
            assert same(tokeniser.tokenise(task), UnitTokeniser(options).tokenise(task))
        assert tokeniser.given == given
    path.write_bytes(path.read_bytes().replace(b"w7", b"w8"))
    other = open_tokeniser(options)
    assert isinstance(other, CachedTokeniser)
    for group in range(manifest.num_groups):
        other.tokenise(UnitTask(group=manifest.group(group), epoch=0, unit=0))
    assert other.given < manifest.num_groups


# ------------------------------------------------------------------ entries in every state


def test_an_entry_that_is_cut_or_damaged_anywhere_is_made_again_and_counted(tmp_path: Path) -> None:
    recipe = cached(a_recipe(tmp_path, {"a": {"epochs": 1}}), tmp_path / "cache")
    good = run(recipe, 5)
    files = entries(tmp_path / "cache")
    sound = {path: path.read_bytes() for path in files}
    for number, path in enumerate(files):
        data = sound[path]
        spoiled = {
            0: data[: len(data) // 2], 1: b"", 2: data[:20], 3: sound[files[number - 1]], 4: data + b"x",
        }.get(number, flipped(data, number * 7919 % len(data)))  # fmt: skip
        path.write_bytes(spoiled)
    mended = run(recipe, 5)
    assert mended.chains == good.chains
    assert mended.stats.cached == 0
    assert mended.stats.corrupt == mended.stats.units
    again = run(recipe, 5)
    assert again.chains == good.chains
    assert (again.stats.cached, again.stats.corrupt) == (again.stats.units, 0)


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.long
def test_no_flipped_bit_of_an_entry_goes_unseen(tmp_path: Path) -> None:
    job = job_of(tmp_path / "data", FILES, [{"name": "a", "uri": "plain"}], execution={"token_cache": str(tmp_path / "cache")})
    unit = open_tokeniser(job.options).tokenise(a_unit(job))
    (path,) = entries(tmp_path / "cache")
    data = path.read_bytes()
    tokeniser = open_tokeniser(job.options)
    assert isinstance(tokeniser, CachedTokeniser)
    for at in range(len(data)):
        path.write_bytes(flipped(data, at))
        assert same(tokeniser.tokenise(a_unit(job)), unit)
        assert tokeniser.cache_counters.corrupt == at + 1


# ------------------------------------------------------------------ the bound


def total(cache: Path) -> int:
    return sum(path.stat().st_size for path in entries(cache))


def test_the_cache_stays_within_its_bound_and_what_was_used_last_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_store, "LOCAL_USE_S", 0.0)
    job = job_of(tmp_path / "data", {"a.jsonl": FILES["plain/a.jsonl"]}, [{"name": "a", "uri": "a.jsonl"}])
    task = a_unit(job)
    unit = UnitTokeniser(job.options).tokenise(task)
    names, size = [sha256_hex(b"%d" % number) for number in range(500)], 16 * 12_000
    caches = [TokenCache(str(tmp_path / "cache"), size, job.options.storage) for _ in range(2)]
    for number, name in enumerate(names):
        caches[number % 2].put(name, unit, task)
        assert caches[number % 2].get(names[0], task) is not None
        assert number % 20 or total(tmp_path / "cache") <= size
    assert sum(cache.counters.written for cache in caches) == len(names)
    assert size // 2 < total(tmp_path / "cache") <= size
    assert len(entries(tmp_path / "cache")) < len(names) // 2
    assert [caches[0].get(name, task) is None for name in (names[-1], names[1])] == [False, True]


def test_what_another_process_writes_counts(tmp_path: Path) -> None:
    """A writer lists a set now and then, by a draw from the entry's name, though it has written little itself."""
    job = job_of(tmp_path / "data", {"a.jsonl": FILES["plain/a.jsonl"]}, [{"name": "a", "uri": "a.jsonl"}])
    task = a_unit(job)
    unit = UnitTokeniser(job.options).tokenise(task)
    size = 16 * 12_000
    for number in range(500):
        cache_store._bound.cache_clear()  # each is the first of its process
        TokenCache(str(tmp_path / "cache"), size, job.options.storage).put(sha256_hex(b"%d" % number), unit, task)
    assert size // 2 < total(tmp_path / "cache") <= size


@pytest.fixture
def read_only(tmp_path: Path) -> Path:
    """A folder that cannot be written to, not even by root: it is a file's."""
    cache = tmp_path / "cache"
    cache.write_bytes(b"")
    return cache


def test_a_cache_that_cannot_be_used_costs_nothing_but_time(tmp_path: Path, read_only: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = a_recipe(tmp_path)
    assert run(cached(recipe, read_only), 5).chains == run(recipe, 5).chains
    assert "cannot be" in caplog.text
    assert len([r for r in caplog.records if "token cache" in r.getMessage()]) <= 4, "once a worker, not once a unit"


def test_verify_reads_the_data_and_not_the_cache(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a" / "0.jsonl", documents(300))
    recipe = cached(a_recipe(tmp_path), tmp_path / "cache")
    runs.produce(recipe, steps=8, out=str(tmp_path / "run"), runner="threads")
    written = {path: path.stat().st_mtime_ns for path in entries(tmp_path / "cache")}
    assert runs.verify(str(tmp_path / "run"), runner="threads").steps == 8
    for entry in written:
        entry.write_bytes(b"spoiled")
    assert runs.verify(str(tmp_path / "run"), runner="threads").steps == 8
    assert all(entry.read_bytes() == b"spoiled" for entry in written)
    assert path.exists()
