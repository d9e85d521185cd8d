"""The parts of an engine, built from its settings."""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from millpond.budget import parse_bytes
from millpond.cache.layer.host_layer_cache import HostKV
from millpond.cache.pages.memory_limit import MemoryLimit
from millpond.cache.paging.choose import LIVE, keeps_prompts, rule_named
from millpond.cache.swap import SwapFiles
from millpond.cache.tiered.block_store import BlockStore
from millpond.cache.tiered.coded_block import BlockCodec
from millpond.cache.tiered.disk_tier import DiskTier
from millpond.codec import codecs_of, resolve
from millpond.engine.cache_snapshots import SnapshotStore
from millpond.engine.chunks.loaded import LoadedChunks
from millpond.engine.chunks.reuse import ChunkLoadSource, ChunkReuse, model_mark
from millpond.engine.coded.sequence_codec import SequenceCodec, check_codes
from millpond.engine.config import EngineConfig
from millpond.engine.decode_groups import DecodeGroups
from millpond.engine.device_memory import page_limit
from millpond.engine.file_loads import FileLoads
from millpond.engine.memory_estimate import check_limit
from millpond.engine.outputs import EngineStats
from millpond.engine.prefix_cache import PrefixCache
from millpond.engine.prompt_images import ImageNumbers
from millpond.engine.request import CacheOptions
from millpond.engine.request_table import RequestTable
from millpond.engine.sampling.sampler import Sampler
from millpond.engine.scheduler import Scheduler
from millpond.engine.scheduler_request import RequestStatus
from millpond.engine.sessions.reuse import SessionReuse, check_continues
from millpond.engine.sessions.store import DEFAULT_DISK, SessionStore
from millpond.engine.sessions.stored_turn import session_mark
from millpond.engine.shared_prefixes import SharedPrefixes
from millpond.engine.storage_codec import ModelCodec, format_calibration
from millpond.errors import OptionError
from millpond.hf.document import fingerprint
from millpond.hf.key_biases import loses_by_bias, warn_of_bias
from millpond.hf.model_support import unwrapped
from millpond.models.cache_folder import check_folder
from millpond.models.weights.streamed import StreamedLayers
from millpond.runner.cache_factory import CacheFactory
from millpond.runner.packed_model import PackedModel

_log = logging.getLogger(__name__)

_COUNTED = (
    "prompt_tokens",
    "generated_tokens",
    "shared_tokens",
    "reused_tokens",
    "restored_tokens",
    "preemptions",
    "finished",
    "evicted_entries",
)


