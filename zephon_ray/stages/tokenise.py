"""Tokenise: the pure function from a unit to its documents' ids, with the recipe's Hugging Face tokenizer.

The same task gives the same unit in any instance, in any order, any number of times. Nothing here decides an order.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from zephon_ray.errors import RecipeError
from zephon_ray.hashing import sha256_hex
from zephon_ray.recipe import Recipe
from zephon_ray.recipe_fields import StorageSpec
from zephon_ray.stages.reading import UnitReader
from zephon_ray.stages.texts import digest_texts
from zephon_ray.stages.unit import TokenisedUnit, UnitTask
from zephon_ray.storage import Storage

CHUNK_BYTES = 1 << 18
"""Bytes of text that the tokenizer is given at a time: it needs about a hundred times the text's ids while it works."""
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


def make_options(recipe: Recipe) -> Options:
    """Load the recipe's tokenizer and look up its special tokens.

    Raises:
        RecipeError: no such file, not a tokenizer, a special token that it lacks, or, with `special_tokens_in_text: plain`, one that
            is not flagged special and so could be spelled out in a document.
        StorageError: the store goes on failing.
    """
    spec = recipe.tokenizer
    try:
        data = Storage(recipe.execution.storage).read_bytes(recipe.tokenizer_url)
    except OSError as error:
        raise RecipeError(
            [f"tokenizer.path={spec.path!r} cannot be read at {recipe.tokenizer_url} ({error.strerror or error}). Name a tokenizer.json."]
        ) from error
    tokenizer = _load(data, spec.path)
    plain = spec.special_tokens_in_text == "plain"
    problems: list[str] = []
    ids = {name: _special(tokenizer, name, getattr(spec, name), plain, problems) for name in ("bos", "eos", "pad")}
    if problems:
        raise RecipeError(problems)
    return Options(
        tokenizer_json=data,
        tokenizer_sha256=sha256_hex(data),
        **ids,
        encode_special_tokens=plain,
        max_document_bytes=recipe.max_document_bytes,
        on_bad_record=recipe.on_bad_record,
        max_streams=sum(recipe.window_groups_of(source) for source in range(len(recipe.sources))),
        storage=recipe.execution.storage,
    )


def _load(data: bytes, path: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(data.decode())
    except Exception as error:  # the library raises plain Exception
        raise RecipeError([f"tokenizer.path={path!r} is no tokenizer that this release reads: {error}. Name a tokenizer.json."]) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


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
    """

    units: int
    text_bytes: int
    skipped_bytes: int
    bytes_read: int


class UnitTokeniser:
    """Tokenises units. One instance a worker: it is not thread-safe, and it keeps shards open.

    Args:
        options: of the run.
    """

    def __init__(self, options: Options) -> None:
        self._tokenizer = _load(options.tokenizer_json, "tokenizer.json")
        self._tokenizer.encode_special_tokens = options.encode_special_tokens
        self._head = b"" if options.bos is None else array("I", [options.bos]).tobytes()
        self._tail = b"" if options.eos is None else array("I", [options.eos]).tobytes()
        self._reader = UnitReader(
            Storage(options.storage), options.max_document_bytes, options.on_bad_record == "fail", options.max_streams
        )
        self._units = self._text_bytes = 0

    @property
    def counters(self) -> TokeniserCounters:
        read = self._reader.counters
        return TokeniserCounters(
            units=self._units, text_bytes=self._text_bytes, skipped_bytes=read.skipped_bytes, bytes_read=read.bytes_read
        )

    def tokenise(self, task: UnitTask) -> TokenisedUnit:
        """Read and tokenise a unit. A bad record under `on_bad_record: fail` is in the unit's `error`.

        Raises:
            SourceError: the shard is gone, cut or damaged.
            DataChangedError: the shard is not what the manifest says, or has no such unit.
            StorageError: the store goes on failing.
        """
        read = self._reader.read(task)
        digest, sizes = digest_texts(read.texts)
        ids, offsets, short = self._encode(read.texts, sizes)
        text_bytes = int(sizes.sum())
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
            digest=digest,
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

    def _encode(self, texts: Sequence[str], sizes: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64], int]:
        """Flat uint32 ids, int64 offsets [documents + 1], and how many documents had fewer than two ids."""
        head, tail = self._head, self._tail
        around = (len(head) + len(tail)) // 4
        lengths: list[int] = []
        parts: list[bytes | array[int]] = []
        for first, end in _chunks(sizes):
            for encoding in self._tokenizer.encode_batch_fast(texts[first:end], add_special_tokens=False):
                # The library gives a list of ints; array.array takes it three times faster than numpy or Arrow do.
                ids = array("I", encoding.ids)
                if len(ids) + around >= 2:
                    parts += (head, ids, tail)
                    lengths.append(len(ids) + around)
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return np.frombuffer(b"".join(parts), np.uint32), offsets, len(texts) - len(lengths)


def _chunks(sizes: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Ranges of texts of about `CHUNK_BYTES` each."""
    # A text belongs to the chunk in which its first byte lies.
    starts = np.cumsum(sizes) - sizes
    edges = np.flatnonzero(np.diff(starts // CHUNK_BYTES, prepend=-1))
    return pairwise([*edges.tolist(), len(sizes)])
