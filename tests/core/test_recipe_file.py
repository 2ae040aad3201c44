"""Recipe files: YAML without its traps, overrides, and recipes written out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recipe_cases import all_fields, changed, plain, read_again
from zephon_ray.errors import RecipeError
from zephon_ray.recipe import load_recipe, recipe_from_dict
from zephon_ray.recipe_yaml import read_yaml

BASE = plain(packing={"algorithm": "best_fit"}, on_bad_record="skip")


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def written(text: str | bytes) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return written


# ------------------------------------------------------------------ the file


def test_the_recipe_of_the_design_loads(write: Any) -> None:
    text = """
schema: 1
name: web-and-code
seed: 42
lanes: 8                      # logical streams
sequence_length: 2048
global_batch_size: 64
tokenizer: {path: tokenizer.json, bos: "<|bos|>", eos: "<|eos|>", pad: "<|pad|>", special_tokens_in_text: plain}
sources:
  - {name: web,  uri: "s3://bucket/web/**/*.parquet", text_field: text, weight: 0.7}
  - {name: code, uri: data/code, format: jsonl, weight: 0.3, epochs: 4}
shuffle: {groups: true, documents: true, window_groups: 16}
packing: {algorithm: wrap}
unit_bytes: 1048576
max_document_bytes: 67108864
on_exhausted: stop
final_batch: drop
on_bad_record: fail
execution:
  runner: ray
  workers: {min: 1, max: 8}
  lane_workers: 1
  prefetch_steps: 8
  hot_replay_bytes: null
  token_cache: null
  storage: {endpoint_url: null, anonymous: false}