@dataclass(frozen=True, slots=True)
class Components:
    """Parts that the collaborators of an engine share; built once, closed in reverse order.

    Attributes:
        model: The decoder.
        tokenizer: Its tokenizer; None: requests bring token ids and get no text.
        config: Settings.
        model_mark: Returns the mark of the model and its weights in snapshots of requests, computed by the first call.
        memory: Limit of all page pools together.
        scheduler: Chooses the requests of each step.
        sampler: Chooses tokens.
        requests: Requests in flight.
        decode_groups: Groups by cache options.
        default_cache: Options of requests that name none.
        cache_factory: Factory of their caches.
        prefix_cache: Pages of prompts that later prompts begin with.
        prefix_store: Disk of these pages; None: there is none.
        shared_prefixes: Common beginnings of planned batches.
        image_numbers: Numbers of the images of prompts.
        snapshots: Entries of watched requests, by layer.
        swap_files: Files of preempted requests; None: they stay in memory.
        disk_tier: Disk for KV of some layers; None: all are in memory.
        chunk_reuse: Chunk store; None: prompts hold no chunks.
        chunk_loads: Chunks that are read from files before their prompts begin; None: none are.
        sessions: Stored turns; None: finished turns are not stored.
        storage_codec: Codec of what waits or travels; None: nothing is coded.
        sequence_codec: The same for whole sequences; None: they are stored and sent as they are.
        file_loads: All loads that requests may wait for.
        counts: Counters so far, by fields of `EngineStats`.
    """

    model: PackedModel
    tokenizer: Any
    config: EngineConfig
    model_mark: Callable[[], str]
    memory: MemoryLimit
    scheduler: Scheduler
    sampler: Sampler
    requests: RequestTable
    decode_groups: DecodeGroups
    default_cache: CacheOptions
    cache_factory: CacheFactory
    prefix_cache: PrefixCache
    prefix_store: BlockStore | None
    shared_prefixes: SharedPrefixes
    snapshots: SnapshotStore
    swap_files: SwapFiles | None
    disk_tier: DiskTier | None
    chunk_reuse: ChunkReuse | None
    chunk_loads: FileLoads[LoadedChunks] | None
    sessions: SessionReuse | None
    storage_codec: ModelCodec | None
    sequence_codec: SequenceCodec | None
    file_loads: tuple[FileLoads[Any], ...]
    image_numbers: ImageNumbers = field(default_factory=ImageNumbers)
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(_COUNTED, 0)))

    def trim(self) -> None:
        """Give free pages back to the system."""
        self.prefix_cache.release_unheld()
        for pool in self.memory.pools:
            pool.trim()

    def stats(self) -> EngineStats:
        """Return the figures of the engine now, without those of its sessions."""
        figures = [completion.kv for completion in self.requests.unfinished if completion.kv is not None]
        state_bytes = self.decode_groups.state_bytes
        codec = self.sequence_codec
        seconds = {"encode": 0.0, "decode": 0.0} if codec is None else codec.coder.seconds
        return EngineStats(
            running=self.scheduler.count(RequestStatus.PREFILL, RequestStatus.DECODE),
            waiting=self.scheduler.count(RequestStatus.WAITING),
            swapped=self.scheduler.count(RequestStatus.PREEMPTED),
            kv_bytes=self.memory.live_bytes - state_bytes,
            kv_reserved=self.memory.nbytes,
            kv_limit=self.memory.limit_bytes,
            kv_saved=sum(kv.full_kv_bytes - kv.kv_bytes for kv in figures),
            state_bytes=state_bytes,
            weight_bytes=self.model.weight_bytes,
            prefix=self.prefix_cache.stats(),
            chunks=None if self.chunk_reuse is None else self.chunk_reuse.store.stats(),
            sessions=None,
            swapped_bytes=sum(
                state.private_cache.swapped_bytes for state in self.requests if state.private_cache is not None
            ),
            encode_s=seconds["encode"],
            decode_s=seconds["decode"],
            **self.counts,
        )


