"""No engine changes an id: a fast one is used where it gives the reference's, watched, and left where it does not."""

from __future__ import annotations

import json
import logging
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.golden_cases import GOLDEN, GoldenCase
from tests.reading import a_source, json_lines, manifest_of, put
from tests.small import a_recipe
from zephon_ray.errors import RecipeError
from zephon_ray.recipe import load_recipe
from zephon_ray.runs import produce
from zephon_ray.stages.engines import encoder, encoder_of
from zephon_ray.stages.engines.base import Encoded, EngineUnfitError
from zephon_ray.stages.engines.encoder import Encoder
from zephon_ray.stages.engines.fast import FastEngine
from zephon_ray.stages.engines.hard_texts import hard_texts
from zephon_ray.stages.engines.hf import HfEngine
from zephon_ray.stages.texts import Texts
from zephon_ray.stages.tokenise import UnitTokeniser, make_options
from zephon_ray.stages.unit import UnitTask
from zephon_ray.stream import Stream

TOKENIZERS = ("tokenizer.json", "tokenizer_traps.json")
KEY = (0, 0, 7, 3)


class Liar:
    """The reference, with one id changed in every text that holds `word`."""

    name = "liar 1"

    def __init__(self, word: str) -> None:
        self._truth, self._word, self.calls = HfEngine(golden(), True), word, 0

    def encode(self, texts: Texts) -> Encoded:
        self.calls += 1
        encoded = self._truth.encode(texts)
        ids, ends = encoded.ids.copy(), np.cumsum(encoded.sizes)
        for number, text in enumerate(texts.strings()):
            if self._word in text:
                ids[ends[number] - 1] += 1
        return replace(encoded, ids=ids)


def golden(name: str = "tokenizer.json") -> bytes:
    return (GOLDEN / name).read_bytes()


def same(a: Encoded, b: Encoded) -> bool:
    return a.sizes.tolist() == b.sizes.tolist() and a.ids.tolist() == b.ids.tolist()


def run_whole(case: GoldenCase, engine: str) -> None:
    recipe = load_recipe(case.recipe, [f"execution.engine={engine}"])
    stream = Stream(recipe, runner="inline")
    for step in case.steps:
        batch = stream.next_batch()
        assert batch is not None
        assert (batch.step, batch.chain.hex()) == (step.step, step.chain)
    stream.close()


@pytest.mark.parametrize("engine", ["hf", "fast"])
@pytest.mark.parametrize("name", ["forged_specials", "control_specials", "tokenizer_defaults", "one_id_documents"])
def test_every_engine_gives_the_contracts_digests(name: str, engine: str, golden_cases: dict[str, GoldenCase]) -> None:
    run_whole(golden_cases[name], engine)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["hf", "fast"])
def test_every_engine_gives_the_contracts_digests_in_every_case(golden_case: GoldenCase, engine: str) -> None:
    run_whole(golden_case, engine)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_fast_engine_gives_the_references_ids_on_hard_texts(name: str, plain: bool) -> None:
    reference, fast = HfEngine(golden(name), plain), FastEngine(golden(name), plain)
    texts = Texts.of(hard_texts(reference.added_tokens))
    assert same(fast.encode(texts), reference.encode(texts))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_fast_engine_gives_the_references_ids_on_every_code_point(name: str) -> None:
    reference, fast = HfEngine(golden(name), True), FastEngine(golden(name), True)
    codes = [code for code in range(0x110000) if unicodedata.category(chr(code)) != "Cs"]
    for first in range(0, len(codes), 1 << 14):
        texts = Texts.of([f"a{chr(code)}b {chr(code)} {chr(code)}{chr(code)}\n{chr(code)}" for code in codes[first : first + (1 << 14)]])
        assert same(fast.encode(texts), reference.encode(texts)), hex(codes[first])


