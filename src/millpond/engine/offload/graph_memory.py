"""Memory of recorded decoding steps on a GPU, before there is one: their inputs, outputs and scratch."""

from __future__ import annotations

import torch

from millpond.engine.config import EngineConfig
from millpond.engine.offload.model_size import ModelSize
from millpond.engine.offload.planner import Workload
from millpond.kernels.cuda_graphs import MIN_WIDTH, graph_bytes, recording, roomy

#: Slots whose partial attention is kept, in float32.
SPLIT_SLOTS = 256


def records(device: torch.device) -> bool:
    """Return whether steps of a model all of whose layers are on a device are recorded."""
    return device.type == "cuda" and recording()


def recorded_bytes(size: ModelSize, config: EngineConfig, workload: Workload) -> int:
    """Return the bytes of graphs of up to `max_running` rows, and of the scratch they share.

    Args:
        size: Sizes of the model.
        config: Settings of the engine.
        workload: Longest texts; of longer ones page tables are wider.
    """
    width = roomy(max(-(-(workload.prompt + workload.new) // config.page_slots), MIN_WIDTH))
    rows = roomy(config.max_running)
    heads = [(shape.n_kv_heads, shape.n_queries) for shape in size.shapes]
    row_bytes = size.vocabulary * size.dtype.itemsize
    graphs = sum(graph_bytes(heads, n, width, row_bytes) for n in {roomy(n) for n in range(1, rows + 1)})
    slots = width * config.page_slots
    scratch = [
        rows * shape.n_queries * 4 * (slots + -(-slots // SPLIT_SLOTS) * (shape.value_dim + 2)) for shape in size.shapes
    ]
    return graphs + max(scratch)
