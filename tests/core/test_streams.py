"""Streams: a reader keeps as many groups going as its worker can be given, decodes each once, and holds little for each."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.reading import a_source, as_arrow, gz, json_lines, manifest_of, put, read_units
from zephon_ray.plan.windows import SourceCursor
from zephon_ray.recipe import Recipe
from zephon_ray.stages.reading import BUFFERS, LEAST_BUFFER, MOST_BUFFER, UnitReader
from zephon_ray.stages.record_batches import is_compressed
from zephon_ray.stages.tokenise import UnitTokeniser, make_options
from zephon_ray.stages.unit import UnitTask
from zephon_ray.storage import Storage


def compressed_shards(folder: Path, count: int) -> Recipe:
    """A source of so many gzip files, each of several units, all of them read side by side."""
    for number in range(count):
        put(folder / "data" / f"{number:03}.jsonl.gz", gz(json_lines([f"{number} {i}" for i in range(60)])))
    return a_source(folder, "data", unit_bytes=300, window_groups=count)


def skipped(recipe: Recipe, tokeniser: UnitTokeniser) -> int:
    """Bytes decoded in vain while the units of one epoch are made, window by window."""
    cursor = SourceCursor(recipe, manifest_of(recipe))
    while cursor.position.epoch == 0:
        cursor.advance([tokeniser.tokenise(task).last for task in cursor.tasks()])
    tokeniser.close()
    return tokeniser.counters.skipped_bytes


def test_a_reader_with_more_streams_than_it_may_keep_gives_the_same_units(tmp_path: Path) -> None:
    recipe = compressed_shards(tmp_path, 6)
    wanted, manifest = read_units(recipe), manifest_of(recipe)
    tokeniser = UnitTokeniser(replace(make_options(recipe), max_streams=2))
    for unit in range(len(wanted[0])):
        for number in range(6):
            if unit < len(wanted[number]):
                read = tokeniser.tokenise(UnitTask(group=manifest.group(number), epoch=0, unit=unit))
                assert read.to_arrow().equals(wanted[number][unit].to_arrow())
    assert tokeniser.counters.skipped_bytes > 0
    tokeniser.close()


def test_a_worker_that_is_given_every_slot_decodes_each_group_once(tmp_path: Path) -> None:
    recipe = compressed_shards(tmp_path, 80)
    assert skipped(recipe, UnitTokeniser(make_options(recipe))) == 0


def test_streams_are_kept_for_the_slots_of_all_sources(tmp_path: Path) -> None:
    sources = [{"name": f"s{i}", "uri": "data", "window_groups": 16 * i or None} for i in range(3)]
    recipe = a_source(tmp_path, "data", more={"sources": sources, "shuffle": {"window_groups": 7}})
    assert make_options(recipe).max_streams == 7 + 16 + 32


_UNDER_A_LIMIT = """
import json, resource, sys
from pathlib import Path
from tests.core.test_streams import skipped
from tests.reading import a_source
from zephon_ray.stages.tokenise import UnitTokeniser, make_options

folder, soft, hard = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
recipe = a_source(folder, "data", unit_bytes=300, window_groups=80)
tokeniser = UnitTokeniser(make_options(recipe))
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
vain = skipped(recipe, tokeniser)
print(json.dumps({"skipped": vain, "units": tokeniser.counters.units, "limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0]}))
"""


def under_a_limit(folder: Path, soft: int, hard: int) -> dict[str, Any]:
    """The same in a process that may open so many files."""
    command = [sys.executable, "-c", _UNDER_A_LIMIT, str(folder), str(soft), str(hard)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_more_files_than_the_soft_limit_allows_are_opened_up_to_the_hard_one(tmp_path: Path) -> None:
    units = sum(map(len, read_units(compressed_shards(tmp_path, 80))))
    assert under_a_limit(tmp_path, 64, 1000) == {"skipped": 0, "units": units, "limit": 256}
    told = under_a_limit(tmp_path, 64, 64)  # streams are closed then, and entered again
    assert (told["units"], told["limit"]) == (units, 64)
    assert told["skipped"] > 0


def test_streams_share_what_they_may_hold_of_a_store(tmp_path: Path) -> None:
    reader = UnitReader(Storage(compressed_shards(tmp_path, 1).execution.storage), 1 << 20, fail=True)
    sizes = []
    for number in range(2000):
        sizes.append(reader._buffer)
        reader._streams[0, 0, number] = None  # type: ignore[assignment]  # only counted
    reader._streams.clear()
    assert sizes[:64] == [MOST_BUFFER] * 64
    assert (sizes[127], sizes[-1]) == (BUFFERS // 128, LEAST_BUFFER)
    assert sum(sizes[:320]) < BUFFERS * (1 + np.log(320 / 64)) + 320


# ---------------------------------------------------------------- record batches


def test_a_mapped_record_batch_is_not_copied_and_of_a_compressed_one_only_the_text_is_held(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    texts = [rng.bytes(3000).hex() for _ in range(2000)]  # 12 MB
    batch = pa.record_batch({"other": ["y" * 10_000] * 2000, "text": texts})  # 20 MB besides
    for compression, most in ((None, 2 << 20), ("lz4", 30 << 20)):
        put(tmp_path / "a.arrow", as_arrow(batch, compression=compression))
        recipe = a_source(tmp_path, "a.arrow", unit_bytes=200_000)
        group = manifest_of(recipe).group(0)
        reader = UnitReader(Storage(recipe.execution.storage), 1 << 20, fail=True)
        before = pa.total_allocated_bytes()
        assert len(reader.read(UnitTask(group=group, epoch=0, unit=0)).texts) > 10
        assert pa.total_allocated_bytes() - before < most
        reader.close()


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("legacy", [False, True])
def test_it_is_known_of_each_record_batch_whether_it_is_compressed(compression: str | None, legacy: bool) -> None:
    version = pa.ipc.MetadataVersion.V4 if legacy and compression is None else pa.ipc.MetadataVersion.V5
    options = pa.ipc.IpcWriteOptions(compression=compression, metadata_version=version, use_legacy_format=legacy)
    words = pa.array(["a", "b", None] * 30).dictionary_encode()
    batch = pa.record_batch({"words": words, "views": pa.array(["text"] * 90).cast(pa.string_view()), "n": pa.array(range(90))})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema.with_metadata({"k": "v"}), options=options) as writer:
        for rows in (90, 1, 0, 17):
            writer.write_batch(batch.slice(0, rows).replace_schema_metadata({"k": "v"}))
    file = pa.BufferReader(sink.getvalue())
    assert [is_compressed(file, ordinal) for ordinal in range(4)] == [compression is not None] * 4


def test_metadata_that_leads_nowhere_is_called_damaged() -> None:
    data = as_arrow(pa.record_batch({"text": ["x"]}))
    length = int.from_bytes(data[-10:-6], "little")
    footer = len(data) - 10 - length
    damaged = data[:footer] + b"\xff\xff\xff\x7f" + data[footer + 4 :]
    with pytest.raises(pa.ArrowInvalid, match="the metadata of record batch 0 is damaged"):
        is_compressed(pa.BufferReader(damaged), 0)
