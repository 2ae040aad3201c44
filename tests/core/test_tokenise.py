"""A unit's ids are those of the Hugging Face tokenizer with the recipe's special tokens, whoever makes them and in whatever order."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from tokenizers import Tokenizer

from tests.reading import a_source, byte_tokenizer, gz, json_lines, manifest_of, put, read_units, texts_of
from zephon_ray.errors import RecipeError, SourceError
from zephon_ray.hashing import sha256_hex
from zephon_ray.stages import tokenise
from zephon_ray.stages.engines import fast, hf
from zephon_ray.stages.tokenise import UnitTokeniser, make_options
from zephon_ray.stages.unit import TokenisedUnit, UnitTask

TEXTS = ["one", "two words", "é" * 10, "<|eos|> in the text <|tag|>", "x", "a longer document " * 30]


def special(**tokens: str) -> dict[str, Any]:
    return {"tokenizer": {"path": "tokenizer.json", **tokens}}


def one_unit(folder: Path, texts: list[str], **tokens: str) -> TokenisedUnit:
    put(folder / "a.jsonl", json_lines(texts))
    ((unit,),) = read_units(a_source(folder, "a.jsonl", more=special(**tokens)))
    return unit


@pytest.mark.parametrize("tokens", [{}, {"bos": "<|bos|>"}, {"eos": "<|eos|>"}, {"bos": "<|bos|>", "eos": "<|eos|>"}])
@pytest.mark.parametrize("in_text", ["plain", "control"])
def test_a_document_is_bos_its_ids_and_eos(tmp_path: Path, tokens: dict[str, str], in_text: str) -> None:
    unit = one_unit(tmp_path, TEXTS, special_tokens_in_text=in_text, **tokens)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.encode_special_tokens = in_text == "plain"
    around = [[tokenizer.token_to_id(tokens[name])] if name in tokens else [] for name in ("bos", "eos")]
    wanted = [around[0] + tokenizer.encode(text, add_special_tokens=False).ids + around[1] for text in TEXTS]
    kept = [ids for ids in wanted if len(ids) >= 2]
    assert np.split(unit.ids, unit.offsets[1:-1])[0].tolist() == kept[0]
    assert unit.ids.tolist() == [number for ids in kept for number in ids]
    assert unit.offsets.tolist() == [0, *np.cumsum([len(ids) for ids in kept])]
    assert unit.short == len(wanted) - len(kept) == (1 if not tokens else 0)
    assert (unit.ids.dtype.name, unit.offsets.dtype.name) == ("uint32", "int64")


def test_no_document_can_forge_an_end_of_text_under_plain(tmp_path: Path) -> None:
    texts = ["<|eos|><|bos|>", "a<|pad|>b"]
    unit = one_unit(tmp_path, texts, eos="<|eos|>")
    assert np.count_nonzero(unit.ids >= 256) == unit.documents == 2
    forged = one_unit(tmp_path, texts, eos="<|eos|>", special_tokens_in_text="control")
    assert np.count_nonzero(forged.ids >= 256) == 5


def test_truncation_padding_and_templates_of_the_tokenizer_are_off(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path / "tokenizer.json")
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    plain = one_unit(tmp_path, TEXTS)
    data["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    data["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 258, "pad_type_id": 0,
        "pad_token": "<|pad|>",
    }  # fmt: skip
    eos = {"SpecialToken": {"id": "<|eos|>", "type_id": 0}}
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, eos],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, eos, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|eos|>": {"id": "<|eos|>", "ids": [257], "tokens": ["<|eos|>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    assert one_unit(tmp_path, TEXTS).to_arrow().equals(plain.to_arrow())


def test_the_size_of_a_tokenizer_call_cannot_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"document {i} " * (i % 30 + 1) for i in range(200)]
    whole = one_unit(tmp_path, texts)
    for size in (1, 50, 1000):
        monkeypatch.setattr(hf, "CHUNK_BYTES", size)
        monkeypatch.setattr(fast, "CHUNK_BYTES", size)
        assert one_unit(tmp_path, texts).to_arrow().equals(whole.to_arrow())


def test_any_instance_in_any_order_gives_the_same_unit(tmp_path: Path) -> None:
    put(tmp_path / "data" / "a.jsonl", json_lines([f"plain {i}" for i in range(100)]))
    put(tmp_path / "data" / "b.jsonl.gz", gz(json_lines([f"packed {i}" for i in range(100)])))
    recipe = a_source(tmp_path, "data", unit_bytes=500)
    forward = [unit for group in read_units(recipe) for unit in group]
    options, manifest = pickle.loads(pickle.dumps((make_options(recipe), manifest_of(recipe))))
    other = UnitTokeniser(options)
    for unit in reversed(forward):
        task = pickle.loads(pickle.dumps(UnitTask(group=manifest.group(unit.group), epoch=0, unit=unit.unit)))
        assert task.key == unit.key
        assert other.tokenise(task).to_arrow().equals(unit.to_arrow())
    other.close()
    assert {text for unit in forward for text in texts_of(unit, tmp_path)} == {f"{k} {i}" for k in ("plain", "packed") for i in range(100)}


def test_the_epoch_names_the_unit_and_changes_nothing_else(tmp_path: Path) -> None:
    put(tmp_path / "a.jsonl", json_lines(TEXTS))
    recipe = a_source(tmp_path, "a.jsonl")
    tokeniser, group = UnitTokeniser(make_options(recipe)), manifest_of(recipe).group(0)
    first, fifth = (tokeniser.tokenise(UnitTask(group=group, epoch=epoch, unit=0)) for epoch in (0, 5))
    assert fifth.key == (0, 5, 0, 0)
    assert first.to_arrow().drop_columns("epoch").equals(fifth.to_arrow().drop_columns("epoch"))


def test_the_digest_is_of_the_texts_that_are_neither_bad_nor_empty(tmp_path: Path) -> None:
    put(tmp_path / "a.jsonl", b"bad\n" + json_lines(["", "é", None, "x"]))
    ((unit,),) = read_units(a_source(tmp_path, "a.jsonl"))
    assert unit.digest == xxhash.xxh3_64_intdigest(np.array([2, 1], "<i8").tobytes() + "éx".encode())
    assert (unit.text_bytes, unit.bad, unit.empty, unit.short, unit.documents) == (3, 1, 2, 0, 2)
    other = one_unit(tmp_path, ["éx"])
    assert (other.text_bytes, other.digest == unit.digest) == (3, False)


def test_a_unit_comes_back_from_arrow_without_copying_its_ids(tmp_path: Path) -> None:
    unit = one_unit(tmp_path, TEXTS, bos="<|bos|>")
    batch = unit.to_arrow()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    (received,) = pa.ipc.open_stream(sink.getvalue())
    again = TokenisedUnit.from_arrow(received)
    assert again.to_arrow().equals(batch)
    assert again.ids.tolist() == unit.ids.tolist()
    column = received.column("ids").values.buffers()[1]
    assert again.ids.__array_interface__["data"][0] == column.address
    assert (again.key, again.digest, again.error, again.bad_examples) == (unit.key, unit.digest, None, ())


def test_options_carry_pad_and_the_sha256_of_the_tokenizer_file(tmp_path: Path) -> None:
    options = make_options(a_source(tmp_path, "a.jsonl", more=special(pad="<|pad|>")))
    assert (options.pad, options.bos, options.eos) == (258, None, None)
    assert options.tokenizer_sha256 == sha256_hex((tmp_path / "tokenizer.json").read_bytes())


def test_all_wrong_special_tokens_are_named_with_those_that_exist(tmp_path: Path) -> None:
    recipe = a_source(tmp_path, "a.jsonl", more=special(bos="<|none|>", eos="<|tag|>", pad="a"))
    with pytest.raises(RecipeError) as caught:
        make_options(recipe)
    missing, unflagged, ordinary = caught.value.problems
    assert "tokenizer.bos='<|none|>' is not in the tokenizer" in missing
    assert "'<|bos|>', '<|eos|>', '<|pad|>'" in missing
    assert "tokenizer.eos='<|tag|>' is not flagged special" in unflagged
    assert "tokenizer.pad='a' is not flagged special" in ordinary
    control = a_source(tmp_path, "a.jsonl", more=special(eos="<|tag|>", pad="a", special_tokens_in_text="control"))
    assert make_options(control).eos == 259


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff\xfe", b"not json"])
def test_a_tokenizer_file_that_is_none_is_refused_by_name(tmp_path: Path, content: bytes | None) -> None:
    recipe = a_source(tmp_path, "a.jsonl")
    (tmp_path / "tokenizer.json").unlink()
    if content is not None:
        put(tmp_path / "tokenizer.json", content)
    with pytest.raises(RecipeError, match=r"tokenizer\.path='tokenizer\.json'"):
        make_options(recipe)


def test_counters_count_what_was_done(tmp_path: Path) -> None:
    data = json_lines(TEXTS)
    put(tmp_path / "a.jsonl", data)
    recipe = a_source(tmp_path, "a.jsonl")
    tokeniser = UnitTokeniser(make_options(recipe))
    read_units(recipe, tokeniser)
    read_units(recipe, tokeniser)
    text_bytes = sum(len(text.encode()) for text in TEXTS)
    assert tokeniser.counters == tokenise.TokeniserCounters(
        units=2, text_bytes=2 * text_bytes, skipped_bytes=0, bytes_read=2 * len(data), remade=0
    )


def test_a_unit_of_a_file_that_is_gone_is_an_error_and_the_next_one_is_read(tmp_path: Path) -> None:
    put(tmp_path / "data" / "a.jsonl", json_lines(["a"]))
    put(tmp_path / "data" / "b.jsonl", json_lines(["b"]))
    recipe = a_source(tmp_path, "data")
    manifest, tokeniser = manifest_of(recipe), UnitTokeniser(make_options(recipe))
    (tmp_path / "data" / "a.jsonl").unlink()
    with pytest.raises(SourceError, match=r"source 'web', shard a\.jsonl: the file is gone"):
        tokeniser.tokenise(UnitTask(group=manifest.group(0), epoch=0, unit=0))
    assert tokeniser.tokenise(UnitTask(group=manifest.group(1), epoch=0, unit=0)).documents == 1
