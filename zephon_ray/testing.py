"""Testing: the promises of this package as assertions for tests of your own, and a corpus small enough for them.

    recipe = load_recipe(tiny_corpus(tmp_path))
    assert_resumable(recipe, 8)
    assert_elastic(recipe, 8)

Everything goes through `Loader`, as a trainer would; nothing here knows how batches are made.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from zephon_ray.batches import Batch, fold, row_digests
from zephon_ray.loader import Loader
from zephon_ray.recipe import Recipe, load_recipe
from zephon_ray.recipe_yaml import write_yaml

__all__ = ["assert_elastic", "assert_resumable", "documents", "tiny_corpus", "write_lines"]

SPECIALS = {"bos": "<|bos|>", "eos": "<|eos|>", "pad": "<|pad|>"}

_Path = str | os.PathLike[str]


def assert_resumable(recipe: Recipe | _Path, steps: int, *, at: Iterable[int] | None = None, runner: str | None = None) -> None:
    """Assert that a run resumed after any step goes on with the same batches, and arrives at the same state.

    Args:
        recipe: a recipe, or the path of one.
        steps: that are made and compared, at least 1; the stream must have so many.
        at: the steps after which the run is resumed, each in [0, steps); None for all of them, which makes about
            steps^2 / 2 steps in all.
        runner: its name; None for the recipe's.

    Raises:
        AssertionError: names the step resumed after, the first step that differs, and what differs in it.
        ValueError: `steps` or `at` is not possible.
    """
    _check_steps(steps)
    places = sorted(set(range(steps) if at is None else at))
    if not places or not 0 <= places[0] <= places[-1] < steps:
        raise ValueError(f"at={places}: name at least one step, each of 0 to {steps - 1}")
    with Loader(recipe, runner=runner) as loader:
        states, batches = [loader.state_dict()], []
        for step in range(1, steps + 1):
            batches.append(_taken(loader, step, "the unbroken run"))
            states.append(loader.state_dict())
    for place in places:
        who = f"resumed after step {place}"
        with Loader(recipe, runner=runner, state=states[place]) as loader:
            _claim(loader.state_dict() == states[place], f"{who}: its state is not the one that was loaded")
            for step in range(place + 1, steps + 1):
                found = _differing(batches[step - 1], _taken(loader, step, who))
                _claim(not found, f"{who}: {found} of step {step} differs from that of the unbroken run")
                _claim(loader.state_dict() == states[step], f"{who}: the state after step {step} differs from that of the unbroken run")


def assert_elastic(recipe: Recipe | _Path, steps: int, *, dp_sizes: Sequence[int] | None = None, runner: str | None = None) -> None:
    """Assert that any number of ranks gets the same global batches: all rows once, in order, of the digest that is told.

    Args:
        recipe: a recipe, or the path of one.
        steps: that are made and compared, at least 1; the stream must have so many.
        dp_sizes: numbers of ranks; None for every legal one. A rank has a loader of its own, so this makes
            sum(dp_sizes) * steps steps in all.
        runner: its name; None for the recipe's.

    Raises:
        AssertionError: names the number of ranks, the rank or the step, and what differs.
        RecipeError: a number of ranks cannot share a global batch.
        ValueError: `steps` or `dp_sizes` is not possible.
    """
    _check_steps(steps)
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    sizes = recipe.legal_dp_sizes() if dp_sizes is None else list(dp_sizes)
    if not sizes:
        raise ValueError("dp_sizes is empty: name at least one number of ranks")
    for size in sizes:
        recipe.check_dp(0, size)
    with Loader(recipe, runner=runner) as loader:
        whole = [_taken(loader, step, "one rank alone") for step in range(1, steps + 1)]
        state = loader.state_dict()
    chain = bytes(16)
    for batch in whole:
        digest, chain = fold(batch.step, chain, row_digests(batch))
        _claim((digest, chain) == (batch.digest, batch.chain), f"step {batch.step}: digest or chain is not that of its rows")
    ranks = [(number, size) for size in sizes for number in range(size)]
    for rank, size in ranks:
        rows = slice(rank * recipe.global_batch_size // size, (rank + 1) * recipe.global_batch_size // size)
        who = f"rank {rank} of {size}"
        with Loader(recipe, runner=runner, dp_rank=rank, dp_world_size=size) as loader:
            for batch in whole:
                found = _differing(batch, _taken(loader, batch.step, who), rows)
                _claim(not found, f"{who}: {found} of step {batch.step} differs from that of one rank alone")
            _claim(loader.state_dict() == state, f"{who}: the state after step {steps} differs from that of one rank alone")


def tiny_corpus(folder: _Path, *, sources: Sequence[str] = ("web", "code"), texts: int = 60, **changes: Any) -> Path:
    """Write a corpus of a few kilobytes, a tokenizer of one id a byte, and a recipe for them. The same everywhere.

    Args:
        folder: made if need be; files of the same names are replaced.
        sources: their names, which are those of their folders too; all of one weight.
        texts: documents of each source, in three files; at least 1.
        changes: top-level fields of the recipe that are to be others, as `lanes=4`.

    Returns:
        The path of the recipe: 2 lanes, batches of 4 rows of 32 pairs, units of 2 KiB, runner "inline".

    Raises:
        RecipeError: the changes do not give a recipe.
    """
    root = Path(folder)
    for number, name in enumerate(sources):
        made = documents(texts, seed=100 * number)
        for part in range(3):
            write_lines(root / name / f"{part}.jsonl", made[part::3])
    _byte_tokenizer().save(str(root / "tokenizer.json"))
    recipe = {
        "schema": 1,
        "name": "tiny",
        "seed": 7,
        "lanes": 2,
        "sequence_length": 32,
        "global_batch_size": 4,
        "unit_bytes": 2048,
        "tokenizer": {"path": "tokenizer.json", **SPECIALS},
        "sources": [{"name": name, "uri": name} for name in sources],
        "execution": {"runner": "inline"},
    }
    path = root / "recipe.yaml"
    path.write_text(write_yaml(recipe | changes), encoding="utf-8")
    load_recipe(path)
    return path


def documents(n: int, words: int = 30, seed: int = 0) -> list[str]:
    """`n` different texts of 1 to 2 * `words` words, the same everywhere."""
    return [" ".join(f"w{(i * 31 + k * 7 + seed) % 997}" for k in range(1 + (i * 7919 + seed) % (2 * words))) for i in range(n)]


def write_lines(path: _Path, texts: Sequence[Any]) -> Path:
    """Write texts (or whatever is to stand there instead) as JSON lines with the field `text`; folders are made as needed."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return file


