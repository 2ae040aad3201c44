"""What a recipe accepts, what it refuses and how it says so."""

from __future__ import annotations

import json
import pickle
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.recipe_cases import all_fields, changed, plain, problems, read_again, the_problem, with_weights
from zephon_ray.errors import RecipeError
from zephon_ray.recipe import Recipe, load_recipe, recipe_from_dict
from zephon_ray.recipe_fields import RecipeFields, keys_of

# ------------------------------------------------------------------ what is accepted


def test_defaults_are_those_of_the_design() -> None:
    recipe = recipe_from_dict(plain(), "/data")
    assert (recipe.shuffle.groups, recipe.shuffle.documents, recipe.shuffle.window_groups) == (True, True, 16)
    assert (recipe.unit_bytes, recipe.max_document_bytes) == (1048576, 67108864)
    assert (recipe.on_exhausted, recipe.final_batch, recipe.on_bad_record) == ("stop", "drop", "fail")
    assert (recipe.packing.algorithm, recipe.tokenizer.special_tokens_in_text) == ("wrap", "plain")
    source = recipe_from_dict(plain(sources=[{"name": "a", "uri": "a"}]), "/data").sources[0]
    assert (source.weight, source.text_field, source.format, source.epochs, source.max_bad_records) == (1, "text", None, None, None)
    execution = recipe.execution
    assert (execution.runner, execution.workers.min, execution.workers.max, execution.lane_workers) == ("ray", 1, 8, 1)
    assert (execution.prefetch_steps, execution.hot_replay_bytes, execution.token_cache) == (8, None, None)


def test_schema_is_read_as_schema_and_kept_as_schema_version() -> None:
    assert recipe_from_dict(plain(), "/data").schema_version == 1
    assert "schema_version" in problems(changed("schema_version", 1))[0]


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_the_whole_range_of_seeds_is_accepted(seed: int) -> None:
    assert recipe_from_dict(plain(seed=seed), "/data").identity()["seed"] == seed


def test_a_recipe_is_a_frozen_value_that_travels_to_workers() -> None:
    recipe = recipe_from_dict(plain(), "/data")
    travelled = pickle.loads(pickle.dumps(recipe))
    assert travelled == recipe
    assert travelled.folder == "/data"
    assert hash(travelled) == hash(recipe)
    with pytest.raises(ValidationError):
        recipe.seed = 1  # type: ignore[misc]


def test_the_mapping_given_is_not_changed() -> None:
    data, before = plain(), plain()
    recipe_from_dict(data, "/data")
    assert data == before


def test_constructing_a_recipe_directly_does_not_get_round_the_joint_checks() -> None:
    with pytest.raises(ValidationError, match="not a multiple of lanes=5"):
        Recipe.model_validate(plain(lanes=5))


# ------------------------------------------------------------------ locations


@pytest.mark.parametrize(
    ("uri", "url"),
    [
        ("web", "/data/web"),
        ("./web/", "/data/web/"),
        (".//web", "/data/web"),
        ("../web/**/*.parquet", "/data/../web/**/*.parquet"),
        ("/abs/web", "/abs/web"),
        ("a b%20+=#ü/[a-c]*.jsonl", "/data/a b%20+=#ü/[a-c]*.jsonl"),
        ("file:///abs/web", "file:///abs/web"),
        ("s3://bucket/web/*.parquet", "s3://bucket/web/*.parquet"),
        ("memory://corpus", "memory://corpus"),
        ("abfs://container@account.example.com/x", "abfs://container@account.example.com/x"),
    ],
)
def test_a_uri_is_a_path_relative_to_the_recipes_folder_or_any_url(uri: str, url: str) -> None:
    data = changed("tokenizer.path", uri, changed("execution.token_cache", uri, changed("sources[1].uri", uri)))
    recipe = recipe_from_dict(data, "/data")
    assert (recipe.source_url(1), recipe.tokenizer_url, recipe.token_cache_url) == (url, url, url)


def test_relative_paths_are_relative_to_the_file_not_to_where_one_stands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(plain()))
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("recipe.yaml")
    monkeypatch.chdir("/")
    assert recipe == load_recipe(path)
    assert recipe.source_url(0) == f"{tmp_path}/web"
    assert recipe.token_cache_url is None


