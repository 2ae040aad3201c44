"""Keys, digests and canonical JSON: every hash of the contract, and nothing that knows what is hashed.

Sources: `mix64` is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014), 0x9E3779B97F4A7C15 its golden-ratio increment; digests are XXH3-128 in canonical
(big-endian) form, https://xxhash.com.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

MASK = (1 << 64) - 1
GROUP_ORDER, DOC_ORDER, PHASE = 1, 2, 3
"""Domains of `key64`: they keep the keys of different decisions apart."""

_GOLDEN, _MUL1, _MUL2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

U64 = npt.NDArray[np.uint64]


def mix64(x: int) -> int:
    """The 64-bit finaliser of the contract. `x` is taken modulo 2^64."""
    x &= MASK
    x = ((x ^ (x >> 30)) * _MUL1) & MASK
    x = ((x ^ (x >> 27)) * _MUL2) & MASK
    return x ^ (x >> 31)


def key64(*parts: int) -> int:
    """Fold integers (each in [0, 2^64)), from left to right, into one key in [0, 2^64)."""
    key = 0
    for part in parts:
        key = mix64(key + _GOLDEN + part)
    return key


def extend_key64(key: int | U64, *parts: npt.NDArray[Any]) -> U64:
    """Fold arrays of integers into keys: `extend_key64(key64(a, b), c, d)[i] == key64(a, b, c[i], d[i])`.

    Args:
        key: a key so far, or an array [n] of them.
        parts: integer arrays [n] (or shapes that broadcast), values >= 0.

    Returns:
        uint64 array [n].
    """
    h = np.asarray(key, np.uint64)
    for part in parts:
        h = h + (np.uint64(_GOLDEN) + part.astype(np.uint64))
        h ^= h >> np.uint64(30)
        h *= np.uint64(_MUL1)
        h ^= h >> np.uint64(27)
        h *= np.uint64(_MUL2)
        h ^= h >> np.uint64(31)
    return h


def digest128(data: Any) -> bytes:
    """XXH3-128 of a contiguous buffer, seed 0, the 16 bytes of the canonical form."""
    return xxhash.xxh3_128_digest(data)


def digests128(rows: npt.NDArray[Any]) -> tuple[bytes, ...]:
    """`digest128` of each `rows[i]`, contiguous each."""
    return tuple(map(xxhash.xxh3_128_digest, rows))


def chain_digest(previous: bytes, step: int, batch: bytes) -> bytes:
    """chain[t] from chain[t-1] (16 bytes), t (from 1) and the digest of batch t (16 bytes)."""
    return digest128(previous + step.to_bytes(8, "little") + batch)


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys, no blanks and UTF-8, so that equal values give equal bytes. No floats.

    Raises:
        ValueError: the value holds NaN or an infinity.
        TypeError: the value is not JSON.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
