"""Runners: who makes units, and where. The contract is in `base`, the choice in `registry`."""

from __future__ import annotations

from zephon_ray.runners.registry import RUNNERS, default_workers, idle_options, make_runner

__all__ = ["RUNNERS", "default_workers", "idle_options", "make_runner"]
