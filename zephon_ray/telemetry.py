"""Telemetry: what is measured of a process, each with its unit. Nothing here decides anything.

What runners count of their work stands in `runners.base.RunnerStats`.
"""

from __future__ import annotations

import resource


def cpu_seconds() -> float:
    """CPU seconds, user and system, of this process and of its child processes that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
