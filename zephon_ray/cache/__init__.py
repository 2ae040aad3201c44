"""The token cache: tokenised units that runs with the same data and tokenizer share, whatever their mixture, lanes, rows and packing.

`keys` names a unit by the state of its shard and all that its ids depend on, `entry` is a unit as a file, `store` keeps such files under
a URL within a bound, `tokeniser` looks there before it tokenises. Nothing here decides an order, and without it every batch is the same.
What is compared, and what cannot be seen: `docs/token_cache.md`.
"""

from __future__ import annotations

from zephon_ray.cache.store import CacheCounters, CacheSize, TokenCache, measure
from zephon_ray.cache.tokeniser import CachedTokeniser, Tokeniser, open_tokeniser

__all__ = ["CacheCounters", "CacheSize", "CachedTokeniser", "TokenCache", "Tokeniser", "measure", "open_tokeniser"]
