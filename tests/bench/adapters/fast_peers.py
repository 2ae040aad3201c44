"""Grain and TorchTitan's stock loader with the fast engine in place of theirs, for the loader harness: what is left is their own cost.

The harness's adapters `grain_plain` and `titan` build both loaders; only what turns a text into ids is another. A plan's line gives `peer`
("grain" or "torchtitan") and that adapter's options.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np

EOS = 100257


class FastIds:
    """Ids of a text, an end of text behind them. It is pickled as a path: a worker process loads its own."""

    def __init__(self, path: str) -> None:
        self.path, self._tokenizer = path, None

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_tokenizer": None}

    def ids(self, text: str) -> np.ndarray:
        """Int32 [ids]."""
        if self._tokenizer is None:
            self._tokenizer = importlib.import_module("fastokens").Tokenizer.from_file(self.path)
        flat, _ = self._tokenizer.encode_batch_flat([text])
        return np.append(np.frombuffer(flat, np.int32), np.int32(EOS))

    def __call__(self, text: str) -> dict[str, np.ndarray]:
        """As Grain's pipeline takes them."""
        ids = self.ids(text)
        return {"ids": ids, "pos": np.arange(len(ids), dtype=np.int32)}


def batches(cfg: Any) -> Iterator[Any]:
    peer = importlib.import_module({"grain": "adapters.grain_plain", "torchtitan": "adapters.titan"}[cfg.peer])
    if cfg.peer == "grain":
        peer.Tok = FastIds
    else:
        theirs, fast = peer.tokenizer, FastIds(cfg.tok)

        def tokenizer(cfg: Any) -> Any:
            made = theirs(cfg)
            made.encode = lambda text, **_: fast.ids(text).tolist()  # its buffer is a list of ints
            return made

        peer.tokenizer = tokenizer
    yield from peer.batches(cfg)