def test_hard_texts_hold_every_class_of_code_points_long_runs_and_every_way_to_spell_a_token() -> None:
    texts = hard_texts(["<|eos|>"])
    together = "".join(texts)
    classes = {unicodedata.category(chr(code)) for code in range(0x110000)} - {"Cs"}
    assert {unicodedata.category(character) for character in set(together)} >= classes
    assert all(texts)
    assert texts == hard_texts(["<|eos|>"])
    assert {"<|eos|>", "<|eos|><|eos|>"} <= set(texts)
    assert "\x00" in together
    assert max(map(len, texts)) > 5000


def test_texts_are_the_same_with_strings_and_without_and_however_they_are_cut() -> None:
    strings = ["é" * n + "x" for n in range(1, 50)]
    given = Texts.of(strings)
    joined = Texts.join([Texts.of(strings[:20])._array, Texts.of(["no", *strings[20:]])._array.slice(1)])
    assert joined.strings() == strings
    assert (joined.digest(), joined.nbytes, joined.sizes.tolist()) == (given.digest(), given.nbytes, given.sizes.tolist())
    for size in (1, 100, 1 << 20):
        assert [text for first, end in joined.chunks(size) for text in joined.strings(first, end)] == strings
    nothing = Texts.join([])
    assert (len(nothing), nothing.nbytes, list(nothing.chunks(10)), nothing.digest()) == (0, 0, [], Texts.of([]).digest())


