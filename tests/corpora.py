"""Hypothesis strategies for small random corpora and the recipes that read them.

A `Corpus` is plain data: a recipe and the bytes of its files. `write` puts it into a folder. Every source holds at least one
document with a pair; records that the contract calls bad occur only where the recipe skips them.
"""

from __future__ import annotations

import functools
import gzip
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import yaml
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
WORDS = ["the", "a", "of", "lane", "step", "batch", "näher", "Straße", "λόγος", "数据", "🚀", "def", "return", "x=1", "\t(y)"]
WORDS += ["**", "0.5", "{'k'}", "e\u0301", "window's"]
SURE = "every source holds one"
"""A text of several ids under any tokenizer here; it is in every source once at least."""
SKIPPABLE_FRAME = (0x184D2A53).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"notes"


@dataclass(frozen=True)
class Corpus:
    """A recipe as plain data, and its files by path relative to the recipe's folder."""

    recipe: dict[str, Any]
    files: dict[str, bytes]

    def write(self, folder: Path) -> Path:
        """Write everything; returns the path of the recipe."""
        for path, data in {**self.files, "tokenizer.json": tokenizer_json().encode()}.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(self.recipe, allow_unicode=True, sort_keys=False), encoding="utf-8")
        return folder / "recipe.yaml"

    def __repr__(self) -> str:
        files = {path: data if len(data) <= 400 else f"{len(data)} bytes, {data[:160]!r}..." for path, data in self.files.items()}
        return f"Corpus(recipe={self.recipe!r}, files={files!r})"