def build(
    model: Any,
    tokenizer: Any,
    config: EngineConfig,
    closing: ExitStack,
    *,
    streamed: StreamedLayers | None = None,
    tier: DiskTier | None = None,
    host_kv: HostKV | None = None,
) -> Components:
    """Build the parts of an engine.

    Args:
        model: As `Engine` takes it.
        tokenizer: As `Engine` takes it.
        config: Settings.
        closing: Closes the parts; the caller owns it, also where this raises.
        streamed: As `Engine` takes it.
        tier: As `Engine` takes it.
        host_kv: As `Engine` takes it.

    Raises:
        UnsupportedModelError, OptionError, BudgetError, CacheMismatchError, DataError: see `Engine`.
    """
    check_disk(config, streamed, tier, host_kv)
    turn_mark = None if config.cache_dir is None else session_mark(model, config.weights)
    chunk_mark = None if config.chunk_store is None else model_mark(model, config.weights)
    storage_codec = None
    if config.storage_codec is not None:
        storage_codec = ModelCodec.of(model, config.storage_codec, config.calibration)
    packed_mark = None if config.weights is None else f"{config.weights} {fingerprint(unwrapped(model))}"
    packed = PackedModel(
        model,
        runner=config.runner,
        native_layers=config.native_layers,
        streamed=streamed,
        weights=config.weights,
        deterministic=config.deterministic,
    )
    if tier is not None:
        closing.callback(tier.close)
    closing.callback(packed.close)
    packed.limit_context(config.max_model_len)
    memory = host_kv.limits if host_kv is not None else MemoryLimit(page_limit(packed, config), pinned=tier is not None)
    # what a GPU has free is no promise to each request: where pages run short, the newest one waits
    scheduler = _scheduler(config, memory.limit_bytes if host_kv is not None else config.kv_limit)
    requests = RequestTable()
    chunk_reuse, chunk_loads = _chunk_reuse(config, packed, chunk_mark, storage_codec, closing)
    swap_files = None if config.swap_to is None else SwapFiles(config.swap_to)
    if swap_files is not None:
        closing.callback(swap_files.close)
    prefix_store = open_prefix_store(config)
    if prefix_store is not None:
        closing.callback(prefix_store.close)
    in_one_memory = tier is None and host_kv is None
    coded = None if storage_codec is None else storage_codec.blocks(config.page_slots, packed.dtype)
    prefix_cache = _prefix_cache(config, memory, prefix_store, requests, in_one_memory, coded)
    closing.callback(prefix_cache.close)
    decode_groups = _decode_groups(config, packed, memory, tokenizer, tier, host_kv, storage_codec)
    default_cache = decode_groups.complete(CacheOptions())
    cache_factory = decode_groups.group(default_cache).cache_factory
    check_limit(cache_factory, memory.limit_bytes, config.kv_limit is not None or host_kv is not None)
    sequence_codec = _sequence_codec(config, packed, storage_codec, cache_factory, closing)
    sessions = _sessions(config, packed, turn_mark, cache_factory, prefix_cache, sequence_codec, closing)
    of_sessions = None if sessions is None else sessions.loads
    if default_cache.budget is None:
        default_cache = replace(default_cache, budget=cache_factory.budget)
    return Components(
        model=packed,
        tokenizer=tokenizer,
        config=config,
        model_mark=cache(lambda: packed_mark or fingerprint(packed.model)),
        memory=memory,
        scheduler=scheduler,
        sampler=Sampler(tokenizer, packed.end_tokens),
        requests=requests,
        decode_groups=decode_groups,
        default_cache=default_cache,
        cache_factory=cache_factory,
        prefix_cache=prefix_cache,
        prefix_store=prefix_store,
        shared_prefixes=SharedPrefixes(memory, scheduler, requests, _batch_row_bytes(config, packed, tier), tier),
        snapshots=SnapshotStore(packed.layers),
        swap_files=swap_files,
        disk_tier=tier,
        chunk_reuse=chunk_reuse,
        chunk_loads=chunk_loads,
        sessions=sessions,
        storage_codec=storage_codec,
        sequence_codec=sequence_codec,
        file_loads=tuple(loads for loads in (chunk_loads, of_sessions) if loads is not None),
    )


def _scheduler(config: EngineConfig, promised_bytes: int | None) -> Scheduler:
    return Scheduler(
        promised_bytes,
        step_tokens=config.max_step_tokens,
        max_running=config.max_running,
        overcommit=config.overcommit,
        prompt_block=config.prompt_block,
        spread=config.spread_ages,
    )


def _batch_row_bytes(config: EngineConfig, model: PackedModel, tier: DiskTier | None) -> int:
    """Return `SchedulerRequest.row_bytes` of a batch.

    0 where a plan has fixed how many sequences run together: KV on a disk, or requests that start spread evenly.
    """
    return 0 if tier is not None or config.spread_ages else model.row_bytes


def _prefix_cache(
    config: EngineConfig,
    memory: MemoryLimit,
    store: BlockStore | None,
    requests: RequestTable,
    in_one_memory: bool,
    codec: BlockCodec | None,
) -> PrefixCache:
    """Return the prefix cache.

    Requests in flight share nothing where KV lies on a disk or on several tiers. A deterministic engine has no codes
    there.
    """
    rule = rule_named(config.prefix_cache, config.pager)
    if config.prefix_cache != LIVE:
        if codec is not None and config.deterministic:
            _log.warning("deterministic=True: the prefix cache keeps its blocks as they are, without %s", codec.name)
        codec = None if config.deterministic or rule is None else codec
        return PrefixCache(memory, rule, config.prompt_block or 1, store, codec=codec, delay_s=config.storage_delay_s)
    return PrefixCache(memory, rule if in_one_memory else None, config.prompt_block or 1, in_flight=requests)


def _chunk_reuse(
    config: EngineConfig, model: PackedModel, mark: str | None, codec: ModelCodec | None, closing: ExitStack
) -> tuple[ChunkReuse | None, FileLoads[LoadedChunks] | None]:
    """Return the chunk store with its model, and the loads of its files if it has a folder."""
    if config.chunk_store is None or mark is None:
        return None, None
    transform = None if codec is None else codec.transform
    reuse = ChunkReuse(config.chunk_store, model, mark, config.max_step_tokens, transform)
    if config.chunk_store.folder is None:
        return reuse, None
    loads = FileLoads(ChunkLoadSource(reuse))
    closing.callback(loads.close)
    return reuse, loads


