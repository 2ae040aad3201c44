"""What the process imports that ranks are forked of, and nobody else.

All of that stays: no rank's collector need look at it, and copy it so.
"""

from __future__ import annotations

import gc

import zephon_ray.training.elastic_proof.rank  # noqa: F401

gc.collect()
gc.freeze()
