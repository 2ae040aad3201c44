"""Ledgers for tests: the lines of a made-up run, and a store that tells of every call."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from zephon_ray.hashing import chain_digest
from zephon_ray.ledger import Ledger, LedgerLine, WindowUse
from zephon_ray.ledger.line import NO_CHAIN
from zephon_ray.recipe_fields import StorageSpec
from zephon_ray.storage import Storage

STORAGE = Storage(StorageSpec())


def run(seed: int = 7) -> Iterator[LedgerLine]:
    """A run without end of two sources; every fifth step begins a window of source 0, every eleventh one of source 1."""
    chance = random.Random(seed)
    chain, pairs = NO_CHAIN, [0, 0]
    for step in itertools.count(1):
        digest = chance.randbytes(16)
        chain = chain_digest(bytes.fromhex(chain), step, digest).hex()
        pairs = [pairs[0] + chance.randrange(1000), pairs[1] + chance.randrange(1000)]
        windows, left_out = {}, {}
        for source, period in ((0, 5), (1, 11)):
            if step % period == 1:
                epoch, window = divmod(step // period, 3)
                units = tuple((group, window, chance.getrandbits(64)) for group in range(4))
                windows[source] = (WindowUse(epoch=epoch, window=window, units=units),)
                left_out[source] = (chance.randrange(3), 0, 1)
        yield LedgerLine(
            step=step, digest=digest.hex(), chain=chain, pairs=tuple(pairs), padding=step % 3, left_out=left_out, windows=windows
        )


def make_lines(count: int, seed: int = 7) -> list[LedgerLine]:
    return list(itertools.islice(run(seed), count))


LINES = make_lines(400)


def changed(line: LedgerLine, **fields: Any) -> LedgerLine:
    names = ("step", "digest", "chain", "pairs", "padding", "left_out", "windows")
    return LedgerLine(**{name: getattr(line, name) for name in names} | fields)


def append(ledger: Ledger, lines: list[LedgerLine]) -> None:
    for line in lines:
        ledger.append(line)


def fill(url: str, lines: list[LedgerLine]) -> None:
    with Ledger.open(STORAGE, url) as ledger:
        append(ledger, lines)


def names(url: str) -> list[str]:
    return sorted(entry.path for entry in STORAGE.list_files(url))


class Watched(Storage):
    """The real storage, which tells of every call before it is made."""

    hook: ClassVar[Callable[[str, str], None]] = staticmethod(lambda call, url: None)

    def read_bytes(self, url: str) -> bytes:
        Watched.hook("read", url)
        return super().read_bytes(url)

    def write_bytes(self, url: str, data: bytes, *, exclusive: bool = False) -> None:
        Watched.hook("write", url)
        super().write_bytes(url, data, exclusive=exclusive)

    def delete(self, url: str) -> None:
        Watched.hook("delete", url)
        super().delete(url)

    def exists(self, url: str) -> bool:
        Watched.hook("exists", url)
        return super().exists(url)


class DiedError(BaseException):
    """A crash, as tests make one."""
