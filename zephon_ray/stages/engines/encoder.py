"""The encoder: the one thing a worker asks for ids. It holds the reference, and the fast engine for as long as that can be trusted.

Trust is earned before the first unit (hard texts, and the first documents of that unit), and looked after: a share of the documents is
encoded by the reference too. That is an alarm and no proof. Where the two differ the reference has the last word, the unit is made again
with it, and the fast engine is not used again in this process. So no engine ever changes an id that was noticed, and which engine is used
is no part of anything that is stored.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakValueDictionary

import numpy as np
from tokenizers import Tokenizer

from zephon_ray.errors import RecipeError
from zephon_ray.hashing import extend_key64, key64
from zephon_ray.plan.windows import UnitKey
from zephon_ray.stages.engines.base import Encoded, Engine, EngineName, EngineUnfitError
from zephon_ray.stages.engines.fast import FastEngine
from zephon_ray.stages.engines.hard_texts import hard_texts
from zephon_ray.stages.engines.hf import HfEngine
from zephon_ray.stages.texts import Texts

CHECKED_SHARE = 5000
"""One document in so many is encoded by the reference too."""
FIRST_BYTES = 1 << 16
"""Of the first unit's documents, so many bytes are encoded by both before the fast engine is used: 20 ms of the reference's time."""
ENGINE_CHECK = 4
"""Domain of the keys that choose the documents to be checked; they decide no byte."""

_PASSED: set[tuple[str, bool, str]] = set()
"""Tokenizers with engines that passed the hard texts in this process, so that a tokenizer which is loaded again needs them no more."""

_log = logging.getLogger(__name__)


class Encoder:
    """Encodes with the fast engine while it may be used, else with the reference. Any number of threads may use it at once.

    Args:
        reference: decides what is right.
        fast: gives the fast engine; it is called, and checked, when the first unit comes.
        required: an unfit fast engine is an error, not a reason to do without.
        tokenizer: the sha256 of its file, and `plain`: with the engine's name it says what was checked in this process before.
    """

    def __init__(
        self, reference: HfEngine, fast: Callable[[], Engine] | None, *, required: bool = False, tokenizer: tuple[str, bool] = ("", True)
    ) -> None:
        self._reference, self._load, self._required, self._tokenizer = reference, fast, required, tokenizer
        self._fast: Engine | None = None
        self._lock = threading.Lock()

    @property
    def engine_name(self) -> str:
        """The engine that makes ids now; before the first unit, the reference."""
        return (self._fast or self._reference).name

    @property
    def tokenizer(self) -> Tokenizer:
        """The reference's."""
        return self._reference.tokenizer

    def encode(self, texts: Texts, key: UnitKey) -> tuple[Encoded, bool]:
        """The ids of a unit's texts, and whether the reference had to make them again.

        Args:
            texts: of the unit.
            key: of the unit: it decides which texts are checked, whoever encodes them.

        Raises:
            RecipeError: the fast engine is required and unfit.
        """
        fast = self._ready(texts) if len(texts) else None
        if fast is None:
            return self._reference.encode(texts), False
        try:
            encoded = fast.encode(texts)
        except Exception as error:  # noqa: BLE001  whatever befalls a guest, the reference goes on
            self._give_up(fast, key, f"failed ({error})")
            return self._reference.encode(texts), True
        keys = extend_key64(key64(ENGINE_CHECK, *key), np.arange(len(texts)))
        chosen = (keys % np.uint64(CHECKED_SHARE) == 0).nonzero()[0].tolist()
        if (wrong := self._differing(encoded, texts, chosen)) is not None:
            self._give_up(fast, key, f"gave other ids than the reference for text {wrong}")
            return self._reference.encode(texts), True
        return encoded, False

    def prepare(self, texts: Texts | None = None) -> None:
        """Load and check the fast engine now, on hard texts and on some others.

        Raises:
            RecipeError: it is required and unfit.
        """
        self._ready(texts or Texts.of([]))

    def _ready(self, first: Texts) -> Engine | None:
        """The fast engine, if it may be used. Whoever comes first loads and checks it, while the others wait."""
        if self._load is not None:
            with self._lock:
                if self._load is not None:
                    try:
                        self._fast = self._checked(self._load(), first)
                    except EngineUnfitError as error:
                        if self._required:
                            raise RecipeError([f"execution.engine='fast' cannot be used: {error}. Use auto or hf"]) from error
                        _log.warning("ids are made by %s, which costs some fifty times as much CPU: %s", self._reference.name, error)
                    self._load = None
                    _give_back()
        return self._fast

    def _checked(self, fast: Engine, first: Texts) -> Engine:
        """The fast engine, if it gives the reference's ids on all hard texts and on the first documents of a unit."""
        checked = (*self._tokenizer, fast.name)
        end = next((end for _, end in first.chunks(FIRST_BYTES)), 0)
        hard = [] if checked in _PASSED else hard_texts(self._reference.added_tokens)
        texts = Texts.of([*hard, *first.strings(0, end)])
        try:
            encoded = fast.encode(texts)
        except Exception as error:
            raise EngineUnfitError(f"{fast.name} failed on a text of the self-check ({error})") from error
        wrong = self._differing(encoded, texts, range(len(texts)))
        if wrong is not None:
            text = texts.strings(wrong, wrong + 1)[0]
            raise EngineUnfitError(f"{fast.name} gives other ids than {self._reference.name} for the text {text[:40]!r} of the self-check")
        _PASSED.add(checked)
        return fast

    def _differing(self, encoded: Encoded, texts: Texts, chosen: range | list[int]) -> int | None:
        """The first of the chosen texts to which the reference gives other ids."""
        if not chosen:
            return None
        whole = len(chosen) == len(texts)
        expected = self._reference.encode(texts if whole else Texts.of([texts.strings(n, n + 1)[0] for n in chosen]))
        if len(encoded) != len(texts):
            return 0
        if whole and np.array_equal(encoded.sizes, expected.sizes) and np.array_equal(encoded.ids, expected.ids):
            return None
        return next((n for i, n in enumerate(chosen) if not np.array_equal(encoded.of_text(n), expected.of_text(i))), None)

    def _give_up(self, fast: Engine, key: UnitKey, what: str) -> None:
        """Never use the fast engine again."""
        with self._lock:
            self._fast = None
        source, epoch, group, unit = key
        _log.error(
            "%s %s, of source %d, epoch %d, group %d, unit %d. The unit was made again by %s, and so are all units from now on, at some"
            " fifty times the CPU. Those before were checked in part only: set execution.engine to hf and verify the run's steps",
            fast.name, what, source, epoch, group, unit, self._reference.name,
        )  # fmt: skip


