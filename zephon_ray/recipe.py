"""A recipe: the whole description of a stream of global batches, validated, with its canonical form and fingerprint.

A recipe does not look at the data: shards are the manifest's, tokens the tokeniser's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from fractions import Fraction
from math import floor
from pathlib import Path
from typing import Any, Self

from pydantic import PrivateAttr, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from zephon_ray.errors import RecipeError
from zephon_ray.hashing import canonical_json, sha256_hex
from zephon_ray.recipe_checks import FieldReader, Loc, divisors, dotted, either, field_problems, joint_problems, nearest, shown
from zephon_ray.recipe_fields import (
    ExecutionSpec,
    PackingSpec,
    RecipeFields,
    ShuffleSpec,
    SourceSpec,
    StorageSpec,
    TokenizerSpec,
    WorkersSpec,
    decimal_text,
    is_url,
)

__all__ = [
    "CONTRACT_VERSION",
    "ExecutionSpec",
    "PackingSpec",
    "Recipe",
    "ShuffleSpec",
    "SourceSpec",
    "StorageSpec",
    "TokenizerSpec",
    "WorkersSpec",
    "fingerprint",
    "fingerprint_fields",
    "load_recipe",
    "recipe_from_dict",
]

CONTRACT_VERSION = 1
SHARE_BITS = 20
"""Shares are counted in 2^20ths of the sum of all weights."""
_LISTED = 48
"""So many legal sizes are listed in a message at most."""


class Recipe(RecipeFields):
    """A valid recipe. Made by `load_recipe` and `recipe_from_dict`, which report everything that is wrong as a RecipeError.

    Attributes:
        folder: absolute folder, or URL, that relative paths are relative to; no part of the identity.
    """

    _folder: str = PrivateAttr(default="")

    @model_validator(mode="after")
    def _fields_fit_together(self) -> Self:
        # Whoever builds a Recipe without the functions below must not get round the checks.
        problems = joint_problems(FieldReader(self, set()))
        if problems:
            raise PydanticCustomError("recipe_joint", "{sentence}", {"sentence": "; ".join(problems), "problems": problems})
        return self

    @property
    def folder(self) -> str:
        return self._folder

    @property
    def tokenizer_url(self) -> str:
        """Absolute path or URL of the tokenizer file."""
        return self._absolute(self.tokenizer.path)

    @property
    def token_cache_url(self) -> str | None:
        """Absolute path or URL of the token cache, if there is one."""
        return None if self.execution.token_cache is None else self._absolute(self.execution.token_cache)

    def source_url(self, source: int) -> str:
        """Absolute path, glob or URL of a source."""
        return self._absolute(self.sources[source].uri)

    def _absolute(self, location: str) -> str:
        if is_url(location) or location.startswith("/"):
            return location
        while location.startswith("./"):
            location = location[2:].lstrip("/")
        return f"{self._folder.rstrip('/')}/{location}"

    def unit_bytes_of(self, source: int) -> int:
        """Bytes of a source's units (its own, else the recipe's)."""
        return self.sources[source].unit_bytes or self.unit_bytes

    def window_groups_of(self, source: int) -> int:
        """Slots of a source (its own, else those of `shuffle`)."""
        return self.sources[source].window_groups or self.shuffle.window_groups

    @property
    def max_piece_pairs(self) -> int:
        """M of the contract: pairs of the longest piece."""
        pairs = self.packing.max_document_tokens or 8 * self.sequence_length
        return min(pairs, self.sequence_length) if self.packing.algorithm == "best_fit" else pairs

    @property
    def fill_pieces(self) -> int:
        """Pieces that `best_fit` places at a time. Of no meaning with `wrap`."""
        return self.packing.buffer or min(1024, max(32, 65536 // self.lanes))

    @property
    def rows_per_lane(self) -> int:
        """Rows that each lane gives to a global batch."""
        return self.global_batch_size // self.lanes

    def shares(self) -> tuple[int, ...]:
        """The integer share of each source, in 2^20ths of the sum of all weights, at least 1."""
        weights = [Fraction(source.weight) for source in self.sources]
        total = sum(weights, Fraction(0))
        return tuple(max(1, floor(weight * (1 << SHARE_BITS) / total + Fraction(1, 2))) for weight in weights)

    def legal_dp_sizes(self) -> list[int]:
        """Every number of data-parallel ranks that can share a global batch, ascending."""
        return divisors(self.global_batch_size)

    def check_dp(self, dp_rank: int, dp_world_size: int) -> None:
        """Refuse ranks that cannot share a global batch.

        Args:
            dp_rank: this rank, in [0, dp_world_size).
            dp_world_size: number of data-parallel ranks; divides `global_batch_size`.

        Raises:
            RecipeError: one of them is not possible; lists the sizes that are.
        """
        problems = [
            f"{name}={shown(value)} is not a whole number. Give an int"
            for name, value in (("dp_world_size", dp_world_size), ("dp_rank", dp_rank))
            if type(value) is not int
        ]
        if problems:
            raise RecipeError(problems)
        sizes = self.legal_dp_sizes()
        if dp_world_size not in sizes:
            listed = ", ".join(map(str, sizes[:_LISTED])) + (", ..." if len(sizes) > _LISTED else "")
            problems.append(
                f"dp_world_size={dp_world_size} cannot share the rows of global_batch_size={self.global_batch_size} evenly."
                f" Use {either(nearest(dp_world_size, sizes))} (all that can: {listed})"
            )
        if not 0 <= dp_rank < max(dp_world_size, 1):
            problems.append(f"dp_rank={dp_rank} is no rank of dp_world_size={dp_world_size}. Ranks count from 0 to dp_world_size - 1")
        if problems:
            raise RecipeError(problems)

    def identity(self) -> dict[str, Any]:
        """The fields that decide the bytes of the batches, defaults filled in, as JSON without floats.

        Left out: `name` and `execution`, and where data lies (each `uri`, `tokenizer.path`).
        """
        data = self._resolved({"name": True, "execution": True, "tokenizer": {"path"}, "sources": {"__all__": {"uri"}}})
        for source in data["sources"]:
            source["weight"] = decimal_text(source["weight"])
        return data

    def to_yaml(self) -> str:
        """The recipe with all defaults filled in and all locations absolute, to be loaded from any folder."""
        data = self._resolved(None)
        data["tokenizer"]["path"] = self.tokenizer_url
        data["execution"]["token_cache"] = self.token_cache_url
        for index, source in enumerate(data["sources"]):
            source["uri"] = self.source_url(index)
        from zephon_ray.recipe_yaml import write_yaml  # workers are sent recipes, and do without YAML

        return write_yaml(data)

    def _resolved(self, exclude: Any) -> dict[str, Any]:
        """All fields under their keys in files, those that depend on others filled in."""
        data = self.model_dump(by_alias=True, exclude=exclude)
        data["sources"] = list(data["sources"])
        for index, source in enumerate(data["sources"]):
            source["unit_bytes"] = self.unit_bytes_of(index)
            source["window_groups"] = self.window_groups_of(index)
        data["packing"]["max_document_tokens"] = self.max_piece_pairs
        data["packing"]["buffer"] = self.fill_pieces if self.packing.algorithm == "best_fit" else None
        return data


def recipe_from_dict(data: Any, folder: str | os.PathLike[str]) -> Recipe:
    """Validate a recipe given as a mapping, such as YAML gives it.

    Args:
        data: the mapping; not changed.
        folder: folder or URL that relative paths are relative to.

    Raises:
        RecipeError: lists everything that is wrong.
    """
    return _validated(data, folder, [])


def load_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """Read and validate a recipe file.

    Args:
        path: a local YAML file; relative paths in it are relative to its folder.
        overrides: "path=value" each, value in YAML: "lanes=4", "sources[0].weight=0.5", "sources.web.weight=0.5".

    Raises:
        RecipeError: lists everything that is wrong, in the file and in the overrides.
    """
    from zephon_ray.recipe_yaml import apply_overrides, read_yaml

    where = os.fspath(path)
    data, problems = read_yaml(_text(where), where)
    if data is None:
        raise RecipeError(problems or [f"{where}: is empty. A recipe is a mapping that begins with schema: 1"])
    if isinstance(data, dict):
        problems += apply_overrides(data, overrides)
    return _validated(data, Path(where).absolute().parent, problems)


def _text(path: str) -> str:
    if is_url(path):
        raise RecipeError([f"{path}: recipes are read from local files only. Copy it here first; what it names may lie anywhere"])
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError([f"{path}: is not UTF-8 at byte {error.start}. Save it as UTF-8"]) from error
    except OSError as error:
        raise RecipeError([f"{path}: cannot be read: {error.strerror}. Give the path of a recipe file"]) from error


def _validated(data: Any, folder: str | os.PathLike[str], problems: list[str]) -> Recipe:
    base = os.fspath(folder)
    base = base if is_url(base) else str(Path(base).absolute())
    if not isinstance(data, dict):
        raise RecipeError([*problems, f"the recipe is {shown(data)}, not a mapping. Write fields such as schema: 1"])
    recipe = None
    read = FieldReader(data, set())
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        found, faults = field_problems(error)
        read = FieldReader(data, faults)
        # The model looks at fields together only where each of them is valid.
        problems = problems + found + (joint_problems(read) if faults else [])
    problems = problems + _folder_problems(read, base)
    if recipe is None or problems:
        raise RecipeError(problems)
    recipe._folder = base
    return recipe


def _folder_problems(read: FieldReader, folder: str) -> list[str]:
    """A folder's name goes in front of relative globs, where its own special characters would be read as part of the glob."""
    special = sorted(set(folder) & set("*?["))
    if not special or is_url(folder):
        return []
    return [
        f"sources[{index}].uri={shown(uri)} is relative to {folder}, and globs give the {' '.join(special)} in that name a meaning."
        " Move the recipe to a folder without, or write an absolute path"
        for index, uri in read.sources("uri")
        if not is_url(uri) and not uri.startswith("/")
    ]


