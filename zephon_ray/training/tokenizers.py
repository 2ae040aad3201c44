"""Tokenizers of trainer and recipe: they have to be the same file, or the model would learn ids that its trainer reads as other text."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from zephon_ray.errors import RecipeError
from zephon_ray.hashing import sha256_hex
from zephon_ray.recipe import Recipe
from zephon_ray.storage import Storage

_log = logging.getLogger(__name__)

FILE = "tokenizer.json"


def tokenizer_digest(recipe: Recipe) -> str:
    """The sha256 of the recipe's tokenizer file, 64 hex digits.

    Raises:
        RecipeError: there is no such file.
        StorageError: the store goes on failing.
    """
    try:
        return sha256_hex(Storage(recipe.execution.storage).read_bytes(recipe.tokenizer_url))
    except OSError as error:
        where = recipe.tokenizer_url
        raise RecipeError([f"tokenizer.path={where}: cannot be read ({error}). Give the path of a {FILE}"]) from error


def check_tokenizer(trainer: object, url: str, digest: str) -> None:
    """Refuse a trainer whose tokenizer file is another one than the recipe's.

    Args:
        trainer: the trainer's tokenizer; `tokenizer_path` is the folder that it was read from. Where it has none, nothing can be
            compared, and a warning says so.
        url: where the recipe's file lies.
        digest: its sha256, 64 hex digits.

    Raises:
        RecipeError: they differ, or the trainer's folder holds no file that could be compared.
    """
    folder = getattr(trainer, "tokenizer_path", None)
    if not isinstance(folder, str | os.PathLike):
        _log.warning("the trainer's tokenizer (%s) does not tell its file: it is not compared with %s", type(trainer).__name__, url)
        return
    path = Path(folder) / FILE if Path(folder).is_dir() else Path(folder)
    try:
        theirs = sha256_hex(path.read_bytes())
    except OSError as error:
        problem = (
            f"the trainer's tokenizer comes from {folder}, where no {FILE} can be read ({error.strerror}), and the recipe's is {url}."
            " Put that file there"
        )
        raise RecipeError([problem]) from error
    if theirs != digest:
        problem = (
            f"the trainer's tokenizer is {path} (sha256 {theirs}), and the recipe's is {url} (sha256 {digest}): the same ids would mean"
            " other texts. Point the trainer (hf_assets_path) or the recipe (tokenizer.path) at the right one"
        )
        raise RecipeError([problem])
