"""The mailbox: what the workers of waves may make next. It is the body of an actor.

Entries are bytes here, and nothing is imported: this process is there in half the time that those take which know what an entry is.
"""

from __future__ import annotations

import asyncio


class Mailbox:
    """Holds the entries of waves. Entries are numbered by the one who posts, since calls may overtake each other."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, int], bytes] = {}
        self._ends: dict[int, int] = {}
        self._closed = False
        self._started: dict[int, set[int]] = {}
        self._changed = asyncio.Condition()

    async def started(self, wave: int) -> int:
        """How many tasks of a wave have asked for an entry."""
        return len(self._started.get(wave, ()))

    async def post(self, wave: int, number: int, entry: bytes) -> None:
        async with self._changed:
            self._entries[wave, number] = entry
            self._changed.notify_all()

    async def end(self, wave: int, entries: int) -> None:
        """The wave has that many entries and no more."""
        async with self._changed:
            self._ends[wave] = entries
            self._changed.notify_all()

    async def forget(self, wave: int) -> None:
        """The wave is over: nobody will ask for its entries."""
        self._entries = {key: entry for key, entry in self._entries.items() if key[0] != wave}
        self._started.pop(wave, None)

    async def close(self) -> None:
        """No wave gets an entry any more."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def entry(self, wave: int, task: int, number: int) -> bytes | None:
        """Wait for an entry, for a task of a wave; None behind the wave's last."""
        key = (wave, number)
        self._started.setdefault(wave, set()).add(task)
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or key in self._entries or number >= self._ends.get(wave, number + 1))
            return None if self._closed else self._entries.get(key)