def test_a_folder_may_be_a_url() -> None:
    assert recipe_from_dict(plain(), "s3://bucket/recipes/").source_url(0) == "s3://bucket/recipes/web"


def test_a_folder_whose_name_would_be_read_as_a_glob_is_refused_for_relative_sources_only() -> None:
    data = changed("sources[1].uri", "/abs/*.parquet")
    assert problems(data, "/runs/exp[1]")[0].startswith('sources[0].uri="web" is relative to /runs/exp[1]')
    assert len(problems(data, "/runs/exp[1]")) == 1
    recipe_from_dict(changed("sources[0].uri", "s3://b/web", data), "/runs/exp[1]")


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("sources[0].uri", "s3://", "names nothing after s3://"),
        ("sources[0].uri", "file://web/x", "file:///"),
        ("sources[0].uri", "", "is empty"),
        ("sources[0].uri", "a\0b", "zero byte"),
        ("tokenizer.path", "s3:///", "names nothing"),
        ("execution.token_cache", "gs://", "names nothing"),
        ("execution.storage.endpoint_url", "localhost:9000", "http"),
        ("execution.storage.endpoint_url", "ftp://host", "http"),
        ("execution.storage.endpoint_url", "http://host:port", "http"),
        ("sources[0].name", "a/b", "slash"),
    ],
)
def test_a_location_that_can_name_nothing_is_refused(path: str, value: str, said: str) -> None:
    problem = the_problem(changed(path, value))
    assert problem.startswith(f"{path}=")
    assert said in problem


@pytest.mark.parametrize("path", ["sources[0].uri", "tokenizer.path", "execution.token_cache", "execution.storage.endpoint_url"])
def test_credentials_are_refused_and_not_repeated(path: str) -> None:
    problem = the_problem(changed(path, "https://alice:hunter2@example.com/x"))
    assert problem.startswith(f"{path} holds credentials")
    assert "hunter2" not in problem


def test_a_secret_in_a_made_up_storage_key_is_not_repeated() -> None:
    problem = the_problem(changed("execution.storage.secret_key", "hunter2"))
    assert problem.startswith("execution.storage.secret_key is not a key")
    assert "environment" in problem
    assert "hunter2" not in problem


