"""Worker for CPUs that evicts."""

from __future__ import annotations

from typing import ClassVar

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from millpond_vllm.cache_layout import HeadMajorLayout
from millpond_vllm.worker import EvictingWorker
from millpond_vllm.worker_state import EvictingLayer


class MillpondCPUWorker(EvictingWorker, CPUWorker):
    """vLLM's worker for CPUs, whose requests evict."""

    backends: ClassVar[dict[str, str]] = {"CPU_ATTN": "millpond_vllm.backends.cpu.EvictingCPUBackend"}

    def layout(self, layer: EvictingLayer, block: int) -> HeadMajorLayout:
        """Return the layout that the CPU kernels of this processor use."""
        module = layer.module
        scales = module._k_scale_float, module._v_scale_float

        def write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
            if layer.bytes_as is not None:  # the writer divides by these
                keys, values = keys * scales[0], values * scales[1]
            module.impl.do_kv_cache_update(module, keys, values, cache, slots)

        cache = layer.cache
        dtypes = module.dtype, cache.dtype, layer.bytes_as or cache.dtype
        return HeadMajorLayout.probe(layer.n_kv_heads, block, cache.shape[3] // 2, dtypes, write)
