"""The CPU as a device that TorchTitan's trainer takes: what has to be replaced in it where there is no accelerator.

`install` changes TorchTitan in this process, for good. So it is for processes that do nothing else: the ranks of the proof. No loader
imports this module, and nothing is changed when it is imported.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

_KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"
"""Kernels for mixtures of experts. It needs triton, which is nowhere without a GPU; the proof's model has no experts."""

_BYTES = 1 << 30
"""Memory that the stand-in for a device says it has. TorchTitan only prints it."""


def install() -> None:
    """Make TorchTitan train on the CPU. Call it before anything of TorchTitan is imported, and only once.

    Raises:
        RuntimeError: TorchTitan's trainer was imported before.
    """
    if "torchtitan.trainer" in sys.modules:
        raise RuntimeError("torchtitan.trainer was imported already, with names that point to a GPU. Install this first")
    sys.modules[_KERNELS] = _absent_kernels()
    _use_cpu_device()
    _allow_timeouts()
    _use_dense_attention()
    _sum_gradients()
    _never_sleep()


def _absent_kernels() -> types.ModuleType:
    module = types.ModuleType(_KERNELS, "A stand-in: its kernels have names, and nothing calls them.")
    module.__getattr__ = lambda name: None  # type: ignore[method-assign]
    return module


class _CpuDevice(types.ModuleType):
    """`torch.cpu` with the functions of `torch.cuda` that the trainer calls."""

    def __init__(self) -> None:
        super().__init__("cpu_device")

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch.cpu, name)

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def get_device_name(_device: Any = None) -> str:
        return "CPU"

    @staticmethod
    def get_device_properties(_device: Any = None) -> Any:
        return types.SimpleNamespace(total_memory=_BYTES)

    @staticmethod
    def memory_stats(_device: Any = None) -> dict[str, int]:
        return dict.fromkeys(("active_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries", "num_ooms"), 0)

    @staticmethod
    def reset_peak_memory_stats(_device: Any = None) -> None:
        pass

    @staticmethod
    def empty_cache() -> None:
        pass


def _use_cpu_device() -> None:
    """First of all: other modules take these two names when they are imported."""
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", _CpuDevice()


def _allow_timeouts() -> None:
    """In torch 2.13 `set_timeout` has its old name only."""
    import torch.distributed

    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = torch.distributed.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]


def _use_dense_attention() -> None:
    """FlexAttention has no backward on the CPU: its mask, written out, is given to the attention that has one."""
    import torch
    from torch.nn.attention.flex_attention import BlockMask
    from torchtitan.models.common import attention

    class DenseMask(BlockMask):  # type: ignore[misc]
        """A mask that is written out: `seen`, bool [rows, 1, queries, keys]."""

        def __init__(self, mask_mod: Callable[..., Any], rows: int, _heads: None, queries: int, keys: int, **_: Any) -> None:
            row, query, key = (torch.arange(count) for count in (rows, queries, keys))
            seen = mask_mod(row[:, None, None, None], torch.tensor(0), query[:, None], key)
            self.seen = seen.expand(rows, 1, queries, keys)

    def attend(query: Any, key: Any, value: Any, *, block_mask: DenseMask, scale: Any, enable_gqa: bool, **_: Any) -> tuple[Any, None]:
        attended = torch.nn.functional.scaled_dot_product_attention
        return attended(query, key, value, attn_mask=block_mask.seen, scale=scale, enable_gqa=enable_gqa), None

    attention.FlexAttention.compiled_flex_attn = staticmethod(attend)
    attention._compiled_create_block_mask = DenseMask


def _sum_gradients() -> None:
    """Gloo cannot multiply while it reduces; TorchTitan divides by the tokens of the whole batch itself."""
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.models.llama3 import parallelize

    apply: Callable[..., Any] = parallelize.apply_fsdp_to_decoder

    def apply_and_sum(model: Any, *args: Any, **options: Any) -> Any:
        made = apply(model, *args, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return made

    parallelize.apply_fsdp_to_decoder = apply_and_sum


def _never_sleep() -> None:
    """The trainer ends with two seconds of sleep for the other ranks' sake; the proof's ranks wait for each other instead."""
    import time

    from torchtitan import trainer

    trainer.time = types.SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)