# ------------------------------------------------------------------ single fields


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("lanes", "8", "Write 8"),
        ("lanes", True, "is a boolean, not a whole number"),
        ("lanes", 1.0, "Write 1"),
        ("lanes", 1.5, "Write digits only"),
        ("lanes", float("nan"), "Write digits only"),
        ("lanes", "1e3", "Write 1000"),
        ("lanes", "eight", "Write digits only"),
        ("lanes", None, "is empty (null)"),
        ("lanes", [4], "is a list"),
        ("lanes", 0, "Write at least 1"),
        ("lanes", 2**31, "Write at most 2147483647"),
        ("seed", -1, "Write at least 0"),
        ("seed", 2**64, "Write at most 18446744073709551615"),
        pytest.param("seed", 10**6000, "an integer of", id="seed-huge"),
        ("seed", "0", "Write 0"),
        ("sequence_length", 0, "Write at least 1"),
        ("sequence_length", 2**31, "Write at most 2147483647"),
        ("global_batch_size", -8, "Write at least 1"),
        ("unit_bytes", 0, "Write at least 1"),
        ("unit_bytes", "1MiB", "Write digits only"),
        ("max_document_bytes", 0, "Write at least 1"),
        ("name", 7, "is a whole number, not text. Put the value in quotes"),
        ("name", "", "is empty"),
        ("name", "\ud800", "UTF-8"),
        ("tokenizer.bos", True, "is a boolean, not text"),
        ("tokenizer.bos", "", "is empty"),
        ("tokenizer.special_tokens_in_text", "Plain", 'did you mean "plain"?'),
        ("tokenizer", "tokenizer.json", "is text, not a mapping"),
        ("sources", {}, "is a mapping, not a list"),
        ("sources", [], "is empty"),
        ("sources", None, "not a list"),
        ("sources[1]", "web", "is text, not a mapping"),
        ("sources[1].epochs", 0, "Write at least 1"),
        ("sources[1].epochs", 1.0, "Write 1"),
        ("sources[1].unit_bytes", 0, "Write at least 1"),
        ("sources[1].window_groups", 0, "Write at least 1"),
        ("sources[1].max_bad_records", -1, "Write at least 0"),
        ("sources[1].format", "json", 'did you mean "jsonl"?'),
        ("sources[1].text_field", 3, "is a whole number, not text"),
        ("shuffle", None, "leave it out"),
        ("shuffle.groups", "no", "Write true or false"),
        ("shuffle.documents", 1, "Write true or false"),
        ("shuffle.window_groups", True, "is a boolean"),
        ("packing.algorithm", "best-fit", 'did you mean "best_fit"?'),
        ("packing.max_document_tokens", 0, "Write at least 1"),
        ("packing.max_document_tokens", 2**34, "Write at most"),
        ("packing.buffer", 0, "Write at least 1"),
        ("on_exhausted", "halt", "'stop' or 'continue'"),
        ("final_batch", True, "'drop' or 'pad'"),
        ("on_bad_record", None, "'fail' or 'skip'"),
        ("execution.runner", "thread", 'did you mean "threads"?'),
        ("execution.workers", 4, "is a whole number, not a mapping"),
        ("execution.workers.min", 0, "Write at least 1"),
        ("execution.lane_workers", 0, "Write at least 1"),
        ("execution.prefetch_steps", -1, "Write at least 0"),
        ("execution.hot_replay_bytes", 0, "Write at least 1"),
        ("execution.storage.anonymous", "false", "Write true or false"),
        ("schema", 2, "reads schema: 1 only"),
        ("schema", "1", "reads schema: 1 only"),
        ("schema", True, "reads schema: 1 only"),
        ("schema", 1.0, "reads schema: 1 only"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path_and_how_to_mend_it(path: str, value: Any, said: str) -> None:
    found = problems(changed(path, value))
    assert found[0].startswith(f"{path}="), found
    assert said in found[0], found


@pytest.mark.parametrize("key", ["schema", "name", "seed", "lanes", "sequence_length", "global_batch_size", "tokenizer", "sources"])
def test_a_missing_field_is_named(key: str) -> None:
    data = plain()
    del data[key]
    assert the_problem(data).startswith(f"{key} is missing. ")


def test_a_missing_schema_says_what_this_version_reads() -> None:
    data = plain()
    del data["schema"]
    assert "Write schema: 1" in the_problem(data)


def test_a_missing_field_of_a_source_is_named_with_its_path() -> None:
    assert the_problem(plain(sources=[{"name": "a"}])).startswith("sources[0].uri is missing. ")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("lane", 'Did you mean "lanes"?'),
        ("packing.algoritm", 'Did you mean "algorithm"?'),
        ("sources[1].wieght", 'Did you mean "weight"?'),
        ("algorithm", "Did you mean packing.algorithm?"),
        ("special_tokens_in_text", "Did you mean tokenizer.special_tokens_in_text?"),
        ("execution.zzz", "The keys of execution are runner, engine, workers"),
        ("zzz", "The keys of a recipe are schema, name"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(path: str, said: str) -> None:
    problem = the_problem(changed(path, 3))
    assert problem.startswith(f"{path}=3 is not a key")
    assert said in problem


def test_a_key_that_is_not_text_is_refused() -> None:
    assert "the key true" in the_problem({**plain(), True: 1})


@pytest.mark.parametrize("data", [None, [], "text", 7, [plain()]])
def test_what_is_no_mapping_is_refused(data: Any) -> None:
    assert "not a mapping" in the_problem(data)


# ------------------------------------------------------------------ weights


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (0, "not above 0"),
        (0.0, "not above 0"),
        (-0.5, "not above 0"),
        (float("nan"), "not finite"),
        (float("inf"), "not finite"),
        (float("-inf"), "not finite"),
        ("0.5", "Write 0.5"),
        ("1e-3", "Write 0.001"),
        ("5E+6", "Write 5000000"),
        ("1e99999999", "is text"),
        ("half", "is text"),
        (True, "is not a number"),
        (None, "is not a number"),
        ([1], "is not a number"),
    ],
)
def test_a_weight_that_is_no_positive_number_is_refused(weight: Any, said: str) -> None:
    problem = the_problem(changed("sources[1].weight", weight))
    assert problem.startswith("sources[1].weight=")
    assert said in problem


