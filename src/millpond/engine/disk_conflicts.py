"""Settings of an engine that conflict with weights or KV on a disk."""

from __future__ import annotations

from millpond.cache.tiered.disk_tier import DiskTier
from millpond.engine.config import EngineConfig
from millpond.errors import OptionError
from millpond.models.weights.streamed import StreamedLayers

_IN_MEMORY = "needs weights and KV in memory; leave it out where memory= or plan= move them to a disk"


def check_disk(config: EngineConfig, streamed: StreamedLayers | None, tier: DiskTier | None) -> None:
    """Check that no setting needs in memory what is on a disk.

    Raises:
        OptionError: such a setting.
    """
    if tier is not None and config.prefix_cache:
        raise OptionError(
            f"prefix_cache={config.prefix_cache!r} keeps pages of prompts in memory; leave it out where KV lies on a "
            "disk"
        )
    if tier is not None and config.overflow == "rolling":
        raise OptionError(
            "overflow='rolling' writes all entries of a sequence at once; leave it out where KV lies on a disk"
        )
    if tier is None and streamed is None:
        return
    for name in ("chunk_store", "cache_dir"):
        if getattr(config, name) is not None:
            raise OptionError(f"{name}= {_IN_MEMORY}")
