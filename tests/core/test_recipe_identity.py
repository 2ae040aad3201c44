"""What follows from a recipe, and what its identity is made of."""

from __future__ import annotations

from typing import Any

import pytest

from tests.recipe_cases import SHA, all_fields, changed, plain
from zephon_ray.hashing import canonical_json, sha256_hex
from zephon_ray.recipe import fingerprint, fingerprint_fields, recipe_from_dict

BASE = plain(packing={"algorithm": "best_fit"}, on_bad_record="skip")
# If this has to change, every checkpoint there is would be refused: that is contract version 2.
PINNED = "159df6e1b25719e389f6b505e7edd8916c0372d0bd2cf46838e84ea8b8037127"


# ------------------------------------------------------------------ values that follow from others


@pytest.mark.parametrize(
    ("packing", "pairs"),
    [
        ({}, 1024),
        ({"max_document_tokens": 5}, 5),
        ({"max_document_tokens": 5000}, 5000),
        ({"algorithm": "best_fit"}, 128),
        ({"algorithm": "best_fit", "max_document_tokens": 5}, 5),
        ({"algorithm": "best_fit", "max_document_tokens": 5000}, 128),
    ],
)
def test_the_longest_piece_is_eight_rows_and_one_with_best_fit(packing: dict[str, Any], pairs: int) -> None:
    recipe = recipe_from_dict(plain(packing=packing), "/data")
    assert recipe.max_piece_pairs == pairs
    assert recipe.identity()["packing"]["max_document_tokens"] == pairs


@pytest.mark.parametrize(("lanes", "pieces"), [(1, 1024), (64, 1024), (80, 819), (2048, 32), (65536, 32)])
def test_a_fill_is_65536_pieces_over_all_lanes_within_bounds(lanes: int, pieces: int) -> None:
    data = plain(lanes=lanes, global_batch_size=lanes * 3, packing={"algorithm": "best_fit"})
    recipe = recipe_from_dict(data, "/data")
    assert recipe.fill_pieces == pieces
    assert recipe.identity()["packing"]["buffer"] == pieces
    assert recipe.rows_per_lane == 3
    assert recipe_from_dict(changed("packing.buffer", 7, data), "/data").fill_pieces == 7


def test_a_source_has_its_own_units_and_slots_or_the_recipes() -> None:
    data = plain(unit_bytes=100, shuffle={"window_groups": 5})
    data["sources"][1] |= {"unit_bytes": 200, "window_groups": 6}
    recipe = recipe_from_dict(data, "/data")
    assert [recipe.unit_bytes_of(i) for i in range(2)] == [100, 200]
    assert [recipe.window_groups_of(i) for i in range(2)] == [5, 6]
    assert [s["window_groups"] for s in recipe.identity()["sources"]] == [5, 6]


# ------------------------------------------------------------------ identity

WHERE_AND_HOW = {
    "name": "other",
    "tokenizer.path": "s3://elsewhere/t.json",
    "sources[0].uri": "s3://elsewhere/x",
    "execution.runner": "inline",
    "execution.engine": "hf",
    "execution.workers.min": 2,
    "execution.workers.max": 99,
    "execution.workers.num_cpus": 2.5,
    "execution.workers.resources": {"tokeniser": 1},
    "execution.workers.labels": {"pool": "cpu"},
    "execution.stall_seconds": 7,
    "execution.lane_workers": 3,
    "execution.prefetch_steps": 0,
    "execution.hot_replay_bytes": 1,
    "execution.token_cache": "cache",
    "execution.token_cache_bytes": 1 << 20,
    "execution.storage.endpoint_url": "http://localhost:9000",
    "execution.storage.region": "here",
    "execution.storage.anonymous": True,
    "execution.storage.max_tries": 3,
    "execution.storage.retry_seconds": 7,
}
"""Fields that are no part of the identity, each with another value than in ALL_FIELDS."""