def test_a_weight_below_a_16384th_of_the_sum_is_refused_and_the_least_is_told() -> None:
    recipe_from_dict(with_weights(1, 16383), "/data")
    problem = the_problem(with_weights(1, 16384))
    assert problem.startswith("sources[0].weight=1 is less than 2^-14")
    least = problem.split("Use at least ")[1].split(",")[0]
    recipe_from_dict(with_weights(float(least), 16384), "/data")


def test_extreme_weights_are_compared_exactly() -> None:
    assert len(problems(with_weights(5e-324, 1.7e308, 1e300))) == 2
    assert recipe_from_dict(with_weights(1e300, 10**300), "/data").shares() == (1 << 19, 1 << 19)
    huge = 10**400
    assert recipe_from_dict(with_weights(huge, huge + 1), "/data").identity()["sources"][1]["weight"] == str(huge + 1)


@pytest.mark.parametrize(
    ("weight", "text"),
    [(2, "2"), (2.0, "2"), (0.30, "0.3"), (100, "100"), (1e22, "1" + "0" * 22), (1e-7, "0.0000001"), (0.1 + 0.2, "0.30000000000000004")],
)
def test_a_weight_is_the_decimal_that_repr_prints_without_exponent_or_idle_zeros(weight: float, text: str) -> None:
    recipe = recipe_from_dict(with_weights(weight, weight), "/data")
    assert recipe.sources[0].weight == Decimal(text)
    assert recipe.identity()["sources"][0]["weight"] == text


@given(st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False) | st.integers(1, 10**40))
def test_every_weight_survives_the_canonical_form_exactly(weight: float) -> None:
    recipe = recipe_from_dict(with_weights(weight), "/data")
    (text,) = (source["weight"] for source in recipe.identity()["sources"])
    assert "e" not in text.lower()
    assert (float(text) if isinstance(weight, float) else int(text)) == weight
    assert read_again(recipe).identity() == recipe.identity()


def test_shares_round_halves_up_in_exact_arithmetic() -> None:
    def shares(*weights: float) -> tuple[int, ...]:
        return recipe_from_dict(with_weights(*weights), "/data").shares()

    assert shares(0.7, 0.3) == (734003, 314573)
    assert shares(5) == (1 << 20,)
    assert shares((1 << 20) + 1, (1 << 20) - 1) == (524289, 524288)
    assert shares(0.1, 0.2, 0.7) == shares(1, 2, 7)


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=8))
def test_shares_are_within_half_a_2_20th_of_the_weights(weights: list[int]) -> None:
    if min(weights) * 16384 < sum(weights):
        return
    for weight, share in zip(weights, recipe_from_dict(with_weights(*weights), "/data").shares(), strict=True):
        assert -Fraction(1, 2) < share - Fraction(weight * (1 << 20), sum(weights)) <= Fraction(1, 2)


# ------------------------------------------------------------------ fields together


def test_lanes_must_divide_the_batch_and_the_nearest_of_both_are_told() -> None:
    problem = the_problem(plain(lanes=4, global_batch_size=10))
    assert problem.startswith("global_batch_size=10 is not a multiple of lanes=4.")
    assert "global_batch_size 8 or 12" in problem
    assert "lanes 2 or 5" in problem


def test_more_lanes_than_rows_are_refused_without_a_batch_of_zero_for_advice() -> None:
    assert "Use global_batch_size 4, or lanes 1 (" in the_problem(plain(lanes=4, global_batch_size=1))


def test_a_large_prime_batch_is_answered_at_once() -> None:
    assert "lanes 1 or 2147483647" in the_problem(plain(lanes=4, global_batch_size=2**31 - 1))


def test_two_sources_of_one_name_are_refused() -> None:
    problem = the_problem(changed("sources[1].name", "web"))
    assert problem.startswith('sources[1].name="web" is the name of sources[0] too.')


def test_best_fit_needs_a_pad_token() -> None:
    data = changed("packing.algorithm", "best_fit", changed("tokenizer.pad", None))
    assert the_problem(data).startswith("tokenizer.pad=null")


