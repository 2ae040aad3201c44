"""The reference engine: the Hugging Face tokenizers library. What it gives is what the contract calls the encoding."""

from __future__ import annotations

from array import array

import numpy as np
import tokenizers

from zephon_ray.stages.engines.base import Encoded
from zephon_ray.stages.texts import Texts

CHUNK_BYTES = 1 << 18
"""Bytes of text that it is given at a time: it takes about a hundred times the memory of the text's ids."""


def load_tokenizer(data: bytes) -> tokenizers.Tokenizer:
    """A tokenizer from its file's content, with truncation and padding off.

    Raises:
        Exception: it is none that the installed release reads; the library has no class of its own.
    """
    tokenizer = tokenizers.Tokenizer.from_str(data.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class HfEngine:
    """`encode_batch_fast` of the library.

    Args:
        data: the tokenizer file's content.
        plain: control tokens spelled out in a text are ordinary text.

    Attributes:
        tokenizer: the library's.
    """

    def __init__(self, data: bytes, plain: bool) -> None:
        self.name = f"tokenizers {tokenizers.__version__}"
        self.tokenizer = load_tokenizer(data)
        self.tokenizer.encode_special_tokens = plain

    @property
    def added_tokens(self) -> list[str]:
        """As they are spelled, by id."""
        return [token.content for _, token in sorted(self.tokenizer.get_added_tokens_decoder().items())]

    def encode(self, texts: Texts) -> Encoded:
        """The ids of each text."""
        return Encoded.join([self._encode(texts.strings(first, end)) for first, end in texts.chunks(CHUNK_BYTES)])

    def _encode(self, strings: list[str]) -> Encoded:
        batch = self.tokenizer.encode_batch_fast(strings, add_special_tokens=False)
        # The library gives lists of ints; array.array takes them three times faster than numpy or Arrow do.
        ids = [array("I", encoding.ids) for encoding in batch]
        return Encoded(ids=np.frombuffer(b"".join(ids), np.uint32), sizes=np.fromiter(map(len, ids), np.int64, len(ids)))