WHAT = {
    "seed": 43,
    "lanes": 8,
    "sequence_length": 64,
    "global_batch_size": 48,
    "tokenizer.bos": None,
    "tokenizer.eos": "<b>",
    "tokenizer.pad": "<b>",
    "tokenizer.special_tokens_in_text": "control",
    "sources[0].name": "other",
    "sources[0].format": "jsonl",
    "sources[0].text_field": "body",
    "sources[0].weight": 0.71,
    "sources[0].epochs": 1,
    "sources[0].unit_bytes": 77,
    "sources[0].window_groups": 7,
    "sources[0].max_bad_records": 0,
    "shuffle.groups": False,
    "shuffle.documents": False,
    "shuffle.window_groups": 15,
    "packing.algorithm": "wrap",
    "packing.max_document_tokens": 100,
    "packing.buffer": 33,
    "unit_bytes": 78,
    "max_document_bytes": 79,
    "on_exhausted": "continue",
    "final_batch": "pad",
    "on_bad_record": "fail",
}
"""Fields that decide the bytes of the batches."""


def test_every_field_is_either_part_of_the_identity_or_named_as_no_part() -> None:
    assert sorted(all_fields()) == sorted([*WHERE_AND_HOW, *WHAT, "schema"])


@pytest.mark.parametrize("path", WHERE_AND_HOW)
def test_where_data_lies_and_how_it_is_executed_do_not_change_the_identity(path: str) -> None:
    one, other = recipe_from_dict(BASE, "/data"), recipe_from_dict(changed(path, WHERE_AND_HOW[path], BASE), "/moved")
    assert one != other
    assert fingerprint(one, SHA, [SHA, SHA]) == fingerprint(other, SHA, [SHA, SHA])
    assert fingerprint_fields(one, SHA, [SHA, SHA]) == fingerprint_fields(other, SHA, [SHA, SHA])


@pytest.mark.parametrize("path", WHAT)
def test_every_other_field_changes_the_identity_and_is_named_by_its_path(path: str) -> None:
    one, other = recipe_from_dict(BASE, "/data"), recipe_from_dict(changed(path, WHAT[path], BASE), "/data")
    assert fingerprint(one, SHA, [SHA, SHA]) != fingerprint(other, SHA, [SHA, SHA])
    before, after = fingerprint_fields(one, SHA, [SHA, SHA]), fingerprint_fields(other, SHA, [SHA, SHA])
    assert list(before) == list(after)
    assert path in [key for key in before if before[key] != after[key]]


def test_defaults_written_out_do_not_change_the_identity() -> None:
    written = changed("packing", {"algorithm": "best_fit", "buffer": 1024, "max_document_tokens": 4096}, BASE)
    written = changed("sources[0].window_groups", 16, changed("sources[1].unit_bytes", 1 << 20, written))
    written |= {"unit_bytes": 1 << 20, "shuffle": {}, "execution": {"runner": "inline"}}
    assert recipe_from_dict(written, "/data").identity() == recipe_from_dict(BASE, "/data").identity()


def test_the_fingerprint_is_made_of_contract_recipe_tokenizer_and_manifests() -> None:
    recipe = recipe_from_dict(plain(), "/data")
    parts = {"contract": 1, "recipe": recipe.identity(), "tokenizer": SHA, "manifests": ["01" * 32, "02" * 32]}
    assert fingerprint(recipe, SHA, ["01" * 32, "02" * 32]) == sha256_hex(canonical_json(parts))
    assert fingerprint(recipe, SHA, ["02" * 32, "01" * 32]) != sha256_hex(canonical_json(parts))
    for function in (fingerprint, fingerprint_fields):
        with pytest.raises(ValueError, match=r"argument|digests"):
            function(recipe, SHA, [SHA])


def test_the_fingerprint_of_this_recipe_never_changes() -> None:
    assert fingerprint(recipe_from_dict(plain(), "/data"), SHA, [SHA, SHA]) == PINNED


def test_fingerprint_fields_are_flat_ordered_and_named_by_path() -> None:
    fields = fingerprint_fields(recipe_from_dict(plain(), "/data"), SHA, ["01" * 32, "02" * 32])
    assert list(fields)[:3] == ["contract", "schema", "seed"]
    assert fields["sources[0].weight"] == "0.7"
    assert fields["sources[1].manifest"] == "02" * 32
    assert fields["tokenizer.sha256"] == SHA
    assert all(value is None or isinstance(value, str | int) for value in fields.values())
    canonical_json(fields)
