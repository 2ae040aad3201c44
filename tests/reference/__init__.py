"""The determinism contract (version 1) once more: slow, plain, everything in memory; the product is compared with it.

It is written from the text of the contract alone and shares no line with the package that it judges. Where it stands:
`data` reads documents, `order` puts their pieces into windows and deals them, `run` mixes, packs, digests and keeps the state.
It does not validate recipes, bound memory, or care for speed.
"""

from __future__ import annotations

from tests.reference.data import EmptySource
from tests.reference.run import Batch, Run, reference_batches, reference_first_used, reference_state

__all__ = ["Batch", "EmptySource", "Run", "reference_batches", "reference_first_used", "reference_state"]
