"""The public names, and nearly nothing else: LLM training data made while the model trains.

Names are imported when they are first used, so `import zephon_ray` costs nothing and imports neither ray nor torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zephon_ray.batches import Batch, GlobalBatch
    from zephon_ray.errors import (
        BadRecordError,
        DataChangedError,
        DifferenceError,
        FeedError,
        FencedError,
        RecipeError,
        RefusedError,
        ReplayError,
        RunDirectoryError,
        RunnerError,
        SourceError,
        StateError,
        StorageError,
        SystemFault,
        UserError,
        ZephonError,
    )
    from zephon_ray.feed.client import connect
    from zephon_ray.loader import Loader
    from zephon_ray.recipe import Recipe, load_recipe

# Arrow's allocator gives memory back to the system 10 ms after it was freed, and a unit later asks for as much: reading then spends a
# fifth of its time, and more, on pages that are cleared anew. It looks at this once, when pyarrow is imported. Milliseconds.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "1000")

__version__ = "0.1.0"

__all__ = [
    "BadRecordError",
    "Batch",
    "DataChangedError",
    "DifferenceError",
    "FeedError",
    "FencedError",
    "GlobalBatch",
    "Loader",
    "Recipe",
    "RecipeError",
    "RefusedError",
    "ReplayError",
    "RunDirectoryError",
    "RunnerError",
    "SourceError",
    "StateError",
    "StorageError",
    "SystemFault",
    "UserError",
    "ZephonError",
    "__version__",
    "connect",
    "load_recipe",
]

_HOMES = {
    "Batch": "batches",
    "GlobalBatch": "batches",
    "Loader": "loader",
    "Recipe": "recipe",
    "connect": "feed.client",
    "load_recipe": "recipe",
}
"""The module of each public name that is not an error."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'zephon_ray' has no attribute {name!r}")
    home = importlib.import_module(f"zephon_ray.{_HOMES.get(name, 'errors')}")
    value = globals()[name] = getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
