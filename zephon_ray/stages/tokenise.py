"""Tokenise: the pure function from a unit to its documents' ids, with the recipe's tokenizer.

The same task gives the same unit in any instance, in any order, any number of times, whichever engine makes the ids. Nothing here decides
an order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from zephon_ray.errors import RecipeError
from zephon_ray.hashing import sha256_hex
from zephon_ray.recipe import Recipe
from zephon_ray.recipe_fields import StorageSpec
from zephon_ray.stages.engines import encoder_of
from zephon_ray.stages.engines.base import Encoded, EngineName
from zephon_ray.stages.reading import UnitReader
from zephon_ray.stages.texts import UnitTexts
from zephon_ray.stages.unit import TokenisedUnit, UnitTask
from zephon_ray.storage import Storage

_SPECIALS_SHOWN = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Everything besides the task that the ids depend on, and how to reach the data. It can be pickled.

    Args:
        tokenizer_json: content of the tokenizer file.
        tokenizer_sha256: its sha256, 64 hex.
        bos: id put before each document, or None.
        eos: id put after each document, or None.
        pad: id that fills rows up, or None. Not used here.
        encode_special_tokens: control tokens spelled out in a text are ordinary text.
        max_document_bytes: longest record.
        on_bad_record: what a bad record does.
        max_streams: how many compressed or cut groups an instance keeps open, >= 1; `make_options` gives as many as the recipe has slots,
            which is as many as one worker can be given at a time.
        storage: how to reach the shards.
        engine: what may make the ids; they do not depend on it.
        token_cache: absolute path or URL of the token cache; None: there is none.
        token_cache_bytes: of all its entries.
        only_fill_cache: units are wanted for the cache alone, and come without ids.
    """

    tokenizer_json: bytes = field(repr=False)
    tokenizer_sha256: str
    bos: int | None
    eos: int | None
    pad: int | None
    encode_special_tokens: bool
    max_document_bytes: int
    on_bad_record: Literal["fail", "skip"]
    max_streams: int
    storage: StorageSpec
    engine: EngineName = "hf"
    token_cache: str | None
    token_cache_bytes: int
    only_fill_cache: bool


def make_options(recipe: Recipe) -> Options:
    """Load the recipe's tokenizer and look up its special tokens.

    Raises:
        RecipeError: no such file, not a tokenizer, a special token that it lacks, or, with `special_tokens_in_text: plain`, one that
            is not flagged special and so could be spelled out in a document. Or `execution.engine: fast`, and it does not fit.
        StorageError: the store goes on failing.
    """
    spec = recipe.tokenizer
    try:
        data = Storage(recipe.execution.storage).read_bytes(recipe.tokenizer_url)
    except OSError as error:
        raise RecipeError(
            [f"tokenizer.path={spec.path!r} cannot be read at {recipe.tokenizer_url} ({error.strerror or error}). Name a tokenizer.json."]
        ) from error
    plain = spec.special_tokens_in_text == "plain"
    sha256, engine = sha256_hex(data), recipe.execution.engine
    with _unreadable(spec.path):
        encoder = encoder_of(data, sha256, plain=plain, engine=engine)
    tokenizer, problems = encoder.tokenizer, list[str]()
    ids = {name: _special(tokenizer, name, getattr(spec, name), plain, problems) for name in ("bos", "eos", "pad")}
    if problems:
        raise RecipeError(problems)
    if engine == "fast":
        encoder.prepare()
    return Options(
        tokenizer_json=data,
        tokenizer_sha256=sha256,
        **ids,
        encode_special_tokens=plain,
        max_document_bytes=recipe.max_document_bytes,
        on_bad_record=recipe.on_bad_record,
        max_streams=sum(recipe.window_groups_of(source) for source in range(len(recipe.sources))),
        storage=recipe.execution.storage,
        engine=engine,
        token_cache=recipe.token_cache_url,
        token_cache_bytes=recipe.execution.token_cache_bytes,
        only_fill_cache=False,
    )


@contextmanager
def _unreadable(path: str) -> Iterator[None]:
    """Say of which file it is that the library cannot read it."""
    try:
        yield
    except Exception as error:  # the library raises plain Exception
        raise RecipeError([f"tokenizer.path={path!r} is no tokenizer that this release reads: {error}. Name a tokenizer.json."]) from error