def test_an_option_that_does_nothing_is_refused() -> None:
    assert the_problem(changed("packing.buffer", 64)).startswith('packing.buffer=64 does nothing with packing.algorithm="wrap"')
    problem = the_problem(changed("sources[1].max_bad_records", 5))
    assert problem.startswith('sources[1].max_bad_records=5 does nothing with on_bad_record="fail"')
    recipe_from_dict(changed("on_bad_record", "skip", changed("sources[1].max_bad_records", 5)), "/data")
    recipe_from_dict(changed("packing", {"algorithm": "best_fit", "buffer": 64}), "/data")


def test_least_workers_above_most_are_refused() -> None:
    assert the_problem(changed("execution.workers", {"min": 3, "max": 2})).startswith("execution.workers.min=3 is above")
    assert the_problem(changed("execution.workers", {"min": 9})).endswith("Lower min to 8, or raise max to 9")


def test_all_problems_are_told_at_once_those_of_single_fields_and_of_fields_together() -> None:
    data = plain(lanes=5, seed="x", nonsense=1, packing={"buffer": 3})
    data["sources"] = [
        {"name": "web", "uri": 3},
        {"name": "web", "uri": "x", "max_bad_records": 1},
        7,
        {"name": "tiny", "uri": "x", "weight": 0.00001},
    ]
    starts = (
        "seed=",
        "sources[0].uri=3",
        "sources[2]=7",
        "nonsense=1",
        "global_batch_size=24",
        'sources[1].name="web"',
        "packing.buffer=3",
        "sources[1].max_bad_records=1",
    )
    found = problems(data)
    assert len(found) == len(starts)
    for start in starts:
        assert any(problem.startswith(start) for problem in found), (start, found)
    assert str(RecipeError(found)) == "\n".join(found)


@pytest.mark.parametrize(
    ("broken", "hidden"),
    [("lanes", "global_batch_size="), ("packing", "packing.buffer="), ("on_bad_record", "sources[0].max_bad_records=")],
)
def test_a_check_of_fields_together_stays_silent_where_one_of_them_is_broken(broken: str, hidden: str) -> None:
    data = plain(lanes=5, packing={"buffer": 3})
    data["sources"][0]["max_bad_records"] = 1
    assert any(problem.startswith(hidden) for problem in problems(data))
    assert not any(problem.startswith(hidden) for problem in problems({**data, broken: "?"}))


# ------------------------------------------------------------------ data-parallel sizes


def test_every_size_that_divides_the_batch_is_legal_and_no_other() -> None:
    recipe = recipe_from_dict(plain(), "/data")
    assert recipe.legal_dp_sizes() == [1, 2, 3, 4, 6, 8, 12, 24]
    for size in recipe.legal_dp_sizes():
        for rank in range(size):
            recipe.check_dp(rank, size)


@pytest.mark.parametrize(
    ("size", "use"), [(5, "Use 4 or 6 "), (7, "Use 6 or 8 "), (16, "Use 12 or 24 "), (48, "Use 24 "), (0, "Use 1 "), (-4, "Use 1 ")]
)
def test_a_size_that_does_not_divide_is_refused_with_the_legal_ones(size: int, use: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_from_dict(plain(), "/data").check_dp(0, size)
    (problem,) = caught.value.problems
    assert problem.startswith(f"dp_world_size={size} cannot share the rows of global_batch_size=24")
    assert use in problem
    assert "1, 2, 3, 4, 6, 8, 12, 24" in problem


@pytest.mark.parametrize(("rank", "size"), [(4, 4), (-1, 4), (True, 4), (0.0, 4), ("0", 4), (None, 4), (0, True), (0, "4"), (0, 4.0)])
def test_a_rank_that_is_none_is_refused(rank: Any, size: Any) -> None:
    with pytest.raises(RecipeError, match="dp_"):
        recipe_from_dict(plain(), "/data").check_dp(rank, size)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.dates(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from([*all_fields(), "schema", "x"]) | st.integers(), inner, max_size=3)
        ),
        max_leaves=6,
    ),
    st.sampled_from(["", *keys_of(RecipeFields), "sources[0]", *(f for f in all_fields() if "." in f)]),
)
@settings(max_examples=200)
def test_whatever_is_put_anywhere_gives_a_recipe_or_a_recipe_error(value: Any, path: str) -> None:
    try:
        recipe_from_dict(changed(path, value) if path else value, "/data").identity()
    except RecipeError as error:
        said = error.problems
    else:
        return
    assert said
    assert all("\n" not in problem for problem in said)
