"""Doors to trainers: `torch` for any PyTorch loop, `torchtitan` for TorchTitan. Both give a rank's rows as int64 tensors.

Importing this package imports neither, but for one case: TorchTitan names an override `zephon_ray.training.torchtitan`, imports the part
before the last dot, and then looks for an override that this import has registered.
"""

from __future__ import annotations

import importlib
import sys

if "torchtitan.config.override" in sys.modules:
    importlib.import_module("zephon_ray.training.torchtitan")
