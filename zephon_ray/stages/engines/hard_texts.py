"""Hard texts: what encoders have been known to disagree about. A fast engine that gives the reference's ids on all of them may be used."""

from __future__ import annotations

import random
import sys
import unicodedata
from collections.abc import Sequence

_PIECES = (
    "a", "Z", "the", " ", "  ", "\t", "\n", "\r\n", "\n\n", "1", "23", "4567", "'s", "'S", "'ll", "'LL", "n't", ".", "...", "!?", "_", "-",
    "--", "\x00", "\x01", "\x1b", "\x7f", "\x85", "\xa0", "\u2028", "\u3000", "\ufeff", "\u200d", "\u0301", "e\u0301", "é", "ß", "İ", "ı",
    "ſ", "ﬁ", "½", "٣", "Ⅷ", "中", "文字", "か", "ハ", "한", "ไ", "ا", "ש", "नि", "👍", "👨\u200d👩\u200d👧", "🇩🇪", "\U0001d54f",
    "\U000e0041", "\ue000", "\U0010ffff",
)  # fmt: skip
_RANDOM_TEXTS, _RANDOM_PIECES = 250, 40
_RUNS = (1, 2, 3, 7, 64, 1000)
_PER_CLASS = 6
_RARE = (0x2028, 0x2029, 0x488, 0x20DD)
"""Of categories that hold too few code points to be met by chance."""
_SHARED_BYTES = 5000
"""Length of a beginning that texts share: an engine that remembers the last text's splits must not reuse one that the rest changes."""


def hard_texts(added: Sequence[str]) -> list[str]:
    """Some hundred texts of about 100 KB in all, the same at every call; none is empty.

    Args:
        added: the tokenizer's added tokens, as they are spelled.
    """
    return [*_of_classes(), *_runs(), *_random_texts(), *_spelled(added), *_shared_beginnings()]


def _of_classes() -> list[str]:
    """Code points of every general category: each alone between letters, doubled, and those of a category in a row."""
    classes: dict[str, list[str]] = {}
    # A stride that is prime to the sizes of Unicode's blocks meets all of them.
    for code in [*range(0x250), *_RARE, *range(0x250, sys.maxunicode + 1, 61)]:
        category = unicodedata.category(chr(code))
        if category != "Cs":
            classes.setdefault(category, []).append(chr(code))
    texts = []
    for _, found in sorted(classes.items()):
        some = found[:: max(1, len(found) // _PER_CLASS)]
        texts += [f"a{c}b {c} {c}{c}\n{c}" for c in some]
        texts += ["".join(some), " ".join(some), "x" + "x".join(found[:64])]
    return texts


def _runs() -> list[str]:
    pieces = ("a", " ", "\n", "\t", "1", "é", "中", "ab", "a ", " \n", "\u0301", "=", "👍")
    texts = [piece * length for piece in pieces for length in _RUNS]
    return [*texts, " " * 1000 + "x", "x" + " " * 1000, "\r\n" * 300 + "end"]


def _random_texts() -> list[str]:
    draw = random.Random(1)  # it decides what is checked, never an id
    return ["".join(draw.choices(_PIECES, k=draw.randint(1, _RANDOM_PIECES))) for _ in range(_RANDOM_TEXTS)]


def _spelled(added: Sequence[str]) -> list[str]:
    """Added tokens spelled out in texts, whole and in part."""
    texts = []
    for token in added[:: max(1, len(added) // 64)]:
        texts += [token, f"x{token}y {token} \n{token}", token + token, f" {token.upper()} {token[1:]} {token[:-1]}"]
    return [text for text in texts if text]


def _shared_beginnings() -> list[str]:
    """Texts of which each begins as the one before it does, and then parts from it where a split depends on what follows."""
    filler = ("the quick brown fox jumps over the lazy dog, and 42 more lines follow\n" * 100)[:_SHARED_BYTES]
    spaces = " " * 300
    endings = [f"{spaces}x{filler[:500]}", f"{spaces} ", f"{spaces}x", f"{spaces}\n", f"{spaces}\tx", f"{spaces}y", "", "x" * 1100, "Z"]
    return [filler + ending for ending in endings]
