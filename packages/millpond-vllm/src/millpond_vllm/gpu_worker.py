"""Worker for GPUs that evicts."""

from __future__ import annotations

from typing import ClassVar

from vllm.v1.worker.gpu_worker import Worker

from millpond_vllm.cache_layout import StridedLayout
from millpond_vllm.worker import EvictingWorker
from millpond_vllm.worker_state import EvictingLayer


class MillpondGPUWorker(EvictingWorker, Worker):
    """vLLM's worker for GPUs, whose requests evict."""

    backends: ClassVar[dict[str, str]] = {
        "FLASH_ATTN": "millpond_vllm.backends.flash_attn.EvictingFlashAttentionBackend",
        "FLASHINFER": "millpond_vllm.backends.flashinfer.EvictingFlashInferBackend",
        "TRITON_ATTN": "millpond_vllm.backends.triton.EvictingTritonBackend",
    }

    def layout(self, layer: EvictingLayer, block: int) -> StridedLayout:
        """Return the layout of GPU kernels, whose blocks may be smaller than the manager's."""
        return StridedLayout(layer.module.head_size, block // layer.cache.shape[2])