def fingerprint_fields(recipe: Recipe, tokenizer_sha256: str, manifest_digests: Sequence[str]) -> dict[str, Any]:
    """What a fingerprint is made of, flat, so that two runs can be compared field by field.

    Args:
        recipe: the recipe.
        tokenizer_sha256: sha256 of the tokenizer file, 64 hex digits.
        manifest_digests: digest of each source's manifest, 64 hex digits, in the recipe's order.

    Returns:
        path -> text, integer, boolean or None, in the order of the recipe: "contract", ..., "tokenizer.sha256",
        "sources[0].weight", "sources[0].manifest", ...

    Raises:
        ValueError: not one digest a source.
    """
    identity = recipe.identity()
    identity["tokenizer"]["sha256"] = tokenizer_sha256
    for source, digest in zip(identity["sources"], manifest_digests, strict=True):
        source["manifest"] = digest
    fields: dict[str, Any] = {"contract": CONTRACT_VERSION}
    _flatten((), identity, fields)
    return fields


def _flatten(at: Loc, value: Any, into: dict[str, Any]) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _flatten((*at, key), inner, into)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _flatten((*at, index), inner, into)
    else:
        into[dotted(at)] = value


def fingerprint(recipe: Recipe, tokenizer_sha256: str, manifest_digests: Sequence[str]) -> str:
    """The identity of a run: 64 hex digits, the sha256 of canonical JSON of contract, recipe, tokenizer and manifests.

    Args and raises: those of `fingerprint_fields`.
    """
    if len(manifest_digests) != len(recipe.sources):
        raise ValueError(f"{len(manifest_digests)} manifest digests for {len(recipe.sources)} sources")
    parts = {"contract": CONTRACT_VERSION, "recipe": recipe.identity(), "tokenizer": tokenizer_sha256, "manifests": list(manifest_digests)}
    return sha256_hex(canonical_json(parts))
