"""Storage: files and folders under any URL, and the only place where anything is tried twice.

Local paths (plain, or `file://` URLs) and `s3://` go through pyarrow's filesystems, every other URL through fsspec. Only faults that
pass (connections, time-outs, a store that asks to slow down, credentials that ran out) are tried again, and never on a local disk.
Credentials come from the environment or the providers that each process finds there; they are never held here, nor handed on. What a
file holds is no concern of this package. `docs/storage.md` tells users what happens when.
"""

from __future__ import annotations

from zephon_ray.storage.local import Listed, is_local, join, local_path
from zephon_ray.storage.store import Storage
from zephon_ray.storage.versions import Aged, FileVersion

__all__ = ["Aged", "FileVersion", "Listed", "Storage", "is_local", "join", "local_path"]