@functools.cache
def tokenizer_json() -> str:
    """A byte-level BPE tokenizer of 400 ids with three specials.

    Its file asks for truncation, padding and a token of its own around every text: the contract overrides all three.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(token, special=True) for token in (BOS, EOS, PAD)]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([_prose(number, 60) for number in range(50)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{PAD} $A", special_tokens=[(PAD, tokenizer.token_to_id(PAD))])
    tokenizer.enable_truncation(7)
    tokenizer.enable_padding(length=9, pad_id=tokenizer.token_to_id(PAD), pad_token=PAD)
    return tokenizer.to_str()


def _prose(number: int, words: int) -> str:
    """A text of `words` words that depends on `number` alone."""
    picked, x = [], number
    for _ in range(words):
        x = (x * 6364136223846793005 + 1442695040888963407) % 2**64
        picked.append(WORDS[(x >> 33) % len(WORDS)])
    return " ".join(picked)


# --- texts and records ----------------------------------------------------------------------------------------------

texts: st.SearchStrategy[str | None] = st.one_of(
    st.builds(_prose, st.integers(0, 10**6), st.integers(1, 12)),
    st.builds(_prose, st.integers(0, 10**6), st.integers(1, 40)),
    st.sampled_from(["", "x", "é", " ", "a b", None, EOS, f"one {EOS}two{BOS}", "nul \0 and \u2028", "tab\tand\r\nline"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
"""Ordinary documents, and empty ones, nulls, of one id, with specials spelled out, with control characters."""

long_texts: st.SearchStrategy[str | None] = st.builds(_prose, st.integers(0, 10**6), st.integers(200, 900))

BAD_LINES = [
    b"no json",
    b'["a list"]',
    b'"a string"',
    b'{"other": "field"}',
    b'{"text": 3}',
    b'{"text": ["in a list"]}',
    b'{"text": {"in": "an object"}}',
    b'{"text": false}',
    b'{"text": "cut',
    b'{"text": "two"} {"text": "records"}',
    b'{"text": "\xff not UTF-8"}',
    b'{"text": "elsewhere", "s": "\xed\xa0\x80"}',
    b'{"text": "a lone \\ud800 surrogate"}',
    b'{"text": "a control \x01 character"}',
    b"\x0b",
    b'{"text": "nested", "deep": ' + b"[" * 3000 + b"]" * 3000 + b"}",
    b'{"text": "digits", "n": ' + b"7" * 4301 + b"}",
]


@st.composite
def _line(draw: st.DrawFn, text: str | None) -> bytes:
    """A good record, in one of the many ways to write it."""
    value = json.dumps(text, ensure_ascii=draw(st.booleans()))
    form = draw(
        st.sampled_from(
            [
                '{"text": %s}',
                '{"id": 12345678901234567890123, "text":%s, "score": NaN}',
                '  {"text": %s, "nested": {"text": 3}}\t',
                '{"text": 3, "text": %s}\r',
                '{"s": "\\ud800", "text" : %s, "big": 1e999, "m": -Infinity}',
            ]
        )
    )
    return (form % value).encode()


@st.composite
def _json_lines(draw: st.DrawFn, documents: list[str | None], bad: bool) -> bytes:
    lines = [draw(_line(text)) for text in documents]
    odd = st.sampled_from([b"", b" \t", b"\r", *(BAD_LINES if bad else [])])
    for line in draw(st.lists(odd, max_size=4)):
        lines.insert(draw(st.integers(0, len(lines))), line)
    data = b"\n".join(lines) + draw(st.sampled_from([b"\n", b"", b"\n\n", b"\r\n"]))
    return draw(st.sampled_from([b"", b"", b"\xef\xbb\xbf"])) + data


@st.composite
def _compressed(draw: st.DrawFn, data: bytes, ending: str) -> bytes:
    """`data` as several members (frames), some of them empty, cut anywhere."""
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=3)))
    parts = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    if ending == ".gz":
        return b"".join(gzip.compress(part, 1, mtime=0) for part in parts)
    extra = draw(st.sampled_from([b"", SKIPPABLE_FRAME]))
    return extra.join(zstd.compress(part, 1) for part in parts)


STRING_TYPES = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
BYTES_TYPES = [pa.binary(), pa.large_binary()]


@st.composite
def _table(draw: st.DrawFn, documents: list[str | None], bad: bool) -> pa.Table:
    values: list[bytes | None] = [None if text is None else text.encode() for text in documents]
    kind = draw(st.sampled_from([*STRING_TYPES, *BYTES_TYPES]))
    if bad and kind in BYTES_TYPES:
        for value in draw(st.lists(st.sampled_from([b"\xff", b"cut \xe2\x82", b"\xed\xa0\x80"]), max_size=2)):
            values.insert(draw(st.integers(0, len(values))), value)
    column = pa.array(values if kind in BYTES_TYPES else [None if v is None else v.decode() for v in values], kind)
    others = {"id": pa.array(range(len(values)), pa.int64()), "meta": pa.nulls(len(values))}
    return pa.table({"id": others["id"], "text": column} if draw(st.booleans()) else {"text": column, **others})


@st.composite
def _parquet(draw: st.DrawFn, table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(
        table,
        sink,
        row_group_size=draw(st.integers(1, 12)),
        compression=draw(st.sampled_from(["none", "snappy", "zstd"])),
        use_dictionary=draw(st.booleans()),
    )
    return sink.getvalue()


@st.composite
def _arrow(draw: st.DrawFn, table: pa.Table) -> bytes:
    sink = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=draw(st.sampled_from([None, "lz4", "zstd"])))
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=draw(st.integers(1, 12)))
    return sink.getvalue()


# --- sources --------------------------------------------------------------------------------------------------------

NAMES = ["a", "B", "10", "9", "é", "d/a", "d.d/x y", "text=no/a+b%20", "#?"]
"""Names of shards without their ending: they sort unlike by number, case and language, and need no quoting."""


@st.composite
def _file(draw: st.DrawFn, ending: str, documents: list[str | None], bad: bool) -> bytes:
    if ending == ".parquet":
        return draw(_parquet(draw(_table(documents, bad))))
    if ending in (".arrow", ".feather"):
        return draw(_arrow(draw(_table(documents, bad))))
    data = draw(_json_lines(documents, bad))
    return draw(_compressed(data, ending[ending.rindex(".") :])) if ending.endswith((".gz", ".zst")) else data


@st.composite
def _source(draw: st.DrawFn, number: int, bad: bool, limit: int | None) -> tuple[dict[str, Any], dict[str, bytes]]:
    """(the source's entry in the recipe, its files)."""
    root = f"s{number}"
    spec: dict[str, Any] = {"name": draw(st.sampled_from(["web", "code", "数", "a b"])) + str(number), "uri": root}
    endings = [".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".parquet", ".arrow", ".feather"]
    if draw(st.integers(0, 9)) == 9:
        spec["format"] = "jsonl"
        endings = ["", ".txt", ".txt.gz", ".txt.zst"]
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
    holder = draw(st.sampled_from(names))
    files = {}
    for name in names:
        documents = draw(st.lists(texts, max_size=10))
        if limit is None and draw(st.integers(0, 7)) == 7:
            documents.append(draw(long_texts))
        if name == holder:
            documents.insert(draw(st.integers(0, len(documents))), SURE)
        ending = draw(st.sampled_from(endings))
        empty = name != holder and ending not in (".parquet", ".arrow", ".feather") and draw(st.integers(0, 5)) == 5
        files[f"{root}/{name}{ending}"] = b"" if empty else draw(_file(ending, documents, bad))
    if draw(st.integers(0, 4)) == 4:
        files |= {f"{root}/.hidden/a.jsonl": b"not read", f"{root}/d/_also.jsonl": b"not read"}
    spec["uri"] = draw(st.sampled_from([root, f"{root}/**", *(list(files) if len(files) == 1 else [])]))
    if draw(st.booleans()):
        spec["epochs"] = draw(st.integers(1, 3))
    if draw(st.integers(0, 3)) == 3:
        spec["unit_bytes"] = draw(st.integers(32, 2000))
    if draw(st.integers(0, 3)) == 3:
        spec["window_groups"] = draw(st.integers(1, 5))
    return spec, files


# --- recipes --------------------------------------------------------------------------------------------------------


@st.composite
def _weights(draw: st.DrawFn, sources: int) -> list[float | int | None]:
    """One a source (None: the default), none below 2^-14 of their sum."""
    if draw(st.booleans()):
        return [None] * sources
    places = draw(st.integers(0, 4))
    weights = draw(st.lists(st.integers(1, 5000), min_size=sources, max_size=sources))
    return [weight if places == 0 else weight / 10**places for weight in weights]


@st.composite
def _packing(draw: st.DrawFn, length: int) -> dict[str, Any]:
    packing: dict[str, Any] = {"algorithm": draw(st.sampled_from(["wrap", "wrap", "best_fit"]))}
    if draw(st.booleans()):
        packing["max_document_tokens"] = draw(st.integers(1, length if packing["algorithm"] == "best_fit" else 3 * length))
    if packing["algorithm"] == "best_fit" and draw(st.integers(0, 3)):
        packing["buffer"] = draw(st.integers(1, 20))
    return packing


@st.composite
def corpora(draw: st.DrawFn) -> Corpus:
    """Small random corpora with their recipes."""
    lanes, length = draw(st.integers(1, 12)), draw(st.integers(1, 64))
    bad = draw(st.integers(0, 2)) == 2
    limit = draw(st.sampled_from([None, None, 120])) if bad else None
    packing = draw(_packing(length))
    drawn = [draw(_source(number, bad, limit)) for number in range(draw(st.integers(1, 4)))]
    for (spec, _), weight in zip(drawn, draw(_weights(len(drawn))), strict=True):
        spec |= {} if weight is None else {"weight": weight}
    tokenizer = {"path": "tokenizer.json"} | {name: token for name, token in (("bos", BOS), ("eos", EOS)) if draw(st.integers(0, 2))}
    if packing["algorithm"] == "best_fit" or draw(st.booleans()):
        tokenizer["pad"] = PAD
    if draw(st.integers(0, 2)) == 2:
        tokenizer["special_tokens_in_text"] = draw(st.sampled_from(["plain", "control"]))
    recipe = {
        "schema": 1,
        "name": "random",
        "seed": draw(st.one_of(st.integers(0, 3), st.integers(2**64 - 3, 2**64 - 1))),
        "lanes": lanes,
        "sequence_length": length,
        "global_batch_size": lanes * draw(st.integers(1, 3)),
        "tokenizer": tokenizer,
        "sources": [spec for spec, _ in drawn],
        "shuffle": {"groups": draw(st.booleans()), "documents": draw(st.booleans()), "window_groups": draw(st.integers(1, 5))},
        "packing": packing,
        "unit_bytes": draw(st.integers(32, 2000)),
        "on_exhausted": draw(st.sampled_from(["stop", "continue"])),
        "final_batch": draw(st.sampled_from(["drop", "pad"])),
    }
    recipe |= {"on_bad_record": "skip"} if bad else {}
    recipe |= {} if limit is None else {"max_document_bytes": limit}
    return Corpus(recipe, {path: data for _, files in drawn for path, data in files.items()})


def steps_worth(recipe: dict[str, Any], pairs: int = 8000) -> int:
    """How many steps to run of a recipe: about `pairs` pairs, at least 3 and at most 120 steps."""
    a_step: int = recipe["global_batch_size"] * recipe["sequence_length"]
    return min(120, max(3, pairs // a_step))
