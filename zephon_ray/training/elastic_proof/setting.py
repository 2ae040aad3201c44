"""The setting of a proof: which recipe, on which numbers of ranks. All that can be refused is refused here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from zephon_ray.errors import RecipeError, UserError
from zephon_ray.recipe import Recipe, load_recipe
from zephon_ray.storage import Storage
from zephon_ray.testing import tiny_corpus
from zephon_ray.training.elastic_proof.jobs import Job, Mesh

SAVED, LAST = 4, 12
"""The checkpoint that all is resumed from is that after step 4; the last step is 12, or later for a long chain."""

BASE = Mesh(shard=2)
"""The ranks that save that checkpoint, and whose losses the others are compared with."""

SIZES, CHAIN, SHORT_CHAIN = (1, 2, 4, 8), (4, 2, 8, 1), (4, 1)
_MASK = 1 << 26
"""Bytes that the attention mask of a micro-batch may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is proved on.

    Args:
        folder: of everything that is written.
        recipe_path: of the recipe.
        recipe: loaded.
        tokenizer: folder with its tokenizer.json.
        vocabulary: of the model: all ids of the tokenizer, rounded up to a multiple of 16.
        sizes: numbers of data-parallel ranks to resume on.
        chain: numbers of ranks, one after the other.
        last: the last step.
        short: leave out what takes a Ray cluster, and let all but one and two ranks resume for two steps only.
    """

    folder: Path
    recipe_path: Path
    recipe: Recipe
    tokenizer: Path
    vocabulary: int
    sizes: tuple[int, ...]
    chain: tuple[int, ...]
    last: int
    short: bool

    def job(self, name: str, mesh: Mesh, steps: int, **changes: Any) -> Job:
        """A job on this recipe. A single rank accumulates gradients over micro-batches, so that a step is more than one of them."""
        return Job(
            name=name, folder=self.folder / name, recipe=self.recipe_path, tokenizer=self.tokenizer, vocabulary=self.vocabulary,
            sequence_length=self.recipe.sequence_length, global_batch_size=self.recipe.global_batch_size,
            local_batch_size=self._local_batch_size(mesh.dp_size), mesh=mesh, steps=steps, **changes,
        )  # fmt: skip

    def _local_batch_size(self, dp_size: int) -> int:
        rows = self.recipe.global_batch_size // dp_size
        most = max(1, _MASK // self.recipe.sequence_length**2)
        fewest = 2 if dp_size == 1 else 1
        return next(rows // parts for parts in range(fewest, rows + 1) if rows % parts == 0 and rows // parts <= most)

    def fits(self, mesh: Mesh) -> bool:
        """Whether so many ranks can share a global batch."""
        return mesh.dp_size in self.recipe.legal_dp_sizes()

    def chain_ends(self) -> list[int]:
        """The step at which each part of the chain ends: odd ones, and the last."""
        return [SAVED + 1 + 2 * number for number in range(1, len(self.chain))] + [self.last]


def make_setting(
    folder: Path, recipe: Path | None = None, *, sizes: Sequence[int] | None = None, chain: Sequence[int] | None = None, short: bool = False
) -> Setting:
    """Look at all of it.

    Args:
        folder: is written to; made if need be.
        recipe: path; None for a small corpus that is made there.
        sizes: to resume on; None for those of 1, 2, 4 and 8 that the recipe allows.
        chain: likewise 4, 2, 8 and 1, or 4 and 1 where it is short.
        short: as in `Setting`.

    Raises:
        RecipeError: the recipe is wrong, or a number of ranks does not divide its batch.
        UserError: the batch is of an odd number of rows, or the chain too short.
    """
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    path = (recipe or _own_recipe(folder)).absolute()
    loaded = load_recipe(path)
    legal = loaded.legal_dp_sizes()
    for size in (*(sizes or ()), *(chain or ())):
        loaded.check_dp(0, size)
    if BASE.dp_size not in legal:
        raise UserError(
            f"global_batch_size={loaded.global_batch_size} is odd, and the proof saves its checkpoint on {BASE.dp_size} ranks. Give"
            " a recipe whose batch is of an even number of rows"
        )
    chain = tuple(chain or (size for size in (SHORT_CHAIN if short else CHAIN) if size in legal))
    if len(chain) < 2:
        raise UserError(f"the chain {','.join(map(str, chain))} changes nothing. Give at least two numbers of ranks")
    return Setting(
        folder=folder, recipe_path=path, recipe=loaded, short=short,
        sizes=tuple(sizes or (size for size in SIZES if size in legal)), chain=chain, last=max(LAST, SAVED + 2 * len(chain)),
        **_tokenizer(loaded, folder / "tokenizer"),
    )  # fmt: skip


def _own_recipe(folder: Path) -> Path:
    return tiny_corpus(folder / "corpus", lanes=8, global_batch_size=16, sequence_length=64, texts=300)


def _tokenizer(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """The recipe's tokenizer under the name that TorchTitan looks for, and how many ids it has."""
    try:
        data = Storage(recipe.execution.storage).read_bytes(recipe.tokenizer_url)
    except OSError as error:
        raise RecipeError(
            [f"tokenizer.path={recipe.tokenizer_url}: cannot be read ({error}). Give the path of a tokenizer.json"]
        ) from error
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes(data)
    ids = 1 + max(Tokenizer.from_str(data.decode()).get_vocab(with_added_tokens=True).values())
    return {"tokenizer": folder, "vocabulary": -(-ids // 16) * 16}
