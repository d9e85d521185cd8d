"""The disk behind an engine's prefix cache."""

from __future__ import annotations

import tempfile
from pathlib import Path

from millpond.budget import parse_bytes
from millpond.cache.tiered.block_store import BlockStore
from millpond.engine.config import EngineConfig
from millpond.models.cache_folder import check_folder


def open_prefix_store(config: EngineConfig) -> BlockStore | None:
    """Return a store of `prefix_disk` bytes in `prefix_folder`; None where there is no disk.

    Raises:
        OptionError: a folder that is missing or cannot be written.
        DataError: no file can be made there.
    """
    if config.prefix_disk is None:
        return None
    folder = Path(tempfile.gettempdir() if config.prefix_folder is None else config.prefix_folder)
    check_folder(folder)
    return BlockStore(folder, parse_bytes(config.prefix_disk))
