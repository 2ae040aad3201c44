"""A state restores what it was saved from, and nothing else: damage and foreign runs are refused, and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.golden_cases import GOLDEN
from tests.small import a_recipe, documents, write_lines
from zephon_ray.errors import BadRecordError, StateError
from zephon_ray.hashing import canonical_json, sha256_hex
from zephon_ray.loader import STATE_KEY, Loader
from zephon_ray.recipe import Recipe

TWO = {"a": {"weight": 0.7}, "b": {"weight": 0.3}}


def state_of(recipe: Recipe, steps: int = 3) -> dict[str, bytes]:
    with Loader(recipe) as loader:
        for _ in range(steps):
            next(loader)
        return loader.state_dict()


def refused(recipe: Recipe, state: dict[str, bytes] | bytes) -> str:
    with pytest.raises(StateError) as error, Loader(recipe, state=state) as loader:
        next(loader)
    return str(error.value)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, bytes]:
    recipe = a_recipe(tmp_path_factory.mktemp("state"), TWO)
    return recipe, state_of(recipe)[STATE_KEY]


def test_a_restored_loader_saves_the_same_bytes_at_once_and_after_close(saved: tuple[Recipe, bytes]) -> None:
    recipe, state = saved
    loader = Loader(recipe, state=state)
    assert loader.state_dict() == {STATE_KEY: state}
    loader.close()
    assert loader.state_dict() == {STATE_KEY: state}


def test_a_state_before_the_first_batch_restores_to_the_beginning(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path)
    with Loader(recipe) as fresh:
        start = fresh.state_dict()
        digests = [next(fresh).digest for _ in range(4)]
    with Loader(recipe, state=start) as again:
        assert [next(again).digest for _ in range(4)] == digests


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_is_refused(saved: tuple[Recipe, bytes], at: int, bit: int) -> None:
    recipe, state = saved
    damaged = bytearray(state)
    damaged[at % len(state)] ^= 1 << bit
    assert "damaged" in refused(recipe, bytes(damaged))


@given(end=st.integers(0, 10_000))
def test_a_cut_state_is_refused(saved: tuple[Recipe, bytes], end: int) -> None:
    recipe, state = saved
    assert "damaged" in refused(recipe, state[: end % len(state)])


@pytest.mark.parametrize("foreign", [{}, {"step": 3}, {STATE_KEY: "text"}, {STATE_KEY: None}])
def test_what_is_no_state_is_refused_and_the_key_is_named(saved: tuple[Recipe, bytes], foreign: dict[str, object]) -> None:
    with pytest.raises(StateError, match=STATE_KEY):
        Loader(saved[0], state=foreign)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"null", b"\xff", b'{"state":{},"checksum":""}', b'{"state":[],"checksum":1}', b"[" * 100_000]
)
def test_foreign_bytes_are_refused(saved: tuple[Recipe, bytes], data: bytes) -> None:
    assert "damaged" in refused(saved[0], data)


def test_another_contract_version_is_refused_and_both_are_named(saved: tuple[Recipe, bytes]) -> None:
    body = json.loads(saved[1])["state"] | {"contract": 2}
    message = refused(saved[0], canonical_json({"state": body, "checksum": sha256_hex(canonical_json(body))}))
    assert "contract 2" in message
    assert "contract 1" in message


CHANGES = {
    "seed": ({"seed": 8}, "seed (now 8)"),
    "lanes": ({"lanes": 4}, "lanes (now 4)"),
    "sequence_length": ({"sequence_length": 16}, "sequence_length (now 16)"),
    "unit_bytes": ({"unit_bytes": 1024}, "unit_bytes (now 1024)"),
    "specials": ({"tokenizer": {"path": str(GOLDEN / "tokenizer.json"), "eos": "<|eos|>"}}, "tokenizer.bos"),
    "packing": ({"packing": {"algorithm": "best_fit"}}, "packing.algorithm (now 'best_fit')"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_recipe_is_refused_and_each_field_is_named(tmp_path: Path, name: str) -> None:
    state = state_of(a_recipe(tmp_path, TWO))
    over, named = CHANGES[name]
    assert named in refused(a_recipe(tmp_path, TWO, **over), state)


def test_changed_weights_and_sources_are_named(tmp_path: Path) -> None:
    state = state_of(a_recipe(tmp_path, TWO))
    assert "sources[1].weight (now '0.4')" in refused(a_recipe(tmp_path, {"a": {"weight": 0.7}, "b": {"weight": 0.4}}), state)
    message = refused(a_recipe(tmp_path, {"a": {"weight": 0.7}}), state)
    assert "now 1 of them, 2 in the state" in message


def test_a_changed_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tok.json").write_bytes((GOLDEN / "tokenizer.json").read_bytes())
    tokenizer = {"path": "tok.json", "bos": "<|bos|>", "eos": "<|eos|>", "pad": "<|pad|>"}
    state = state_of(a_recipe(tmp_path, TWO, tokenizer=tokenizer))
    (tmp_path / "tok.json").write_bytes((GOLDEN / "tokenizer.json").read_bytes() + b"\n")
    assert "tokenizer" in refused(a_recipe(tmp_path, TWO, tokenizer=tokenizer), state)


@pytest.mark.parametrize("change", ["added", "removed", "renamed", "grown"])
def test_changed_data_is_refused_and_its_source_is_named(tmp_path: Path, change: str) -> None:
    recipe = a_recipe(tmp_path, TWO)
    state = state_of(recipe)
    file = tmp_path / "b" / "1.jsonl"
    if change == "added":
        write_lines(tmp_path / "b" / "3.jsonl", documents(5))
    elif change == "removed":
        file.unlink()
    elif change == "renamed":
        file.rename(tmp_path / "b" / "9.jsonl")
    else:
        file.write_bytes(file.read_bytes() + b"\n")
    message = refused(recipe, state)
    assert "sources[1].manifest" in message
    assert "sources[0]" not in message


def test_moved_data_is_accepted_since_where_it_lies_is_no_part_of_the_identity(tmp_path: Path) -> None:
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    recipes = [a_recipe(tmp_path / folder, TWO, name=folder) for folder in ("here", "there")]
    with Loader(recipes[0]) as loader:
        digests = [next(loader).digest for _ in range(6)]
    with Loader(recipes[1], state=state_of(recipes[0])) as loader:
        assert [next(loader).digest for _ in range(3)] == digests[3:]


def test_many_sources_and_one_lane_stay_within_the_bound(tmp_path: Path) -> None:
    sources = {f"s{n:02}": {"weight": 1 + n / 7} for n in range(40)}
    recipe = a_recipe(tmp_path, sources, lanes=1, global_batch_size=3)
    with Loader(recipe) as loader:
        for _ in range(25):
            next(loader)
            assert len(loader.state_dict()[STATE_KEY]) <= 2048 + 64 * len(sources)


def test_the_state_does_not_grow_with_steps_or_with_files(tmp_path: Path) -> None:
    sizes = []
    for files in (3, 60):
        folder = tmp_path / str(files)
        for n in range(files):
            write_lines(folder / "a" / f"{n:03}.jsonl", documents(4, seed=n))
        recipe = a_recipe(folder)
        with Loader(recipe) as loader:
            for batch in loader:
                if batch.step in (10, 400):
                    sizes.append(len(loader.state_dict()[STATE_KEY]))
                if batch.step == 400:
                    break
    assert max(sizes) - min(sizes) < 200, sizes


def forged(state: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The state with a change, and with the checksum that fits it."""
    body = json.loads(state)["state"]
    change(body)
    return canonical_json({"state": body, "checksum": sha256_hex(canonical_json(body))})


