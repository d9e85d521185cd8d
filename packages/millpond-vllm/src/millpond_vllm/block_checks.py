"""Checks of the block pool after each step, for tests of a whole server: MILLPOND_VLLM_CHECK_BLOCKS=1 turns them on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millpond_vllm.block_manager import EvictingManager

#: Environment variable that turns the checks on.
VARIABLE = "MILLPOND_VLLM_CHECK_BLOCKS"


def wanted() -> bool:
    """Whether the environment asks for the checks."""
    return os.environ.get(VARIABLE) == "1"


def check_blocks(manager: EvictingManager, n_requests: int) -> None:
    """Check that no packed block has a hash or a second owner, and that an idle engine holds no block.

    Args:
        manager: Blocks of the group that evicts.
        n_requests: Requests that have not ended.

    Raises:
        AssertionError: one of it does not hold; the engine ends.
    """
    for request_id, event in manager.events.items():
        blocks, times = manager.req_to_blocks[request_id], manager.times[request_id]
        for index, block in enumerate(blocks[: times.packed]):
            assert block.block_hash is None, f"packed block {index} of request {request_id} has a hash"
            assert block.ref_cnt == 1, f"packed block {index} of request {request_id} has {block.ref_cnt} owners"
        for index, block in enumerate(blocks[event // manager.block_size :], event // manager.block_size):
            assert block.block_hash is None, f"block {index} of request {request_id}, behind an eviction, has a hash"
    if n_requests == 0:
        free, all_blocks = manager.block_pool.get_num_free_blocks(), manager.block_pool.num_gpu_blocks - 1
        assert free == all_blocks, f"{all_blocks - free} blocks are held, and no request is"
        known = manager.events.keys() | manager.times.keys()
        assert not known, f"{len(known)} requests that ended are still known"