def _special(tokenizer: Tokenizer, name: str, token: str | None, plain: bool, problems: list[str]) -> int | None:
    """The id of a special token; what is wrong with it is added to `problems`."""
    if token is None:
        return None
    number: int | None = tokenizer.token_to_id(token)
    added = tokenizer.get_added_tokens_decoder()
    specials = [entry.content for _, entry in sorted(added.items()) if entry.special]
    shown = ", ".join(repr(special) for special in specials[:_SPECIALS_SHOWN]) or "none"
    if number is None:
        problems.append(f"tokenizer.{name}={token!r} is not in the tokenizer. Its special tokens are: {shown}.")
    elif plain and not (number in added and added[number].special):
        problems.append(
            f"tokenizer.{name}={token!r} is not flagged special in the tokenizer, so any document could forge it. "
            f"Use one of its special tokens ({shown}), or write special_tokens_in_text: control."
        )
    return number


@dataclass(frozen=True, kw_only=True, slots=True)
class TokeniserCounters:
    """What a `UnitTokeniser` did so far.

    Args:
        units: units tokenised.
        text_bytes: UTF-8 bytes of the texts that were given to the tokenizer.
        skipped_bytes: bytes decoded on the way to a unit in the middle of a group, but neither parsed nor tokenised.
        bytes_read: stored bytes read.
        remade: units made again by the reference, because the fast engine gave other ids.
    """

    units: int
    text_bytes: int
    skipped_bytes: int
    bytes_read: int
    remade: int


class UnitTokeniser:
    """Tokenises units. One instance a worker: it is not thread-safe, and it keeps shards open.

    Args:
        options: of the run.
    """

    def __init__(self, options: Options) -> None:
        with _unreadable("tokenizer.json"):
            self._encoder = encoder_of(
                options.tokenizer_json, options.tokenizer_sha256, plain=options.encode_special_tokens, engine=options.engine
            )
        self._bos, self._eos = options.bos, options.eos
        self._reader = UnitReader(
            Storage(options.storage), options.max_document_bytes, options.on_bad_record == "fail", options.max_streams
        )
        self._units = self._text_bytes = self._remade = 0

    @property
    def counters(self) -> TokeniserCounters:
        read = self._reader.counters
        return TokeniserCounters(
            units=self._units,
            text_bytes=self._text_bytes,
            skipped_bytes=read.skipped_bytes,
            bytes_read=read.bytes_read,
            remade=self._remade,
        )

    def tokenise(self, task: UnitTask) -> TokenisedUnit:
        """Read and tokenise a unit. A bad record under `on_bad_record: fail` is in the unit's `error`.

        Raises:
            SourceError: the shard is gone, cut or damaged.
            DataChangedError: the shard is not what the manifest says, or has no such unit.
            StorageError: the store goes on failing.
        """
        return self.encode(task, self.read(task))

    def read(self, task: UnitTask) -> UnitTexts:
        """The first half of `tokenise`, which raises what it raises."""
        return self._reader.read(task)

    def encode(self, task: UnitTask, read: UnitTexts) -> TokenisedUnit:
        """The second half: a unit of what was read of it."""
        encoded, remade = self._encoder.encode(read.texts, task.key)
        ids, offsets, short = _documents(encoded, self._bos, self._eos)
        text_bytes = read.texts.nbytes
        self._remade += remade
        self._units += 1
        self._text_bytes += text_bytes
        return TokenisedUnit(
            source=task.group.source,
            epoch=task.epoch,
            group=task.group.group,
            unit=task.unit,
            last=read.last,
            ids=ids,
            offsets=offsets,
            digest=read.texts.digest(),
            text_bytes=text_bytes,
            bad=read.left_out.bad,
            empty=read.left_out.empty,
            short=short,
            bad_examples=tuple(read.left_out.examples),
            error=read.error,
        )

    def close(self) -> None:
        """Close the shards that are open. The instance can go on afterwards."""
        self._reader.close()


def _documents(encoded: Encoded, bos: int | None, eos: int | None) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64], int]:
    """Texts as documents: with bos and eos, and without those that have fewer than two ids even so.

    Returns:
        (flat uint32 ids, int64 offsets [documents + 1], how many were left out)
    """
    ids, sizes = encoded.ids, encoded.sizes
    around = (bos is not None) + (eos is not None)
    kept = sizes + around >= 2
    short = len(sizes) - int(np.count_nonzero(kept))
    if short:
        ids, sizes = ids[np.repeat(kept, sizes)], sizes[kept]
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes + around, out=offsets[1:])
    if not around:
        return ids, offsets, short
    # A mask costs what a copy a document does where these are long, and a fifth of it where they are short.
    made, of_text = np.empty(offsets[-1], np.uint32), np.ones(offsets[-1], np.bool_)
    for at, number in ((offsets[:-1], bos), (offsets[1:] - 1, eos)):
        if number is not None:
            made[at], of_text[at] = number, False
    made[of_text] = ids
    return made, offsets, short
