"""A manifest: the shards of a source and how they fall into groups, found from names, sizes and footers alone.

`shards` lists files, `text_column` finds the text in a schema, `groups` numbers what workers read, `build` makes a manifest of a
recipe's source. No text is read here: what lies inside a group is the affair of `stages`.
"""

from __future__ import annotations

from zephon_ray.manifest.build import build_manifest, build_manifests
from zephon_ray.manifest.groups import Group, SourceManifest
from zephon_ray.manifest.shards import Shard, ShardFile

__all__ = ["Group", "Shard", "ShardFile", "SourceManifest", "build_manifest", "build_manifests"]
