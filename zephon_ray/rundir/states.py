"""The saved states of a run, by step. What a state means is not known here; that its bytes are whole is."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import suppress

from zephon_ray.errors import StateError
from zephon_ray.hashing import sha256_hex
from zephon_ray.storage import Storage

STATE_EVERY = 100
"""A run saves its state at steps that this divides, besides those that a checkpoint asks for."""

PASSING = 2
"""States that are overwritten in turn: the newest one is never what a write that fails leaves damaged."""

_NAME = re.compile(r"(\d{12,})\.json")
_PASSING = "passing-{}.json"
_HEAD = '{{"step":{step},"sha256":"{sha256}","state":'
_STEP = re.compile(rb'\{"step":(\d+),')
_END = b"}\n"

_log = logging.getLogger(__name__)


class States:
    """Files `STEP.json` (12 digits): the step and a sha256 around the state, verbatim, so JSON if the state is JSON.

    Beside them `passing-0.json` and `passing-1.json`, of the same form, where states are needed for a moment only. They are overwritten,
    for nothing need then be deleted, which leaves marks of folders in buckets.

    Args:
        storage: opens URLs.
        url: the folder.
    """

    def __init__(self, storage: Storage, url: str) -> None:
        self._storage = storage
        self._url = url
        self._passed = 0
        self.damaged = 0
        """How many damaged states `nearest` has passed over."""

    def save(self, step: int, data: bytes) -> None:
        """Save the state after a step, whole or not at all; one that is there is replaced.

        Flush the ledger first: a state ahead of the ledger's end is of no use to `nearest(ledger.last.step)`.

        Args:
            step: the step, >= 0.
            data: the state's bytes.
        """
        self._storage.write_bytes(self._place(step), _head(step, data) + data + _END)

    def save_passing(self, step: int, data: bytes) -> None:
        """Save the state after a step in place of the last but one that was saved so. Only `nearest` finds it."""
        self._passed += 1
        place = self._storage.join(self._url, _PASSING.format(self._passed % PASSING))
        self._storage.write_bytes(place, _head(step, data) + data + _END)

    def steps(self) -> list[int]:
        """The steps with a state, ascending."""
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, self._storage.names(self._url)) if match)

    def load(self, step: int) -> bytes:
        """The state after a step.

        Raises:
            FileNotFoundError: it was not saved.
            StateError: the file is damaged.
        """
        return _unwrapped(self._storage.read_bytes(self._place(step)), step, self._place(step))

    def nearest(self, step: int, check: Callable[[bytes], object] | None = None) -> tuple[int, bytes] | None:
        """The newest sound state at or before a step, None if there is none and a run begins at its start.

        Damaged ones are passed over with a warning and counted, if an older sound one exists.

        Args:
            step: the step; that of the ledger's end to go on with a run.
            check: raises StateError for bytes that are not a sound state.

        Raises:
            StateError: there are states, but each is damaged.
        """
        faults: list[StateError] = []
        passing = self._passing(faults)
        for candidate in sorted({saved for saved in (*self.steps(), *passing) if saved <= step}, reverse=True):
            try:
                data = passing[candidate] if candidate in passing else self.load(candidate)
                if check is not None:
                    check(data)
            except StateError as error:
                faults.append(error)
                continue
            for fault in faults:
                _log.warning("%s It is passed over for that of step %d.", fault, candidate)
            self.damaged += len(faults)
            return candidate, data
        if faults:
            raise StateError(
                f"{faults[0]} No older one is sound ({len(faults)} damaged). Restore it from a copy, or delete the damaged files in "
                f"{self._url} to make all steps again from the start."
            ) from faults[0]
        return None

    def _passing(self, faults: list[StateError]) -> dict[int, bytes]:
        """The sound ones by step; what is wrong with others is added to `faults`."""
        found = {}
        for slot in range(PASSING):
            place = self._storage.join(self._url, _PASSING.format(slot))
            with suppress(FileNotFoundError):
                file = self._storage.read_bytes(place)
                head = _STEP.match(file)
                try:
                    step = int(head[1]) if head else -1
                    found[step] = _unwrapped(file, step, place)
                except StateError as error:
                    faults.append(error)
        return found

    def _place(self, step: int) -> str:
        return self._storage.join(self._url, f"{step:012d}.json")


def _unwrapped(file: bytes, step: int, place: str) -> bytes:
    """The state in a file.

    Raises:
        StateError: it is damaged, or that of another step.
    """
    data = file[len(_head(step, b"")) : -len(_END)]
    if file != _head(step, data) + data + _END:
        raise StateError(
            f"{place}: the saved state of step {step} is damaged ({len(file)} bytes do not match its checksum). "
            "Use an older one, or restore it from a copy."
        )
    return data


def _head(step: int, data: bytes) -> bytes:
    return _HEAD.format(step=step, sha256=sha256_hex(data)).encode()