def _decode_groups(
    config: EngineConfig,
    model: PackedModel,
    memory: MemoryLimit,
    tokenizer: Any,
    tier: DiskTier | None,
    host_kv: HostKV | None,
    storage_codec: ModelCodec | None,
) -> DecodeGroups:
    choice = config.choice.on([(layer.key_dim, layer.value_dim) for layer in model.layers])
    groups = DecodeGroups(
        model,
        CacheOptions(
            method=choice.method, options=config.options, budget=choice.budget, codec=choice.codec, max_kl=config.max_kl
        ),
        memory,
        config.page_slots,
        tokenizer,
        format_calibration(config),
        tier,
        config.reach(model.context_length),
        config.fit,
        named=not choice.usual,
        floor=config.budget_floor,
        host_kv=host_kv,
        step_tokens=config.max_step_tokens,
        sampled=storage_codec is not None,
    )
    for codec in filter(loses_by_bias, codecs_of(resolve(choice.codec))):
        warn_of_bias(codec, model.model)
    return groups


def _sequence_codec(
    config: EngineConfig, model: PackedModel, codec: ModelCodec | None, cache_factory: CacheFactory, closing: ExitStack
) -> SequenceCodec | None:
    """Return the codec of whole sequences.

    Raises:
        OptionError: caches that are to be stored in codes have none.
    """
    if codec is None or config.deterministic:
        return None
    where = "preemption='codes'" if config.preemption == "codes" else None if config.cache_dir is None else "cache_dir="
    if where is not None:
        check_codes(cache_factory, config.choice.method, codec, where)
    sequence_codec = SequenceCodec(codec, model)
    closing.callback(sequence_codec.close)
    return sequence_codec


def _sessions(
    config: EngineConfig,
    model: PackedModel,
    mark: str | None,
    cache_factory: CacheFactory,
    prefix_cache: PrefixCache,
    codec: SequenceCodec | None,
    closing: ExitStack,
) -> SessionReuse | None:
    if mark is None or config.cache_dir is None:
        return None
    check_continues(cache_factory, config.choice.method)
    store = SessionStore(config.cache_dir, config.cache_disk or DEFAULT_DISK)
    closing.callback(store.close)
    sessions = SessionReuse(store, model, mark, prefix_cache.make_room, prefix_cache.cached_tokens, codec)
    closing.callback(sessions.loads.close)
    return sessions


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


_IN_MEMORY = "needs weights and KV in memory; leave it out where memory= or plan= move them to a disk"


def check_disk(
    config: EngineConfig, streamed: StreamedLayers | None, tier: DiskTier | None, host_kv: HostKV | None = None
) -> None:
    """Check that no setting needs in memory what is on a disk.

    Raises:
        OptionError: such a setting.
    """
    if config.storage_codec is not None and any(part is not None for part in (tier, streamed, host_kv)):
        raise OptionError(f"storage_codec= {_IN_MEMORY}")
    if tier is not None and keeps_prompts(config.prefix_cache):
        raise OptionError(
            f"prefix_cache={config.prefix_cache!r} keeps pages of prompts in memory; leave it out where KV lies on a "
            "disk"
        )
    if tier is not None and config.overflow == "rolling":
        raise OptionError(
            "overflow='rolling' writes all entries of a sequence at once; leave it out where KV lies on a disk"
        )
    if host_kv is not None:
        for name, in_use in (
            ("prefix_cache", keeps_prompts(config.prefix_cache)),
            ("overflow", config.overflow == "rolling"),
        ):
            if in_use:
                raise OptionError(
                    f"{name}={getattr(config, name)!r} needs all keys and values in one memory; leave it out where "
                    "layers have them on different tiers"
                )
    if tier is None and streamed is None:
        return
    for name in ("chunk_store", "cache_dir"):
        if getattr(config, name) is not None:
            raise OptionError(f"{name}= {_IN_MEMORY}")
