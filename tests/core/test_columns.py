"""Columns of Parquet and Arrow files are cut, decoded and judged row by row, and only the text column is read."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.reading import a_source, as_arrow, as_parquet, flat, manifest_of, put, read_texts, read_units
from zephon_ray.errors import SourceError
from zephon_ray.stages import reading
from zephon_ray.stages.columns import value_sizes
from zephon_ray.stages.reading import UnitReader
from zephon_ray.stages.texts import Texts
from zephon_ray.stages.tokenise import UnitTokeniser, make_options
from zephon_ray.stages.unit import UnitTask
from zephon_ray.storage import Storage

KINDS = {
    "string": pa.string(), "large_string": pa.large_string(), "string_view": pa.string_view(), "binary": pa.binary(),
    "large_binary": pa.large_binary(), "binary_view": pa.binary_view(), "dictionary": pa.dictionary(pa.int8(), pa.string()),
    "dictionary_large": pa.dictionary(pa.int32(), pa.large_string()),
}  # fmt: skip


def of_kind(texts: list[str | None], kind: str) -> pa.Array:
    plain = pa.array(texts, pa.string())
    return plain.dictionary_encode().cast(KINDS[kind]) if kind.startswith("dictionary") else plain.cast(KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_the_kind_of_string_cannot_be_seen_in_the_units(tmp_path: Path, kind: str, ending: str) -> None:
    texts: list[str | None] = [None if i % 7 == 3 else "" if i % 7 == 5 else f"text é {i % 11} " * (i % 4 + 1) for i in range(50)]
    values = of_kind(texts, kind)
    batch = pa.record_batch({"id": list(range(50)), "text": values})
    data = as_parquet(pa.table(batch)) if ending == "parquet" else as_arrow(batch)
    put(tmp_path / f"a.{ending}", data)
    ((unit,),) = read_units(a_source(tmp_path, f"a.{ending}"))
    kept = Texts.of([text for text in texts if text])
    assert (unit.digest, unit.text_bytes, unit.empty, unit.bad) == (kept.digest(), kept.nbytes, sum(not text for text in texts), 0)
    assert flat(read_texts(a_source(tmp_path, f"a.{ending}"), tmp_path)) == [text for text in texts if text]
    sliced = values.slice(13, 20)
    assert value_sizes(sliced).tolist() == [len((text or "").encode()) for text in texts[13:33]]


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_a_group_is_cut_evenly_by_rows_and_any_unit_can_be_entered(tmp_path: Path, ending: str) -> None:
    texts = [f"row {i} " + "x" * (i * 13 % 200) for i in range(103)]
    batch = pa.record_batch({"text": texts})
    put(tmp_path / f"a.{ending}", as_parquet(texts, compression=None) if ending == "parquet" else as_arrow(batch, compression="zstd"))
    recipe = a_source(tmp_path, f"a.{ending}", unit_bytes=700)
    group = manifest_of(recipe).group(0)
    size = group.text_size or sum(map(len, texts))
    k = -(-size // 700)
    assert k > 5
    (units,) = read_texts(recipe, tmp_path)
    assert units == [texts[i * 103 // k : (i + 1) * 103 // k] for i in range(k)]
    (whole,) = read_units(recipe)
    fresh = UnitTokeniser(make_options(recipe))
    for number in (k - 1, 2, 0):
        assert fresh.tokenise(UnitTask(group=group, epoch=0, unit=number)).to_arrow().equals(whole[number].to_arrow())
    fresh.close()


def test_groups_with_fewer_rows_than_units_have_empty_units(tmp_path: Path) -> None:
    put(tmp_path / "a.arrow", as_arrow(pa.record_batch({"text": ["x" * 500, "y" * 500]})))
    (units,) = read_texts(a_source(tmp_path, "a.arrow", unit_bytes=100), tmp_path)
    assert [len(unit) for unit in units] == [0, 0, 0, 0, 1, 0, 0, 0, 0, 1]


def test_files_of_nulls_and_batches_without_rows_are_no_fault(tmp_path: Path) -> None:
    put(tmp_path / "data" / "a.parquet", as_parquet(pa.table({"text": pa.nulls(5)})))
    put(tmp_path / "data" / "b.parquet", as_parquet(pa.table({"id": pa.nulls(0), "text": pa.nulls(0)})))
    put(tmp_path / "data" / "c.arrow", as_arrow(pa.record_batch({"text": pa.nulls(3)}), pa.record_batch({"text": pa.nulls(0)})))
    empty = pa.record_batch({"text": pa.array([], pa.string_view())})
    put(tmp_path / "data" / "d.arrow", as_arrow(empty, pa.record_batch({"text": pa.array(["x"], pa.string_view())})))
    units = [unit for group in read_units(a_source(tmp_path, "data")) for unit in group]
    assert (sum(unit.empty for unit in units), sum(unit.documents for unit in units)) == (8, 1)
    assert all(unit.last for unit in units)


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_text_inside_structs_is_found_and_a_null_struct_has_none(tmp_path: Path, ending: str) -> None:
    docs = [{"n": i, "body": None if i % 5 == 2 else {"lang": "en", "text": f"text {i}"}} for i in range(30)]
    docs[7] = None  # type: ignore[call-overload]
    batch = pa.record_batch({"id": list(range(30)), "doc": docs, "tags": [["t"]] * 30})
    put(tmp_path / f"a.{ending}", as_parquet(pa.table(batch), row_group_size=13) if ending == "parquet" else as_arrow(batch))
    recipe = a_source(tmp_path, f"a.{ending}", text_field="doc.body.text", unit_bytes=50)
    assert flat(read_texts(recipe, tmp_path)) == [f"text {i}" for i in range(30) if i % 5 != 2 and i != 7]


def test_a_column_with_the_dotted_name_wins(tmp_path: Path) -> None:
    table = pa.table({"doc": [{"text": "inner"}], "doc.text": ["literal"]})
    put(tmp_path / "a.parquet", as_parquet(table))
    put(tmp_path / "b.arrow", as_arrow(*table.to_batches()))
    for name in ("a.parquet", "b.arrow"):
        assert flat(read_texts(a_source(tmp_path, name, text_field="doc.text"), tmp_path)) == ["literal"]


def test_folder_names_never_override_a_column(tmp_path: Path) -> None:
    put(tmp_path / "data" / "text=notext" / "lang=de" / "a.parquet", as_parquet(pa.table({"text": ["inside"], "lang": [1]})))
    assert flat(read_texts(a_source(tmp_path, "data"), tmp_path)) == ["inside"]


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_bad_values_of_a_column_are_named_by_row_and_alone(tmp_path: Path, ending: str) -> None:
    values = pa.array([b"first", b"caf\xe9", None, b"\xed\xa0\x80", b"x" * 101, b"last"])
    batches = [pa.record_batch({"text": pa.array([b"before"])}), pa.record_batch({"text": values})]
    if ending == "parquet":
        put(tmp_path / "a.parquet", as_parquet(pa.Table.from_batches(batches)))
    else:
        put(tmp_path / "a.arrow", as_arrow(*batches))
    recipe = a_source(tmp_path, f"a.{ending}", more={"max_document_bytes": 100})
    units = [unit for group in read_units(recipe) for unit in group]
    assert flat(read_texts(recipe, tmp_path)) == ["before", "first", "last"]
    assert (sum(unit.bad for unit in units), sum(unit.empty for unit in units)) == (3, 1)
    place = "row 2" if ending == "parquet" else "record batch 1, row 1"
    assert units[-1].bad_examples[0] == f"source 'web', shard a.{ending}, {place}: not valid UTF-8: byte 0xe9 at 3 of the value"
    assert "101 bytes, longer than max_document_bytes=100" in units[-1].bad_examples[2]
    assert read_units(a_source(tmp_path, f"a.{ending}", more={"on_bad_record": "fail"}))[-1][0].error == units[-1].bad_examples[0]


def test_a_large_row_group_is_streamed_and_never_held_whole(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    texts = [rng.bytes(3000).hex() for _ in range(4000)]  # 24 MB
    table = pa.table({"text": texts, "other": ["y" * 2000] * 4000})
    put(tmp_path / "a.parquet", as_parquet(table, row_group_size=4000, compression=None, use_dictionary=False))
    del table
    recipe = a_source(tmp_path, "a.parquet", unit_bytes=200_000)
    group = manifest_of(recipe).group(0)
    reader = UnitReader(Storage(recipe.execution.storage), 1 << 20, fail=True)
    before, most, total, last, unit = pa.total_allocated_bytes(), 0, 0, False, 0
    while not last:
        read = reader.read(UnitTask(group=group, epoch=0, unit=unit))
        most, total = max(most, pa.total_allocated_bytes() - before), total + len(read.texts)
        last, unit = read.last, unit + 1
    assert (total, unit) == (4000, group.units)
    assert most < 9 << 20
    reader.close()
    assert pa.total_allocated_bytes() - before < 1 << 20


@pytest.mark.parametrize("first", [0, 5])
def test_of_a_small_row_group_only_what_was_not_read_is_held(tmp_path: Path, first: int) -> None:
    """Its only page is all of it, and a reader that goes on within it would hold it twice until its end."""
    rng = np.random.default_rng(1)
    texts = [rng.bytes(2000).hex() for _ in range(1000)]  # 4 MB
    put(tmp_path / "a.parquet", as_parquet(texts, compression="zstd", row_group_size=1000))
    recipe = a_source(tmp_path, "a.parquet", unit_bytes=400_000)
    group = manifest_of(recipe).group(0)
    reader = UnitReader(Storage(recipe.execution.storage), 1 << 20, fail=True)
    before, got = pa.total_allocated_bytes(), []
    for unit in range(first, group.units or 0):
        read = reader.read(UnitTask(group=group, epoch=0, unit=unit))
        got += read.texts.strings()
        left = 4_000 * (1000 - len(got) - first * 1000 // (group.units or 1))
        assert pa.total_allocated_bytes() - before <= left + read.texts.nbytes + 100_000
    assert got == texts[first * 1000 // (group.units or 1) :]
    assert reader.counters.skipped_bytes == 4_000 * (1000 - len(got))
    reader.close()
    del read
    assert pa.total_allocated_bytes() - before < 1000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "unit_bytes"), [(3, 1), (40, 60), (40, 400)])
def test_small_row_groups_give_what_large_ones_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, rows: int, unit_bytes: int
) -> None:
    texts = [None if i % 7 == 3 else "" if i % 5 == 2 else f"größer {i % 9} " * (i % 6 + 1) for i in range(rows)]
    put(tmp_path / "a.parquet", as_parquet(of_kind(texts, kind)))
    recipe = a_source(tmp_path, "a.parquet", unit_bytes=unit_bytes)
    small = read_units(recipe)
    monkeypatch.setattr(reading, "SMALL_BYTES", -1)
    assert len(small[0]) > 1
    for a, b in zip(small[0], read_units(recipe)[0], strict=True):
        assert a.to_arrow().equals(b.to_arrow())


def test_a_small_row_group_that_is_large_when_decoded_is_not_held_whole(tmp_path: Path) -> None:
    words = [chr(97 + i) * 20_000 for i in range(20)]
    put(tmp_path / "a.parquet", as_parquet(words * 200, row_group_size=4000))  # 80 MB, encoded in half of one
    recipe = a_source(tmp_path, "a.parquet", unit_bytes=20_000)
    group = manifest_of(recipe).group(0)
    assert (group.text_size or 0) < 1 << 20
    reader = UnitReader(Storage(recipe.execution.storage), 1 << 20, fail=True)
    before, most, rows = pa.total_allocated_bytes(), 0, 0
    for unit in range(group.units or 0):
        read = reader.read(UnitTask(group=group, epoch=0, unit=unit))
        rows, most = rows + len(read.texts), max(most, pa.total_allocated_bytes() - before)
        assert set(read.texts.strings()) <= set(words)
    assert rows == 4000
    assert most < 3 * 16 << 20
    reader.close()


@pytest.mark.parametrize("large", [False, True])
def test_a_row_group_that_ends_too_early_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    put(tmp_path / "a.parquet", as_parquet([f"text {i} " * 20 for i in range(100)]))
    monkeypatch.setattr(reading, "SMALL_BYTES", 0 if large else 1 << 20)
    iter_batches = pq.ParquetFile.iter_batches
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *args, **named: itertools.islice(iter_batches(*args, **named), 3))
    with pytest.raises(
        SourceError, match=r"'web', shard a\.parquet: group 0, unit [34] cannot be read: row group 0 ends before its 100 rows"
    ):
        read_units(a_source(tmp_path, "a.parquet", unit_bytes=3000))


def test_damage_late_in_a_small_row_group_is_told_of_its_unit(tmp_path: Path) -> None:
    texts = [np.random.default_rng(i).bytes(300).hex() for i in range(500)]
    options = {
        "compression": "zstd",
        "write_page_checksum": True,
        "use_dictionary": False,
        "data_page_size": 10_000,
        "write_batch_size": 10,
    }
    data = bytearray(as_parquet(texts, **options))
    at = len(data) * 8 // 10
    data[at : at + 20] = bytes(20)
    put(tmp_path / "a.parquet", bytes(data))
    recipe = a_source(tmp_path, "a.parquet", unit_bytes=30_000)
    group, reader = manifest_of(recipe).group(0), UnitReader(Storage(a_source(tmp_path, "a.parquet").execution.storage), 1 << 20, fail=True)
    got, units = list[str](), range(group.units or 0)

    def read_all() -> None:
        for unit in units:
            got.extend(reader.read(UnitTask(group=group, epoch=0, unit=unit)).texts.strings())

    with pytest.raises(SourceError, match=r"group 0, unit ([7-9]|1\d) cannot be read"):
        read_all()
    assert got == texts[: len(got)]
    assert len(got) > 250


def test_a_damaged_page_is_refused_by_name(tmp_path: Path) -> None:
    data = bytearray(as_parquet([f"text {i}" * 20 for i in range(3000)], compression="zstd", write_page_checksum=True))
    data[300:340] = bytes(40)
    put(tmp_path / "a.parquet", bytes(data))
    with pytest.raises(SourceError, match=r"'web', shard a\.parquet: group 0, unit 0 cannot be read"):
        read_units(a_source(tmp_path, "a.parquet"))