def put(*path: str | int, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        at: Any = body
        for name in path[:-1]:
            at = at[name]
        at[path[-1]] = to(at[path[-1]]) if callable(to) else to

    return change


FORGED: dict[str, Callable[[dict[str, Any]], None]] = {
    "chain of one byte": put("chain", to="00"),
    "no source": put("sources", to=lambda s: {name: [] for name in s}),
    "a source too many": put("sources", to=lambda s: {name: [*column, column[0]] for name, column in s.items()}),
    "sources that are no mapping": put("sources", to=[1]),
    "unknown key": lambda body: body.update(more=1),
    "contract true": put("contract", to=True),
    "slots without end": put("sources", "slots", 0, to=[2**61, 0, 0]),
    "slots of no length": put("sources", "slots", 0, to=lambda s: [0, 0, 0, *s]),
    "a unit that is not there": put("sources", "slots", 0, 2, to=5),
    "a group that is not there": put("sources", "slots", 0, 1, to=10**6),
    "another window": put("sources", "window", 0, to=lambda w: w + 1),
    "a lane far ahead": put("sources", "windows", 0, 1, to=lambda w: w + 10**7),
    "all lanes ahead": put("sources", "windows", 0, to=lambda w: [x + 1 for x in w]),
    "an index that is not there": put("sources", "indices", 0, 0, to=10**9),
    "a count too large": put("sources", "counts", 0, 0, to=2**50),
    "counts of nothing": put("sources", "counts", 0, to=lambda c: [0] * len(c)),
    "dealt without end": put("sources", "dealt", 0, 0, to=10**9),
    "dealt without a least": put("sources", "dealt", 0, to=lambda d: [x + 5 for x in d]),
    "more used than a piece has": put("open_used", 0, to=10**7),
    "open in no source": put("open_source", 0, to=99),
    "other run, damaged fields": lambda body: body.update(fingerprint="0" * 64, fields="abcde"),
    "other run, no sources": lambda body: body.update(fingerprint="0" * 64, fields="", sources=5),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_state_that_cannot_be_is_refused_though_its_checksum_fits(saved: tuple[Recipe, bytes], name: str) -> None:
    refused(saved[0], forged(saved[1], FORGED[name]))


def test_data_whose_documents_changed_in_length_does_not_fit_the_state(tmp_path: Path) -> None:
    """A loader has no ledger to compare texts with; but the pairs before a lane's place must be those that its count holds."""
    file = write_lines(tmp_path / "a" / "0.jsonl", documents(60))
    recipe = a_recipe(tmp_path, {"a": {"window_groups": 1}}, unit_bytes=65536)
    state = state_of(recipe, 12)
    text = file.read_text()
    file.write_text(text.replace("w", "w ", 40).replace("w", "", 20)[: len(text)].ljust(len(text)))
    with pytest.raises((StateError, BadRecordError)), Loader(recipe, state=state) as loader:
        next(loader)
