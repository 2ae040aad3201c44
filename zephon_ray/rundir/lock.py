"""`recipe.lock.yaml`: what a run is, as it was when the run began. It never changes afterwards."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zephon_ray import __version__
from zephon_ray.errors import RecipeError, RunDirectoryError
from zephon_ray.recipe import Recipe, fingerprint, fingerprint_fields, recipe_from_dict
from zephon_ray.recipe_yaml import read_yaml, write_yaml

LOCK_VERSION = 1
_COMMENT = (
    "# What this run is. Written once, when it began; zephon-ray refuses to go on with the directory if recipe, tokenizer or data\n"
    "# differ from it. `recipe` can be cut out and run elsewhere.\n"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lock:
    """What the file holds.

    Args:
        fingerprint: of the run, 64 hex digits.
        fields: what the fingerprint is made of, path -> value, as `recipe.fingerprint_fields` gives it.
        versions: of this package and of what it stands on, by name.
        recipe: the recipe with all defaults filled in and absolute locations.
    """

    fingerprint: str
    fields: Mapping[str, Any]
    versions: Mapping[str, str]
    recipe: Recipe

    def to_yaml(self) -> str:
        head = {"lock": LOCK_VERSION, "fingerprint": self.fingerprint, "versions": dict(self.versions), "fields": dict(self.fields)}
        return f"{_COMMENT}{write_yaml(head)}recipe:\n{textwrap.indent(self.recipe.to_yaml(), '  ')}"

    @classmethod
    def from_yaml(cls, text: str, where: str) -> Lock:
        """The lock that `to_yaml` wrote.

        Args:
            text: the file's text.
            where: where it lies, for errors; the folder that the recipe's own locations do not need.

        Raises:
            RunDirectoryError: the file is damaged, edited, or of another version.
        """
        data, problems = read_yaml(text, where)
        if not isinstance(data, dict) or problems:
            raise RunDirectoryError(f"{where}: is damaged: {'; '.join(problems) or 'not a mapping'}. Restore it from a copy.")
        if (version := data.get("lock")) != LOCK_VERSION:
            raise RunDirectoryError(
                f"{where}: lock={version!r}, but this version of zephon-ray reads {LOCK_VERSION}. Use the one that wrote it."
            )
        fields, versions = data.get("fields"), data.get("versions")
        if not isinstance(fields, dict) or not isinstance(versions, dict):
            raise RunDirectoryError(f"{where}: is damaged: fields or versions are missing. Restore it from a copy.")
        try:
            recipe = recipe_from_dict(data.get("recipe"), where.rpartition("/")[0] or "/")
        except RecipeError as error:
            raise RunDirectoryError(
                f"{where}: its recipe is damaged, or of another version of zephon-ray. Restore it from a copy, or use the version "
                f"that wrote it ({versions.get('zephon-ray')}):\n{error}"
            ) from error
        sources = range(len(recipe.sources))
        parts = recipe, str(fields.get("tokenizer.sha256")), [str(fields.get(f"sources[{index}].manifest")) for index in sources]
        if data.get("fingerprint") != fingerprint(*parts) or fields != fingerprint_fields(*parts):
            raise RunDirectoryError(
                f"{where}: recipe, fields and fingerprint do not agree: it was edited, is damaged, or of another version of zephon-ray "
                f"(written by {versions.get('zephon-ray')}). Restore it from a copy."
            )
        return cls(fingerprint=data["fingerprint"], fields=fields, versions=versions, recipe=recipe)


def versions_now() -> dict[str, str]:
    """The versions that a lock records."""
    libraries = {name: importlib.metadata.version(name) for name in ("numpy", "pyarrow", "tokenizers")}
    return {"zephon-ray": __version__, "python": platform.python_version(), **libraries}


def changes(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Field -> (recorded value, value now) of those that differ, None for one that is missing."""
    names = [*recorded, *(name for name in now if name not in recorded)]
    return {name: (recorded.get(name), now.get(name)) for name in names if recorded.get(name) != now.get(name)}


def outside_identity(recipe: Recipe, versions: Mapping[str, str]) -> dict[str, Any]:
    """What may change from one start of a run to the next without a changed byte: name, places, execution, versions. JSON."""
    flat: dict[str, Any] = {"name": recipe.name, "tokenizer.path": recipe.tokenizer_url}
    flat |= {f"sources[{index}].uri": recipe.source_url(index) for index in range(len(recipe.sources))}
    flat |= {f"execution.{name}": value for name, value in json.loads(recipe.execution.model_dump_json()).items()}
    return flat | {f"versions.{name}": version for name, version in versions.items()}
