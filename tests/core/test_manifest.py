"""A manifest names the same shards in the same order on every disk and store, numbers their groups, and refuses what it cannot read."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.fake_s3 import fake_s3
from tests.reading import a_source, gz, json_lines, manifest_of, put
from zephon_ray.errors import SourceError
from zephon_ray.manifest import SourceManifest
from zephon_ray.manifest.shards import find_shards, matches, split_glob
from zephon_ray.plan.windows import UnitTask
from zephon_ray.recipe_fields import StorageSpec
from zephon_ray.storage import Listed, Storage

LINE = json_lines(["a text"])


def paths(folder: Path, uri: str, **source: Any) -> list[str]:
    return [shard.path for shard in manifest_of(a_source(folder, uri, **source)).shards]


def test_shards_are_in_the_order_of_their_paths_bytes(tmp_path: Path) -> None:
    names = ["part-10", "part-2", "Part-1", "part-1", "part-é", "a/part-9", "a-b/part-0", "a", "Z", "part-1.5"]
    for name in names:
        put(tmp_path / "data" / f"{name}.jsonl", LINE)
    assert paths(tmp_path, "data") == sorted((f"{name}.jsonl" for name in names), key=str.encode)


def test_the_order_in_which_a_store_lists_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b/1", "a", "c", "a-b/1"):
        put(tmp_path / "data" / f"{name}.jsonl", LINE)
    real, shuffle = Storage.list_files, random.Random(1)

    def shuffled(self: Storage, url: str, *, depth: int | None = None) -> list[Listed]:
        return shuffle.sample(found := real(self, url, depth=depth), len(found))

    monkeypatch.setattr(Storage, "list_files", shuffled)
    for _ in range(5):
        assert paths(tmp_path, "data") == ["a-b/1.jsonl", "a.jsonl", "b/1.jsonl", "c.jsonl"]


@pytest.mark.parametrize(
    ("glob", "found"),
    [
        ("*.jsonl", ["a.jsonl", "b.jsonl"]),
        ("[!a].jsonl", ["b.jsonl"]),
        ("?.json*", ["a.jsonl", "b.jsonl"]),
        ("*/a.jsonl", ["sub/a.jsonl"]),
        ("**/a.jsonl", ["a.jsonl", "sub/a.jsonl", "sub/deep/a.jsonl"]),
        ("sub/**/deep/*", ["deep/a.jsonl"]),
        ("s*/**/deep/*", ["sub/deep/a.jsonl"]),
        ("sub/**", ["a.jsonl", "deep/a.jsonl"]),
        ("**", ["a.jsonl", "b.jsonl", "sub/a.jsonl", "sub/deep/a.jsonl"]),
    ],
)
def test_a_glob_finds_what_the_contract_says_with_paths_from_its_root(tmp_path: Path, glob: str, found: list[str]) -> None:
    for name in ("a", "b", "sub/a", "sub/deep/a", ".hidden/a", "_SUCCESS/a", "sub/.a", "sub/_a"):
        put(tmp_path / "data" / f"{name}.jsonl", LINE)
    assert paths(tmp_path, f"data/{glob}") == found


def test_wildcards_do_not_cross_parts_and_double_stars_match_no_part_too() -> None:
    assert matches(("a", "b", "c"), ("a", "**", "c"))
    assert matches(("a", "c"), ("a", "**", "c"))
    assert matches(("x", "a", "y", "a"), ("**", "**", "a"))
    assert not matches(("a", "b"), ("*",))
    assert not matches((), ("**",))
    assert not matches(("A",), ("a",))
    assert split_glob("s3://b/x/y-*/z") == ("s3://b/x", ("y-*", "z"))
    assert split_glob("/*.jsonl") == ("/", ("*.jsonl",))


@pytest.mark.parametrize("name", ["a b", "plus+", "eq=1", "pct%20", "pct%zz", "hash#1", "ask?x", "ünï", "br[1]", "star*"])
def test_folders_and_files_with_odd_names_are_found_by_their_names(tmp_path: Path, name: str) -> None:
    put(tmp_path / name / "one.jsonl", LINE)
    assert paths(tmp_path, name) == ["one.jsonl"]
    if "[" not in name:  # which in a glob is always a set of characters
        assert paths(tmp_path, f"{name}/*.jsonl")[0].endswith("one.jsonl")
    assert paths(tmp_path, f"{name}/one.jsonl")[0].endswith("one.jsonl")


def test_hidden_names_below_the_root_are_left_out_and_those_above_or_named_are_not(tmp_path: Path) -> None:
    root = tmp_path / ".staging" / "_tmp"
    for name in ("a", "_a", ".a", "x/_temporary/a", "x/b"):
        put(root / f"{name}.jsonl", LINE)
    put(root / "_SUCCESS", b"")
    assert paths(tmp_path, ".staging/_tmp") == ["a.jsonl", "x/b.jsonl"]
    assert paths(tmp_path, ".staging/_tmp/_a.jsonl") == ["_a.jsonl"]


def test_links_to_folders_are_not_followed_and_a_link_as_the_root_is(tmp_path: Path) -> None:
    put(tmp_path / "data" / "a.jsonl", LINE)
    (tmp_path / "data" / "again").symlink_to(".", target_is_directory=True)
    (tmp_path / "link").symlink_to("data", target_is_directory=True)
    assert paths(tmp_path, "link") == ["a.jsonl"]
    with pytest.raises(SourceError, match="no shard"):
        paths(tmp_path, "data/again*/a.jsonl")


def test_a_link_that_leads_nowhere_is_named_not_passed_over(tmp_path: Path) -> None:
    put(tmp_path / "data" / "a.jsonl", LINE)
    (tmp_path / "data" / "b.jsonl").symlink_to("gone")
    with pytest.raises(SourceError, match=r"'web', shard 'b\.jsonl': a link that leads nowhere"):
        paths(tmp_path, "data")


@pytest.mark.parametrize("name", ["a.txt", "a.JSONL", "a.jsonl.gz.gz", "a.parquet.gz", "a.gz", "jsonl", "a.jsonl.bz2", "a.jsonl.tmp"])
def test_an_unknown_ending_names_the_file_and_what_to_write(tmp_path: Path, name: str) -> None:
    put(tmp_path / "data" / name, LINE)
    with pytest.raises(SourceError) as caught:
        paths(tmp_path, "data")
    assert repr(name) in str(caught.value)
    assert "format:" in str(caught.value)


def test_a_given_format_holds_for_every_ending_and_packed_ones_stay_packed(tmp_path: Path) -> None:
    for name, data in (("a.txt", LINE), ("b", LINE), ("c.gz", gz(LINE)), ("d.parquet", LINE)):
        put(tmp_path / "data" / name, data)
    shards = manifest_of(a_source(tmp_path, "data", format="jsonl")).shards
    assert [(shard.format, shard.compression) for shard in shards] == [("jsonl", None), ("jsonl", None), ("jsonl", "gz"), ("jsonl", None)]


@pytest.mark.parametrize("uri", ["nothing", "nothing/*.jsonl", "empty", "data/a.jsonl/", "data/*.parquet"])
def test_a_source_without_shards_is_refused_by_name_and_uri(tmp_path: Path, uri: str) -> None:
    put(tmp_path / "data" / "a.jsonl", LINE)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="source 'web': no shard at") as caught:
        paths(tmp_path, uri)
    assert str(tmp_path / uri) in str(caught.value)


def test_a_bucket_is_listed_like_a_disk_without_marks_and_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    with fake_s3() as store:
        store.objects = dict.fromkeys(("ds/", "ds/sub/", "ds/sub_$folder$", "ds/sub", "ds", "ds/_SUCCESS"), b"")
        store.objects |= {"ds/sub/b.jsonl": LINE, "ds/a+b c.jsonl": LINE, "ds-other/a.jsonl": LINE}
        storage = Storage(StorageSpec(endpoint_url=store.endpoint))
        for uri in ("s3://b/ds", "s3://b/ds/", "s3://b/ds/**"):
            assert [s.path for s in find_shards(storage, "web", uri, None)] == ["a+b c.jsonl", "sub/b.jsonl"]
        assert [s.url for s in find_shards(storage, "web", "s3://b/ds/*.jsonl", None)] == ["s3://b/ds/a+b c.jsonl"]
        store.objects["ds/two//slashes.jsonl"] = LINE
        with pytest.raises(SourceError, match=r"two//slashes\.jsonl.*empty part"):
            find_shards(storage, "web", "s3://b/ds", None)


def test_groups_are_numbered_through_the_shards_in_order(tmp_path: Path) -> None:
    put(tmp_path / "data" / "a.jsonl", b"x" * 25)
    put(tmp_path / "data" / "b.jsonl", b"")
    put(tmp_path / "data" / "c.jsonl.gz", gz(LINE * 50))
    pq.write_table(pa.table({"text": ["word" * 5] * 10}), tmp_path / "data" / "d.parquet", row_group_size=4)
    with pa.ipc.new_file(str(tmp_path / "data" / "e.arrow"), pa.schema({"text": pa.string()})) as writer:
        for _ in range(2):
            writer.write_batch(pa.record_batch({"text": ["a"]}))
    manifest = manifest_of(a_source(tmp_path, "data", unit_bytes=10))
    assert manifest.num_groups == 3 + 1 + 1 + 3 + 2
    found = [(g.shard.path, g.ordinal, g.units, g.streamed) for g in map(manifest.group, range(manifest.num_groups))]
    assert found[:5] == [
        ("a.jsonl", 0, 1, False), ("a.jsonl", 1, 1, False), ("a.jsonl", 2, 1, False),
        ("b.jsonl", 0, 1, False), ("c.jsonl.gz", 0, None, True),
    ]  # fmt: skip
    sizes = [pq.read_metadata(tmp_path / "data" / "d.parquet").row_group(g).column(0).total_uncompressed_size for g in range(3)]
    assert found[5:8] == [("d.parquet", g, -(-size // 10), True) for g, size in enumerate(sizes)]
    assert found[8:] == [("e.arrow", 0, None, True), ("e.arrow", 1, None, True)]
    with pytest.raises(IndexError):
        manifest.group(manifest.num_groups)
    assert pickle.loads(pickle.dumps(manifest.group(5))) == manifest.group(5)


def test_a_task_does_not_grow_with_the_row_groups_beside_its_own(tmp_path: Path) -> None:
    sizes = []
    for rows in (2000, 1):
        pq.write_table(pa.table({"text": ["same"] * 2000}), tmp_path / "a.parquet", row_group_size=rows)
        manifest = manifest_of(a_source(tmp_path, "a.parquet"))
        assert manifest.num_groups == 2000 // rows
        sizes.append(len(pickle.dumps(UnitTask(group=manifest.group(0), epoch=0, unit=0))))
    assert max(sizes) < min(sizes) + 50 < 1000


def test_the_digest_knows_paths_sizes_and_row_groups_and_not_the_place(tmp_path: Path) -> None:
    def digest(folder: str, name: str = "a.parquet", rows: int = 4) -> str:
        (tmp_path / folder).mkdir()
        pq.write_table(pa.table({"text": ["same"] * 8}), tmp_path / folder / name, row_group_size=rows)
        return manifest_of(a_source(tmp_path, folder)).digest()

    same = digest("one")
    assert same == digest("two")
    assert len({same, digest("three", name="b.parquet"), digest("four", rows=8)}) == 3
    put(tmp_path / "five" / "a.parquet", (tmp_path / "one" / "a.parquet").read_bytes())
    put(tmp_path / "five" / "b.jsonl", b"")
    assert manifest_of(a_source(tmp_path, "five")).digest() != same


def test_a_manifest_comes_back_from_json(tmp_path: Path) -> None:
    put(tmp_path / "data" / "a.jsonl.gz", gz(LINE))
    pq.write_table(pa.table({"text": ["x"] * 8}), tmp_path / "data" / "b.parquet", row_group_size=3)
    manifest = manifest_of(a_source(tmp_path, "data"))
    again = SourceManifest.from_json(json.loads(json.dumps(manifest.to_json())))
    assert again == manifest
    assert (again.digest(), again.num_groups, again.group(2)) == (manifest.digest(), manifest.num_groups, manifest.group(2))


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize("damage", ["cut", "empty", "footer", "text"])
def test_a_cut_or_damaged_footer_is_refused_at_start_by_name(tmp_path: Path, name: str, damage: str) -> None:
    table, path = pa.table({"text": ["words"] * 100}), tmp_path / "data" / name
    path.parent.mkdir()
    if name.endswith("parquet"):
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    whole = path.read_bytes()
    at = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little") if name.endswith("parquet") else len(whole) - 40
    damaged = whole[:at] + bytes(255 - b for b in whole[at : at + 20]) + whole[at + 20 :]
    path.write_bytes({"cut": whole[:-100], "empty": b"", "footer": damaged, "text": LINE}[damage])
    with pytest.raises(SourceError, match=rf"'web', shard {name}"):
        paths(tmp_path, "data")


def test_a_text_field_that_is_no_column_is_refused_with_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    body = pa.array([{"body": {"text": "x", "lang": "en"}}])
    pq.write_table(pa.table({"id": [1], "doc": body, "tags": [["a"]]}), tmp_path / "data" / "a.parquet")
    for field in ("text", "doc.txt", "tags.item", "doc.body.text.more"):
        with pytest.raises(SourceError, match=r"no column.*'id', 'doc\.body\.text', 'doc\.body\.lang', 'tags'"):
            paths(tmp_path, "data", text_field=field)
    with pytest.raises(SourceError, match=r"column 'doc\.body' is struct.*Within it are 'doc\.body\.text'"):
        paths(tmp_path, "data", text_field="doc.body")
    for field, kind in (("id", "int64"), ("tags", "list")):
        with pytest.raises(SourceError, match=rf"'web', shard a\.parquet: column '{field}' is {kind}"):
            paths(tmp_path, "data", text_field=field)
    assert paths(tmp_path, "data", text_field="doc.body.text") == ["a.parquet"]


def test_the_size_is_that_of_the_text_columns_chunk_wherever_it_stands(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    rows = 50
    table = pa.table(
        {
            "m": pa.array([[("k", 1)]] * rows, pa.map_(pa.string(), pa.int64())),
            "l": [[{"x": 1, "y": "z"}]] * rows,
            "doc.text": [f"literal {i}" * 3 for i in range(rows)],
            "doc": [{"n": i, "text": f"nested {i}" * 40} for i in range(rows)],
        }
    )
    pq.write_table(table, tmp_path / "data" / "a.parquet")
    chunks = pq.read_metadata(tmp_path / "data" / "a.parquet").row_group(0)
    by_path = [chunks.column(i).path_in_schema for i in range(chunks.num_columns)]
    literal = by_path.index("doc.text")
    shard = manifest_of(a_source(tmp_path, "data", text_field="doc.text")).shards[0]
    assert by_path.count("doc.text") == 2
    assert shard.row_groups == ((rows, chunks.column(literal).total_uncompressed_size),)


def test_a_source_of_files_without_rows_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "data" / "a.parquet", row_group_size=1)
    if pq.read_metadata(tmp_path / "data" / "a.parquet").num_row_groups == 0:
        with pytest.raises(SourceError, match="source 'web': no document"):
            paths(tmp_path, "data")