def unreadable(folder: Path) -> bytes:
    """A tokenizer that the reference reads and the fast engine does not."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|bos|>", "<|eos|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return (folder / "tokenizer.json").read_bytes()


def test_a_tokenizer_that_the_fast_engine_does_not_read_is_the_references_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = unreadable(tmp_path)
    put(tmp_path / "a.jsonl", json_lines(["a b a", "b b"]))
    options = make_options(a_source(tmp_path, "a.jsonl"))
    assert (options.engine, options.tokenizer_json) == ("auto", data)
    task = UnitTask(group=manifest_of(a_source(tmp_path, "a.jsonl")).group(0), epoch=0, unit=0)
    with caplog.at_level(logging.WARNING):
        units = [UnitTokeniser(options).tokenise(task) for _ in range(2)]
    assert [unit.ids.tolist() for unit in units] == [[3, 0, 1, 0, 4, 3, 1, 1, 4]] * 2
    assert sum("does not read this tokenizer" in record.getMessage() for record in caplog.records) == 1
    with pytest.raises(RecipeError, match=r"execution\.engine='fast' cannot be used: .*does not read this tokenizer.*Use auto or hf"):
        make_options(a_source(tmp_path, "a.jsonl", more={"execution": {"engine": "fast"}}))


def test_an_engine_that_fails_the_self_check_is_never_used(caplog: pytest.LogCaptureFixture) -> None:
    for word, first in (("\x00", "plain"), ("only here", "it stands only here")):
        liar, truth = Liar(word), HfEngine(golden(), True)
        checked = Encoder(truth, lambda liar=liar: liar, tokenizer=(word, True))
        texts = Texts.of([first, "and more"])
        with caplog.at_level(logging.WARNING):
            assert same(checked.encode(texts, KEY)[0], truth.encode(texts))
            assert same(checked.encode(texts, KEY)[0], truth.encode(texts))
        assert liar.calls == 1
        assert "gives other ids than tokenizers" in caplog.text
        required = Encoder(truth, lambda liar=liar: liar, required=True, tokenizer=(word, True))
        with pytest.raises(RecipeError, match="other ids"):
            required.encode(texts, KEY)


def test_an_engine_that_goes_wrong_while_it_runs_costs_its_unit_and_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(encoder, "CHECKED_SHARE", 1)
    liar, truth = Liar("poison"), HfEngine(golden(), True)
    watched = Encoder(truth, lambda: liar)
    good, bad = Texts.of(["one text", "another"]), Texts.of(["one text", "some poison in it"])
    assert watched.encode(good, KEY)[1] is False
    encoded, remade = watched.encode(bad, KEY)
    assert (same(encoded, truth.encode(bad)), remade) == (True, True)
    assert "text 1, of source 0, epoch 0, group 7, unit 3" in caplog.text
    calls = liar.calls
    assert same(watched.encode(bad, KEY)[0], truth.encode(bad))
    assert liar.calls == calls


def test_an_engine_that_raises_is_left_like_one_that_lies() -> None:
    class Faulty(Liar):
        def encode(self, texts: Texts) -> Encoded:
            if self.calls:
                raise ValueError("out of sorts")
            return super().encode(texts)

    faulty, truth = Faulty("nowhere"), HfEngine(golden(), True)
    watched, texts = Encoder(truth, lambda: faulty), Texts.of(["one text"])
    encoded, remade = watched.encode(texts, KEY)
    assert (same(encoded, truth.encode(texts)), remade) == (True, True)
    assert watched.encode(texts, KEY)[1] is False


def test_one_document_in_five_thousand_is_checked_and_the_unit_decides_which() -> None:
    class Counting(HfEngine):
        seen: list[int]

        def encode(self, texts: Texts) -> Encoded:
            self.seen.append(len(texts))
            return super().encode(texts)

    reference, fast = Counting(golden(), True), HfEngine(golden(), True)
    reference.seen = []
    watched = Encoder(reference, lambda: fast)
    texts = Texts.of(["x"] * 20_000)
    for _ in range(2):
        watched.encode(texts, KEY)
    first, *checked = reference.seen
    assert first > 500
    assert checked == [checked[0]] * 2
    assert 1 <= checked[0] <= 12


def test_an_engine_that_is_not_installed_or_too_old_is_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zephon_ray.stages.engines.fast.version", lambda _: "0.3.2")
    with pytest.raises(EngineUnfitError, match=r"fastokens 0\.3\.2 is older than 0\.3\.5"):
        FastEngine(golden(), True)
    monkeypatch.setitem(__import__("sys").modules, "fastokens", None)
    with pytest.raises(EngineUnfitError, match="cannot be imported"):
        FastEngine(golden(), True)


def test_threads_share_one_encoder_and_load_it_once() -> None:
    with ThreadPoolExecutor(4) as pool:
        encoders = list(pool.map(lambda _: encoder_of(golden(), "some", plain=True, engine="auto"), range(8)))
        assert len({id(one) for one in encoders}) == 1
        texts = Texts.of([f"text {i}" for i in range(300)])
        expected = HfEngine(golden(), True).encode(texts)
        assert all(same(got, expected) for got, _ in pool.map(lambda _: encoders[0].encode(texts, KEY), range(8)))
    assert encoder_of(golden(), "some", plain=True, engine="hf") is not encoders[0]


def test_a_unit_made_again_is_counted_by_the_runner_and_told_in_the_audit_trail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = a_recipe(tmp_path)
    expected = produce(recipe, steps=2, runner="inline")
    monkeypatch.setattr(encoder, "CHECKED_SHARE", 1)

    def lying(data: bytes, sha256: str, *, plain: bool, engine: encoder.EngineName) -> Encoder:
        truth = HfEngine(data, plain)

        class Once(HfEngine):
            calls = 0

            def encode(self, texts: Texts) -> Encoded:
                encoded, Once.calls = super().encode(texts), Once.calls + 1
                return encoded if Once.calls == 1 else replace(encoded, ids=encoded.ids + np.uint32(1))

        return Encoder(truth, lambda: Once(data, plain), tokenizer=(f"lying {sha256}", plain))

    monkeypatch.setattr("zephon_ray.stages.tokenise.encoder_of", lying)
    found = produce(recipe, steps=2, runner="inline", out=str(tmp_path / "run"))
    assert found.chain == expected.chain
    assert found.stats is not None
    assert found.stats.remade == 1
    events = [json.loads(line) for line in (tmp_path / "run" / "audit.jsonl").read_text().splitlines()]
    assert [event["fields"] for event in events if event["event"] == "engine_fault"] == [{"remade": 1}]