def _check_steps(steps: int) -> None:
    if steps < 1:
        raise ValueError(f"steps={steps}: at least 1, or nothing would be compared")


def _claim(holds: bool, sentence: str) -> None:
    """Like `assert`, and under `python -O` too."""
    if not holds:
        raise AssertionError(sentence)


def _taken(loader: Loader, step: int, who: str) -> Batch:
    """The next batch, which must be that of a step."""
    batch = next(loader, None)
    if batch is None:
        raise AssertionError(f"{who}: the stream ends before step {step}. Ask for fewer steps, or leave out `epochs`")
    _claim(batch.step == step, f"{who}: the loader gave step {batch.step} where step {step} was due")
    return batch


def _differing(whole: Batch, part: Batch, rows: slice = slice(None)) -> str | None:
    """The first field in which `part` is not what `whole` says of these rows; None where all are equal."""
    for field in fields(Batch):
        one, other = getattr(whole, field.name), getattr(part, field.name)
        same = _same(one[rows], other) if isinstance(one, np.ndarray) else one == other
        if not same:
            return field.name
    return None


def _same(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    return one.dtype == other.dtype and np.array_equal(one, other)


def _byte_tokenizer() -> Tokenizer:
    """A tokenizer of which each id is one byte, with the special tokens of the recipe."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS.values()))
    return tokenizer
