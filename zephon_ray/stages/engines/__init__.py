"""Engines: what turns texts into ids.

`hf` is the reference: the Hugging Face tokenizers library. A fast engine is a guest that gives the same ids, or is not used:
`Encoder` checks it before its first unit, samples it ever after, and makes a unit again with the reference where the two differ.
"""

from zephon_ray.stages.engines.encoder import Encoder, encoder_of, let_go

__all__ = ["Encoder", "encoder_of", "let_go"]