"""
    recipe = load_recipe(write(text))
    assert recipe.shares() == (734003, 314573)
    assert recipe.execution.runner == "ray"
    assert load_recipe(write(b"\xef\xbb\xbf" + text.encode())) == recipe


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("# only words\n", "is empty"),
        ("- a\n", "not a mapping"),
        ("a: 1\nb: [1,\n", "line 3"),
        ("a: 1\n b: 2\n", "line 2, column 3"),
        ("a: 1\n---\nb: 2\n", "line 2"),
        ("a: *b\n", "line 1"),
        ("a: !!python/object:os.system {}\n", "line 1"),
        ("a: \x07\n", "not allowed"),
        (b"name: \xff\n", "not UTF-8 at byte 6"),
        ("a: 2024-13-45\n", "cannot be read"),
        ("seed: " + "9" * 5000, "cannot be read"),
        ("a: " + "[" * 600, "cannot be read"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_with_the_place(write: Any, text: str | bytes, said: str) -> None:
    path = write(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    (problem,) = caught.value.problems
    assert said in problem
    assert problem.startswith(str(path)) or said == "not a mapping"


def test_a_file_that_cannot_be_opened_is_a_recipe_error(tmp_path: Path) -> None:
    for path, said in [(tmp_path / "none.yaml", "No such file"), (tmp_path, "directory"), ("s3://bucket/recipe.yaml", "local files only")]:
        with pytest.raises(RecipeError, match=said):
            load_recipe(path)


def test_a_key_written_twice_is_refused_with_both_lines_beside_all_other_problems(write: Any) -> None:
    text = "schema: 1\nname: a\nseed: 1\nlanes: 2\nlanes: 4\nshuffle: {groups: true,\n  groups: false}\nsequence_length: x\n"
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(text))
    found = caught.value.problems
    assert any(problem.startswith("lanes is written twice in one mapping, on line 4 and on line 5.") for problem in found)
    assert any(problem.startswith("groups is written twice in one mapping, on line 6 and on line 7.") for problem in found)
    assert any(problem.startswith("sequence_length=") for problem in found)
    assert any(problem.startswith("sources is missing") for problem in found)


def test_merged_mappings_are_refused_and_aliases_are_not() -> None:
    _, found = read_yaml("a: &a {x: 1}\nb: {<<: *a, x: 3}\n", "here")
    assert len(found) == 1
    assert found[0].startswith("<< on line 2 merges mappings")
    assert read_yaml("a: &a {x: 1}\nb: *a\n", "here") == ({"a": {"x": 1}, "b": {"x": 1}}, [])


@pytest.mark.parametrize("text", ["010", "1:30", "+1:30:00", "-017", "1:30.5"])
def test_a_number_that_yaml_reads_in_another_base_is_refused(text: str) -> None:
    _, found = read_yaml(f"lanes: {text}", "here")
    assert found
    assert found[0].startswith(f"{text} on line 1")
    assert read_yaml(f'lanes: "{text}"', "here") == ({"lanes": text}, [])


def test_plain_numbers_are_left_alone() -> None:
    assert read_yaml("[0, 10, -3, 0.5, 00.5, 1.0e-3, 0x10, 1_000]", "here") == ([0, 10, -3, 0.5, 0.5, 0.001, 16, 1000], [])


# ------------------------------------------------------------------ overrides


def test_overrides_set_fields_by_key_index_and_name_of_the_source(write: Any) -> None:
    data = changed("sources[1].name", "code.py")
    recipe = load_recipe(
        write(json.dumps(data)),
        [
            "lanes=2",
            "lanes=8",
            "sources[0].weight=0.5",
            "sources.code.py.weight=2",
            "sources.code.py.uri=s3://b/x=y/*.parquet",
            "shuffle.window_groups=3",
            "execution.workers.max=2",
            "tokenizer.bos=null",
        ],
    )
    assert recipe.lanes == 8
    assert [str(source.weight) for source in recipe.sources] == ["0.5", "2"]
    assert recipe.sources[1].uri == "s3://b/x=y/*.parquet"
    assert (recipe.shuffle.window_groups, recipe.execution.workers.max, recipe.tokenizer.bos) == (3, 2, None)


def test_an_override_can_mend_a_field_or_add_a_missing_one(write: Any) -> None:
    data = plain(lanes="x", shuffle=None)
    del data["seed"]
    recipe = load_recipe(write(json.dumps(data)), ["lanes=4", "seed=7", "shuffle.groups=false"])
    assert (recipe.lanes, recipe.seed, recipe.shuffle.groups) == (4, 7, False)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("lanes", "without a value"),
        ("=3", "is not a path"),
        ("a..b=3", "is not a path"),
        ("sources[x].weight=3", "is not a path"),
        ("sources[2].weight=3", "there is no entry 2. It has 2 entries"),
        ("sources.cod.weight=3", "The names are: web, code"),
        ("lanes[0]=3", "there is no entry 0"),
        ("lanes.x=3", "no mapping that could hold x"),
        ("tokenizer.bos=[", "not YAML"),
        ("lanes=010", "another base"),
        ("lanes=eight", 'lanes="eight" is text, not a whole number'),
        ("lane=4", 'Did you mean "lanes"?'),
        ("sources.web.wieght=0.5", 'sources[0].wieght=0.5 is not a key that is known. Did you mean "weight"?'),
        ("tokenizer.bos=[BOS]", "is a list, not text. Put the value in quotes"),
        ("lanes=", "lanes=null is empty (null)"),
    ],
)
def test_an_override_that_cannot_be_is_refused(write: Any, override: str, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(json.dumps(plain())), [override])
    (problem,) = caught.value.problems
    assert said in problem


def test_a_name_that_two_sources_have_cannot_be_overridden_by_name(write: Any) -> None:
    data = json.dumps(changed("sources[1].name", "web"))
    with pytest.raises(RecipeError, match="2 sources are named web"):
        load_recipe(write(data), ["sources.web.weight=1"])
    assert load_recipe(write(data), ["sources[1].name=code"]).sources[1].name == "code"


# ------------------------------------------------------------------ written out


def test_a_recipe_written_out_is_complete_and_loads_from_any_folder() -> None:
    recipe = recipe_from_dict(BASE, "/data")
    again = read_again(recipe)
    assert again.identity() == recipe.identity()
    assert (again.source_url(1), again.tokenizer_url) == ("/data/code/*.parquet", "/data/tokenizer.json")
    assert again.execution == recipe.execution
    assert read_again(again) == again
    lines = recipe.to_yaml()
    for path in all_fields():
        assert f"{path.rpartition('.')[2]}:" in lines


def test_no_fill_is_written_for_wrap_where_it_would_be_refused() -> None:
    assert read_again(recipe_from_dict(plain(), "/data")).packing.buffer is None


@settings(max_examples=60)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1), weights=st.lists(st.floats(0.1, 100), min_size=1, max_size=4))
def test_any_text_and_weight_survive_being_written_out(text: str, weights: list[float]) -> None:
    data = plain(name=text, tokenizer={"path": "t.json", "eos": text})
    data["sources"] = [{"name": f"s{i}", "uri": "x", "weight": w, "text_field": text} for i, w in enumerate(weights)]
    recipe = recipe_from_dict(data, "/data")
    again = read_again(recipe)
    assert again.identity() == recipe.identity()
    assert again.name == recipe.name
