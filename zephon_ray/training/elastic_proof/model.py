"""The model of the proof: a Llama of two layers, as TorchTitan builds one, so small that a step takes a fraction of a second."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

LAYERS, HEADS = 2, 4


def tiny_llama(vocabulary: int, width: int) -> Any:
    """TorchTitan's `ModelSpec` of it.

    Args:
        vocabulary: ids, at least 1.
        width: of the residual stream; a multiple of 8 (4 heads, whose sizes are even).
    """
    from torchtitan.models.llama3 import Llama3Model, parallelize_llama
    from torchtitan.protocols.model_spec import ModelSpec

    config = Llama3Model.Config(
        dim=width,
        vocab_size=vocabulary,
        tok_embeddings=_embedding(vocabulary, width),
        norm=_norm(width),
        lm_head=_head(vocabulary, width),
        layers=[_layer(width) for _ in range(LAYERS)],
    )
    return ModelSpec(
        name="llama3", flavor="tiny", model=config, parallelize_fn=parallelize_llama, pipelining_fn=None, post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )  # fmt: skip


def _init(std: float) -> dict[str, Any]:
    return {"weight": partial(nn.init.trunc_normal_, std=std), "bias": nn.init.zeros_}


def _embedding(vocabulary: int, width: int) -> Any:
    from torchtitan.models.common import Embedding

    return Embedding.Config(num_embeddings=vocabulary, embedding_dim=width, param_init={"weight": partial(nn.init.normal_, std=1.0)})


def _norm(width: int) -> Any:
    from torchtitan.models.common import RMSNorm

    return RMSNorm.Config(normalized_shape=width, param_init={"weight": nn.init.ones_})


def _head(vocabulary: int, width: int) -> Any:
    from torchtitan.models.common import Linear

    return Linear.Config(in_features=width, out_features=vocabulary, param_init=_init(width**-0.5))


def _layer(width: int) -> Any:
    from torchtitan.models.common import ComplexRoPE
    from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
    from torchtitan.models.llama3.model import Llama3TransformerBlock

    rope = ComplexRoPE.Config(dim=width // HEADS, max_seq_len=131072, theta=500000, scaling="none")
    attention = make_gqa_config(
        dim=width, n_heads=HEADS, wqkv_param_init=_init(0.02), wo_param_init=_init(0.02), inner_attention=get_attention_config("flex"),
        fuse_qkv=True, rope=rope,
    )  # fmt: skip
    feed_forward = make_ffn_config(dim=width, hidden_dim=2 * width, w1_param_init=_init(0.02), w2w3_param_init=_init(0.02))
    return Llama3TransformerBlock.Config(attention_norm=_norm(width), ffn_norm=_norm(width), attention=attention, feed_forward=feed_forward)
