"""Helpers for tests of reading: a tokenizer of which each id is one byte, and every unit of a source with its texts."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from zephon_ray.manifest import SourceManifest, build_manifest
from zephon_ray.recipe import Recipe, recipe_from_dict
from zephon_ray.stages.tokenise import UnitTokeniser, make_options
from zephon_ray.stages.unit import TokenisedUnit, UnitTask
from zephon_ray.storage import Storage


def byte_tokenizer(path: Path) -> Tokenizer:
    """Writes a tokenizer.json of one token a byte and three special tokens."""
    tokenizer = Tokenizer(BPE({character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|bos|>", "<|eos|>", "<|pad|>"])
    tokenizer.add_tokens([AddedToken("<|tag|>", special=False)])
    tokenizer.save(str(path))
    return tokenizer


def a_source(folder: Path, uri: str, *, more: dict[str, Any] | None = None, **source: Any) -> Recipe:
    """A recipe with one source, named `web`, and the byte tokenizer in `folder`; `more` are fields of the recipe."""
    if not (folder / "tokenizer.json").exists():
        byte_tokenizer(folder / "tokenizer.json")
    data = {
        "schema": 1, "name": "reading", "seed": 1, "lanes": 1, "sequence_length": 16, "global_batch_size": 1, "on_bad_record": "skip",
        "tokenizer": {"path": "tokenizer.json", "bos": "<|bos|>", "eos": "<|eos|>"},
        "sources": [{"name": "web", "uri": uri, **source}],
    } | (more or {})  # fmt: skip
    return recipe_from_dict(data, folder)


def manifest_of(recipe: Recipe) -> SourceManifest:
    return build_manifest(recipe, 0, Storage(recipe.execution.storage))


def read_units(recipe: Recipe, tokeniser: UnitTokeniser | None = None) -> list[list[TokenisedUnit]]:
    """All units of the recipe's only source, group by group, read in order."""
    manifest = manifest_of(recipe)
    tokeniser = tokeniser or UnitTokeniser(make_options(recipe))
    try:
        return [list(_group(tokeniser, manifest, g)) for g in range(manifest.num_groups)]
    finally:
        tokeniser.close()


def _group(tokeniser: UnitTokeniser, manifest: SourceManifest, number: int) -> Iterator[TokenisedUnit]:
    unit, last = 0, False
    while not last:
        read = tokeniser.tokenise(UnitTask(group=manifest.group(number), epoch=0, unit=unit))
        yield read
        unit, last = unit + 1, read.last


def texts_of(unit: TokenisedUnit, folder: Path) -> list[str]:
    """The texts of a unit, read back from its ids."""
    tokenizer = _loaded(str(folder / "tokenizer.json"))
    ids, ends = unit.ids.tolist(), unit.offsets.tolist()
    return [tokenizer.decode(ids[a:b], skip_special_tokens=True) for a, b in pairwise(ends)]


@cache
def _loaded(path: str) -> Tokenizer:
    return Tokenizer.from_file(path)


def read_texts(recipe: Recipe, folder: Path) -> list[list[list[str]]]:
    """Group, unit, document: the texts of the recipe's only source."""
    return [[texts_of(unit, folder) for unit in group] for group in read_units(recipe)]


def flat(groups: Iterable[Iterable[Iterable[str]]]) -> list[str]:
    return [text for group in groups for unit in group for text in unit]


def json_lines(texts: Sequence[str | None]) -> bytes:
    return b"".join(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in texts)


def zst(data: bytes) -> bytes:
    """One zstd frame."""
    return bytes(pa.Codec("zstd").compress(data, asbytes=True))


def gz(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def as_parquet(texts: Any, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    table = texts if isinstance(texts, pa.Table) else pa.table({"text": texts})
    pq.write_table(table, sink, **options)
    return bytes(sink.getvalue())


def as_arrow(*batches: pa.RecordBatch, compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())
