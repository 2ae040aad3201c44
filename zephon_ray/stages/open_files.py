"""Open files: whether a process may open more of them."""

from __future__ import annotations

import resource
import threading
from contextlib import suppress

_lock = threading.Lock()  # the limit is the process's, and is looked at before it is set


def has_room(fd: int) -> bool:
    """Whether file descriptors are left beyond one that was just opened.

    The soft limit is doubled, up to the hard one, as soon as half of it is used: others in the process need files too.

    Args:
        fd: the descriptor. A system gives the lowest number that is free and refuses numbers from the limit on, so this is what counts.

    Returns:
        False where three quarters of all that may be had are used.
    """
    with _lock:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY or fd < soft // 2:
            return True
        more = 2 * soft if hard == resource.RLIM_INFINITY else min(2 * soft, hard)
        if more > soft:
            with suppress(OSError, ValueError):  # some systems have a lower limit than the one that they tell of
                resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
                soft = more
        return fd < soft * 3 // 4
