"""Every line and row is read once, in its unit, as the contract says; what is bad is named and counted, what is broken is refused."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fake_s3 import fake_s3
from tests.reading import a_source, as_arrow, as_parquet, flat, gz, json_lines, manifest_of, put, read_texts, read_units, zst
from zephon_ray.errors import DataChangedError, SourceError
from zephon_ray.stages.json_lines import MAX_DEPTH, MAX_DIGITS, texts_of_lines
from zephon_ray.stages.lines import LineBlock, LineStream, read_range
from zephon_ray.stages.texts import LeftOut
from zephon_ray.stages.tokenise import UnitTokeniser, make_options
from zephon_ray.stages.unit import UnitTask
from zephon_ray.storage import Storage

SKIPPABLE = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"notes"


def parsed(*lines: bytes, field: str = "text", max_bytes: int = 1 << 20) -> tuple[list[str], LeftOut]:
    """What is read of some lines."""
    left_out = LeftOut(where="here", fail=False)
    data = b"".join(line + b"\n" for line in lines)
    block = LineBlock(data=data, offset=0, line=1, too_long=False, last=True, size=len(data))
    return texts_of_lines(block, field, max_bytes, left_out), left_out


def lines_by_unit(data: bytes, unit_bytes: int) -> list[list[bytes]]:
    """The rule itself, slowly: each line in the unit where its first byte lies."""
    units: list[list[bytes]] = [[]]
    at = 0
    for line in re.findall(rb"[^\n]*\n|[^\n]+", data):
        while len(units) <= at // unit_bytes:
            units.append([])
        units[at // unit_bytes].append(line)
        at += len(line)
    return units


# ---------------------------------------------------------------- lines and units


contents = st.lists(st.binary(max_size=12).map(lambda b: bytes(97 + c % 26 for c in b)), max_size=12).flatmap(
    lambda lines: st.booleans().map(lambda ended: b"\n".join(lines) + (b"\n" if ended and lines else b""))
)


@given(contents, st.integers(1, 40))
@settings(max_examples=300)
def test_each_line_lies_in_the_unit_of_its_first_byte(data: bytes, unit_bytes: int) -> None:
    wanted = [b"".join(lines) for lines in lines_by_unit(data, unit_bytes)]
    ranges = max(1, -(-len(data) // unit_bytes))
    file = pa.BufferReader(data)
    assert [read_range(file, len(data), k, unit_bytes, 1 << 20)[0].data for k in range(ranges)] == wanted + [b""] * (ranges - len(wanted))
    stream = LineStream(pa.BufferReader(data).read, unit_bytes, 1 << 20)
    blocks = []
    while not stream.ended:
        blocks.append(stream.take())
    assert [block.data for block in blocks] == wanted
    assert [block.last for block in blocks] == [False] * (len(wanted) - 1) + [True]


@given(contents, st.integers(1, 40), st.integers(0, 10), st.integers(1, 7))
@settings(max_examples=300)
def test_a_line_beyond_the_limit_is_passed_over_and_the_others_stay(data: bytes, unit_bytes: int, limit: int, step: int) -> None:
    file = pa.BufferReader(data)
    stream = LineStream(lambda _: file.read(step), unit_bytes, limit)
    read, long_lines = [], 0
    while not stream.ended:
        block = stream.take()
        left_out = LeftOut(where="", fail=False)
        lines = block.data.split(b"\n")
        read += [line for line in lines if line and len(line) <= limit]
        long_lines += block.too_long + sum(len(line) > limit for line in lines)
        assert left_out.bad == 0
    assert read == [line for line in data.split(b"\n") if line and len(line) <= limit]
    assert long_lines == sum(len(line) > limit for line in data.split(b"\n"))


def test_a_range_reads_its_own_bytes_and_its_last_line_and_not_the_file() -> None:
    line = b"x" * 99 + b"\n"
    data = line * 40_000
    _, read = read_range(pa.BufferReader(data), len(data), 3, 50_000, 1 << 20)
    assert read <= 50_000 + 1 + 5_000
    long_line = b"a\n" + b"x" * 3_000_000 + b"\nb\n"
    block, read = read_range(pa.BufferReader(long_line), len(long_line), 0, 1000, 10_000)
    assert (block.data, block.too_long) == (b"a\n", True)
    assert read < 50_000


def test_a_stream_never_holds_a_line_that_is_too_long() -> None:
    blocks = [b'{"text": "a"}\n', *[b"x" * (1 << 16)] * 400, b'\n{"text": "b"}\n']
    held = 0

    def read(_: int) -> bytes:
        nonlocal held
        held = max(held, sys.getsizeof(stream._rest))
        return blocks.pop(0) if blocks else b""

    stream = LineStream(read, 10_000, 100_000)
    taken = []
    while not stream.ended:
        taken.append(stream.take())
    assert max(len(block.data) for block in taken) < 200
    assert (taken[0].too_long, sum(block.too_long for block in taken)) == (True, 1)
    assert taken[-1].line == 3
    assert held < 200_000


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
@pytest.mark.parametrize("unit_bytes", [1, 37, 100, 1 << 20])
def test_plain_and_compressed_files_have_the_same_lines_in_the_same_units(tmp_path: Path, packed: str, unit_bytes: int) -> None:
    texts = [f"text {i} " + "é" * (i * 7 % 90) for i in range(12)]
    data = json_lines(texts)
    put(tmp_path / "data" / f"a.jsonl{packed}", {"": data, ".gz": gz(data), ".zst": zst(data)}[packed])
    read = read_texts(a_source(tmp_path, "data", unit_bytes=unit_bytes), tmp_path)
    units = [unit for group in read for unit in group]
    wanted = [[json.loads(line)["text"] for line in lines] for lines in lines_by_unit(data, unit_bytes)]
    assert units[: len(wanted)] == wanted
    assert not any(units[len(wanted) :])
    assert packed == "" or len(units) == len(wanted)


def test_members_frames_and_skippable_frames_are_one_stream(tmp_path: Path) -> None:
    texts = [f"document {i}" for i in range(300)]
    data = json_lines(texts)
    cuts = [0, 7, 777, 5000, 5000, len(data)]
    parts = [data[a:b] for a, b in pairwise(cuts)]
    put(tmp_path / "a.jsonl.gz", b"".join(map(gz, parts)))
    put(tmp_path / "b.jsonl.zst", SKIPPABLE + SKIPPABLE.join(map(zst, parts)) + SKIPPABLE)
    for name in ("a.jsonl.gz", "b.jsonl.zst"):
        assert flat(read_texts(a_source(tmp_path, name, unit_bytes=500), tmp_path)) == texts


@pytest.mark.parametrize("data", [b"", b"\n", b"\n\n \t\r\n", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("pack", [bytes, gz, zst])
def test_files_without_records_have_units_without_documents(tmp_path: Path, data: bytes, pack: Callable[[bytes], bytes]) -> None:
    ending = {bytes: "", gz: ".gz", zst: ".zst"}[pack]
    put(tmp_path / f"a.jsonl{ending}", pack(data))
    (group,) = read_units(a_source(tmp_path, f"a.jsonl{ending}"))
    assert [(unit.documents, unit.bad, unit.empty, unit.last) for unit in group] == [(0, 0, 0, True)]


@pytest.mark.parametrize("pack", [gz, zst])
@pytest.mark.parametrize("damage", ["cut", "last bytes cut", "middle", "garbage after", "not packed", "half a second member"])
def test_a_cut_or_damaged_stream_is_refused_by_name_and_never_ends_early(
    tmp_path: Path, pack: Callable[[bytes], bytes], damage: str
) -> None:
    data = json_lines([f"{i * 7919}" * 9 for i in range(2000)])
    whole = pack(data)
    damaged = {
        "cut": whole[: len(whole) * 6 // 10],
        "last bytes cut": whole[:-3],
        "middle": whole[: len(whole) // 2] + bytes(255 - b for b in whole[len(whole) // 2 :][:40]) + whole[len(whole) // 2 + 40 :],
        "garbage after": whole + b"garbage",
        "not packed": data,
        "half a second member": whole + whole[: len(whole) // 2],
    }[damage]
    name = f"part.jsonl.{pack.__name__}"
    put(tmp_path / name, damaged)
    if pack is zst and damage == "middle":
        pytest.skip("these frames carry no checksum")
    with pytest.raises(SourceError, match=rf"source 'web', shard {name}: the {pack.__name__} stream is cut or damaged after \d+"):
        read_units(a_source(tmp_path, name, unit_bytes=10_000))


def test_a_unit_in_the_middle_is_found_by_decoding_without_parsing(tmp_path: Path) -> None:
    texts = [f"document {i}" for i in range(1000)]
    put(tmp_path / "a.jsonl.gz", gz(json_lines(texts)))
    recipe = a_source(tmp_path, "a.jsonl.gz", unit_bytes=1000)
    (units,) = read_units(recipe)
    fresh = UnitTokeniser(make_options(recipe))
    read = fresh.tokenise(UnitTask(group=manifest_of(recipe).group(0), epoch=0, unit=20))
    assert read.to_arrow().equals(units[20].to_arrow())
    assert (fresh.counters.units, fresh.counters.text_bytes) == (1, read.text_bytes)
    assert 19_000 < fresh.counters.skipped_bytes < 21_000
    again = fresh.tokenise(UnitTask(group=manifest_of(recipe).group(0), epoch=0, unit=3))
    assert again.to_arrow().equals(units[3].to_arrow())
    fresh.close()


def test_a_unit_beyond_the_end_says_that_the_data_changed(tmp_path: Path) -> None:
    put(tmp_path / "a.jsonl.gz", gz(json_lines(["x"])))
    recipe = a_source(tmp_path, "a.jsonl.gz")
    with pytest.raises(DataChangedError, match=r"shard a\.jsonl\.gz: unit 1 of group 0 is needed, but the group ends after 1"):
        UnitTokeniser(make_options(recipe)).tokenise(UnitTask(group=manifest_of(recipe).group(0), epoch=0, unit=1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shard_groups": 4}, "3 row groups where the manifest has 4"),
        ({"rows": 5}, "its row group 1 has 4 rows and [0-9]+ bytes of text where the manifest has 5 and"),
        ({"text_size": 1}, "its row group 1 has 4 rows and [0-9]+ bytes of text where the manifest has 4 and 1"),
    ],
)
def test_a_row_group_that_is_not_the_manifests_is_named(tmp_path: Path, change: dict[str, int], said: str) -> None:
    put(tmp_path / "a.parquet", as_parquet(["text"] * 12, row_group_size=4))
    recipe = a_source(tmp_path, "a.parquet")
    group = manifest_of(recipe).group(1)
    tokeniser = UnitTokeniser(make_options(recipe))
    assert tokeniser.tokenise(UnitTask(group=group, epoch=0, unit=0)).documents == 4
    # The footer is kept by now; a task is compared with it all the same.
    with pytest.raises(DataChangedError, match=f"shard a.parquet: {said}.* restore it"):
        tokeniser.tokenise(UnitTask(group=replace(group, **change), epoch=0, unit=0))
    tokeniser.close()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_a_shard_of_another_size_than_the_manifests_is_named(tmp_path: Path, name: str) -> None:
    write: Callable[[list[str]], bytes] = {
        "a.jsonl": json_lines,
        "a.jsonl.gz": lambda texts: gz(json_lines(texts)),
        "a.parquet": as_parquet,
    }[name]
    put(tmp_path / name, write(["some text"] * 50))
    recipe = a_source(tmp_path, name)
    task = UnitTask(group=manifest_of(recipe).group(0), epoch=0, unit=0)
    put(tmp_path / name, write(["another text altogether"] * 70))
    with pytest.raises(DataChangedError, match=f"shard {name}"):
        UnitTokeniser(make_options(recipe)).tokenise(task)
    (tmp_path / name).unlink()
    with pytest.raises(SourceError, match=f"shard {name}: the file is gone"):
        UnitTokeniser(make_options(recipe)).tokenise(task)


# ---------------------------------------------------------------- records of JSON


def test_a_windows_file_loses_nothing_and_gains_nothing(tmp_path: Path) -> None:
    lines = [json_lines([f"row {i}"]).rstrip(b"\n") for i in range(5)]
    put(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + b"\r\n".join([*lines[:2], b"", b"  \t", *lines[2:]]))
    assert flat(read_texts(a_source(tmp_path, "a.jsonl"), tmp_path)) == [f"row {i}" for i in range(5)]


def test_the_byte_order_mark_counts_in_offsets(tmp_path: Path) -> None:
    first = b"\xef\xbb\xbf" + json_lines(["a"])
    data = first + json_lines(["b"])
    for name, packed in (("a.jsonl", data), ("a.jsonl.zst", zst(data))):
        put(tmp_path / name, packed)
        read = read_texts(a_source(tmp_path, name, unit_bytes=len(first) - 1), tmp_path)
        assert [unit for group in read for unit in group][:2] == [["a"], ["b"]]


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\u0085", "\x7f", "\ufeff", "\\u000b", "\\f", "\\r\\n", "\\ud83d\\ude00", "\\u0000"])
def test_a_record_ends_at_a_line_feed_only(mark: str) -> None:
    texts, left_out = parsed(f'{{"text": "before{mark}after"}}'.encode())
    assert texts == [json.loads(f'"before{mark}after"')]
    assert left_out.bad == 0


@pytest.mark.parametrize(
    "line",
    [
        '{"n": NaN, "i": [Infinity, -Infinity], "text": "kept"}',
        '{"text": "no", "text": "kept"}',
        '{"other": "\\ud800 alone", "text": "kept"}',
        '{"n": 1e999, "text": "kept"}',
        f'{{"n": -{"9" * MAX_DIGITS}, "text": "kept"}}',
        f'{{"n": {"1" * 6000}.5e-7000, "text": "kept"}}',
        '{"n": ' + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + ', "text": "kept"}',
        '{"n": NaN, "d": ' + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + ', "text": "kept"}',
        '{"n": NaN, "s": "' + "[{" * 2000 + '", "text": "kept"}',
        ' \t{"text": "kept"} \r',
    ],
)
def test_a_record_is_read_as_pythons_json_reads_it(line: str) -> None:
    assert parsed(line.encode())[0] == ["kept"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "no end', "not JSON"),
        (b"{'text': 'single quotes'}", "not JSON"),
        (b'{"text": "x",}', "not JSON"),
        (b"plain words", "not JSON"),
        (b'{"text":"x"}{"text":"y"}', "not JSON"),
        (b'{"text": "a\tb"}', "not JSON"),
        (b"\xef\xbb\xbf" * 2 + b'{"text": "second mark"}', "not JSON"),
        (b'["text"]', "an array"),
        (b"12", "a number"),
        (b"null", "null"),
        (b'"text"', "a string"),
        (b"true", "a truth value"),
        (b'{"id": 1, "body": "x"}', "no field 'text'; its keys are ['id', 'body']"),
        (b'{"text": 12}', "a number"),
        (b'{"text": true}', "a truth value"),
        (b'{"text": ["a"]}', "an array"),
        (b'{"text": {"en": "a"}}', "an object"),
        (b'{"text": "caf\xe9"}', "not valid UTF-8: byte 0xe9"),
        (b'{"text": "x", "other": "\xff"}', "not valid UTF-8"),
        (b'{"text": "\xed\xa0\x80"}', "not valid UTF-8"),
        (b'{"text": "\xc0\xaf"}', "not valid UTF-8"),
        (b'{"text": "a\\ud83db"}', "surrogate"),
        (b'{"text": "\\udc4d\\ud83d"}', "surrogate"),
        (b'{"n": ' + b"1" * (MAX_DIGITS + 1) + b', "text": "x"}', f"more than {MAX_DIGITS} digits"),
        (b'{"n": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b', "text": "x"}', "nested deeper"),
        (b'{"n": NaN, "d": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b', "text": "x"}', "nested deeper"),
        (b'{"text": "x"}' + b" " * (1 << 20), "longer than max_document_bytes"),
    ],
)
def test_a_bad_record_is_named_counted_and_alone(line: bytes, reason: str) -> None:
    texts, left_out = parsed(b'{"text": "before"}', line, b'{"text": "after"}')
    assert texts == ["before", "after"]
    assert left_out.bad == 1
    assert left_out.examples[0].startswith("here, line 2 (byte 19): ")
    assert reason in left_out.examples[0]


def test_the_answer_does_not_depend_on_how_deep_the_caller_stands() -> None:
    line = b'{"n": NaN, "d": ' + b"[" * 1000 + b"]" * 1000 + b', "text": "kept"}'
    limit = sys.getrecursionlimit()

    def deep(levels: int) -> list[str]:
        return deep(levels - 1) if levels else parsed(line)[0]

    assert deep(0) == deep(400) == ["kept"]
    assert sys.getrecursionlimit() == limit


def test_empty_and_null_texts_are_counted_and_are_no_documents() -> None:
    texts, left_out = parsed(b'{"text": ""}', b'{"text": null}', b'{"text": "x"}')
    assert (texts, left_out.empty, left_out.bad) == (["x"], 2, 0)


def test_the_longest_line_is_whole_and_one_byte_more_is_bad() -> None:
    line = b'{"text": "' + b"x" * 50 + b'"}'
    assert parsed(line, max_bytes=len(line))[0] == ["x" * 50]
    assert parsed(line + b" ", max_bytes=len(line))[1].bad == 1
    assert parsed(b" " * 100, max_bytes=10)[1].bad == 0


def test_a_dotted_name_is_a_path_unless_a_key_has_that_very_name() -> None:
    nested = b'{"doc": {"body": {"text": "inner"}}, "doc.body": {"text": "no"}}'
    literal = b'{"doc": {"body": {"text": "inner"}}, "doc.body.text": "literal"}'
    null = b'{"doc": {"body": null}}'
    texts, left_out = parsed(nested, literal, null, b'{"doc": {"body": "x"}}', b'{"doc": {}}', field="doc.body.text")
    assert (texts, left_out.empty, left_out.bad) == (["inner", "literal"], 1, 2)


def test_a_failing_record_carries_its_place_and_the_unit_has_no_ids(tmp_path: Path) -> None:
    lines = json_lines(["good"] * 16) + b"broken\n" + json_lines(["good"] * 3)
    put(tmp_path / "data" / "a" / "b.jsonl.gz", gz(lines))
    (group,) = read_units(a_source(tmp_path, "data", more={"on_bad_record": "fail"}))
    assert group[0].error is not None
    assert group[0].error.startswith("source 'web', shard a/b.jsonl.gz, line 17 (byte 272): not JSON")
    assert (group[0].documents, len(group[0].ids), group[0].last) == (0, 0, True)
    put(tmp_path / "plain.jsonl", lines)
    units = read_units(a_source(tmp_path, "plain.jsonl", unit_bytes=100, more={"on_bad_record": "fail"}))
    assert [unit.error for (unit,) in units if unit.error] == [
        "source 'web', shard plain.jsonl, at byte 272: not JSON: Expecting value at character 0 of the line"
    ]


def test_under_skip_the_first_three_bad_records_are_described_and_all_are_counted(tmp_path: Path) -> None:
    put(tmp_path / "a.jsonl", b"bad\n" * 10 + json_lines(["good"]))
    ((unit,),) = read_units(a_source(tmp_path, "a.jsonl"))
    assert (unit.bad, len(unit.bad_examples), unit.documents, unit.error) == (10, 3, 1, None)


@pytest.mark.parametrize("scheme", ["memory", "s3"])
def test_a_store_gives_the_units_that_a_disk_gives(tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    texts = [f"document {i} " * (i % 9 + 1) for i in range(300)]
    data = json_lines(texts)
    files = {
        "a b.jsonl": data, "b#.jsonl.gz": gz(data), "c/d.jsonl.zst": zst(data), "d.parquet": as_parquet(texts, row_group_size=120),
        "e.arrow": as_arrow(pa.record_batch({"text": texts})),
    }  # fmt: skip
    for name, content in files.items():
        put(tmp_path / "data" / name, content)
    local = a_source(tmp_path, "data", unit_bytes=4000)
    with fake_s3() as store:
        execution = {"execution": {"storage": {"endpoint_url": store.endpoint}}}
        remote = a_source(tmp_path, f"{scheme}://{tmp_path.name}/data", unit_bytes=4000, more=execution)
        storage = Storage(remote.execution.storage)
        for name, content in files.items():
            storage.write_bytes(storage.join(remote.source_url(0), name), content)
        assert manifest_of(remote).digest() == manifest_of(local).digest()
        found, wanted = read_units(remote), read_units(local)
    assert [[unit.key for unit in group] for group in found] == [[unit.key for unit in group] for group in wanted]
    assert all(a.to_arrow().equals(b.to_arrow()) for x, y in zip(found, wanted, strict=True) for a, b in zip(x, y, strict=True))