def _give_back() -> None:
    """To the system what was needed only to load tokenizers, some 50 MB, where the C library is one that can."""
    with suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


_ENCODERS: WeakValueDictionary[tuple[str, bool, EngineName], Encoder] = WeakValueDictionary()
_NEWEST: list[Encoder] = []
"""Keeps one encoder, so that a stream that is opened after another one was closed need not load its tokenizer again."""
_LOADING = threading.Lock()


def encoder_of(data: bytes, sha256: str, *, plain: bool, engine: EngineName) -> Encoder:
    """The encoder of a tokenizer. Workers in threads of one process share it, as it takes 150 MB and a second to load.

    Args:
        data: the tokenizer file's content.
        sha256: its sha256, 64 hex.
        plain: control tokens spelled out in a text are ordinary text.
        engine: which may be used.
    """
    key = sha256, plain, engine
    with _LOADING:
        encoder = _ENCODERS.get(key)
        if encoder is None:
            fast = None if engine == "hf" else lambda: FastEngine(data, plain)
            encoder = Encoder(HfEngine(data, plain), fast, required=engine == "fast", tokenizer=(sha256, plain))
            _ENCODERS[key] = encoder
        _NEWEST[:] = [encoder]
        return encoder


def let_go() -> None:
    """Units are made in other processes: a tokenizer that was loaded to look at it is not needed here."""
    with _LOADING:
        _NEWEST.clear()
    _give_back()
