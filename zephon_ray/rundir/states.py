"""The saved states of a run, by step. What a state means is not known here; that its bytes are whole is."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from zephon_ray.errors import StateError
from zephon_ray.hashing import sha256_hex
from zephon_ray.storage import Storage

STATE_EVERY = 100
"""A run saves its state at steps that this divides, besides those that a checkpoint asks for."""

_NAME = re.compile(r"(\d{12,})\.json")
_HEAD = '{{"step":{step},"sha256":"{sha256}","state":'
_END = b"}\n"

_log = logging.getLogger(__name__)


class States:
    """Files `STEP.json` (12 digits): the step and a sha256 around the state, verbatim, so JSON if the state is JSON.

    Args:
        storage: opens URLs.
        url: the folder.
    """

    def __init__(self, storage: Storage, url: str) -> None:
        self._storage = storage
        self._url = url
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

    def steps(self) -> list[int]:
        """The steps with a state, ascending."""
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, self._storage.names(self._url)) if match)

    def load(self, step: int) -> bytes:
        """The state after a step.

        Raises:
            FileNotFoundError: it was not saved.
            StateError: the file is damaged.
        """
        file = self._storage.read_bytes(self._place(step))
        data = file[len(_head(step, b"")) : -len(_END)]
        if file != _head(step, data) + data + _END:
            raise StateError(
                f"{self._place(step)}: the saved state of step {step} is damaged ({len(file)} bytes do not match its checksum). "
                "Use an older one, or restore it from a copy."
            )
        return data

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
        for candidate in reversed([saved for saved in self.steps() if saved <= step]):
            try:
                data = self.load(candidate)
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

    def _place(self, step: int) -> str:
        return self._storage.join(self._url, f"{step:012d}.json")


def _head(step: int, data: bytes) -> bytes:
    return _HEAD.format(step=step, sha256=sha256_hex(data)).encode()
