"""The fast engine: fastokens, which reads byte-level BPE tokenizers and gives ids as buffers, a hundred times cheaper than the reference.

Why it and no other: `docs/decisions/0009-engines.md`.
"""

from __future__ import annotations

import os
from importlib.metadata import version

import numpy as np

from zephon_ray.stages.engines.base import I64, Encoded, EngineUnfitError
from zephon_ray.stages.texts import Texts

LEAST_VERSION = (0, 3, 5)
"""Releases before it gave ids that depended on the text before (a whitespace run at the end of a shared beginning of 4 KiB)."""


CHUNK_BYTES = 2 << 20
"""Bytes of text that it is given at a time. A call has its price, and needs little memory besides: a unit of the usual size is one."""


class FastEngine:
    """`encode_batch_flat` of the library.

    Args:
        data: the tokenizer file's content.
        plain: control tokens spelled out in a text are ordinary text.

    Raises:
        EngineUnfitError: the library is not installed, is too old, or does not read this tokenizer.
    """

    def __init__(self, data: bytes, plain: bool) -> None:
        # Read by the library once a process. The workers are the parallelism, as many as the recipe allows; its own threads, one a CPU,
        # would come on top of them.
        os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
        try:
            import fastokens
        except ImportError as error:
            raise EngineUnfitError(f"fastokens cannot be imported ({error})") from error
        found = version("fastokens")
        if tuple(int(part) for part in found.split(".")[:3] if part.isdecimal()) < LEAST_VERSION:
            raise EngineUnfitError(f"fastokens {found} is older than {'.'.join(map(str, LEAST_VERSION))}")
        self.name = f"fastokens {found}"
        try:
            self._tokenizer = fastokens.Tokenizer.from_json_str(data.decode())
        except Exception as error:  # whatever it does not read, the reference may
            raise EngineUnfitError(f"{self.name} does not read this tokenizer ({error})") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._plain = plain

    def encode(self, texts: Texts) -> Encoded:
        """The ids of each text.

        Raises:
            Exception: a text that it cannot encode.
        """
        return Encoded.join([self._encode(texts.strings(first, end)) for first, end in texts.chunks(CHUNK_BYTES)])

    def _encode(self, strings: list[str]) -> Encoded:
        ids, offsets = self._tokenizer.encode_batch_flat(strings, split_special_tokens=self._plain)
        ends: I64 = np.frombuffer(offsets, np.int64)
        return Encoded(ids=np.frombuffer(ids, np.uint32), sizes=ends[1:] - ends[:-1])
