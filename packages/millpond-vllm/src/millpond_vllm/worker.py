"""Workers that evict before each step."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, ClassVar

import torch

from millpond import UnsupportedModelError
from millpond.plugins import AttentionShape
from millpond_vllm import compat
from millpond_vllm.attention_backend import STATE
from millpond_vllm.cache_layout import CacheLayout
from millpond_vllm.engine_check import check_engine, check_layers
from millpond_vllm.worker_state import EvictingLayer, WorkerState


class EvictingWorker:
    """What a worker of vLLM does otherwise where requests evict.

    Attributes:
        backends: Path of the evicting backend for each of vLLM's that may be chosen here.
    """

    backends: ClassVar[dict[str, str]]

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        compat.install()
        self._settings = check_engine(vllm_config)
        self._state: WorkerState | None = None
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """Load the model, with layers that evict."""
        with compat.backends_in_use(self.backends):
            loaded = super().load_model(*args, **kwargs)  # type: ignore[misc]
        config = self.vllm_config  # type: ignore[attr-defined]
        check_layers(compat.attention_layers(config), config, self._settings.policy())
        return loaded

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> Any:
        """Make the caches, and the state beside them."""
        made = super().initialize_from_config(*args, **kwargs)  # type: ignore[misc]
        self._state = self._new_state()
        return made

    def execute_model(self, scheduler_output: Any) -> Any:
        """Carry out the events of a step before it writes a block, then compute it."""
        if self._state is not None:
            orders = compat.orders_of(scheduler_output)
            self._state.forget(compat.preempted_or_finished(scheduler_output))
            self._state.begin(orders)
            for eviction in orders.evictions:
                compat.set_row(self.model_runner, eviction.request, eviction.row, self._group)  # type: ignore[attr-defined]
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def _new_state(self) -> WorkerState | None:
        """Return the state of the layers that evict; None if there are none."""
        from millpond_vllm.block_manager import EvictingSpec

        groups = self.model_runner.kv_cache_config.kv_cache_groups  # type: ignore[attr-defined]
        found = [index for index, group in enumerate(groups) if isinstance(group.kv_cache_spec, EvictingSpec)]
        if not found:
            return None
        self._group = found[0]
        group = groups[self._group]
        policy = self._settings.policy()
        modules = compat.attention_layers(self.vllm_config, list(group.layer_names))  # type: ignore[attr-defined]
        model = self.model_runner.model  # type: ignore[attr-defined]
        rotated = policy.needs_rotation
        layers = [
            EvictingLayer(
                index,
                module,
                module.num_heads,
                module.num_kv_heads,
                compat.layer_number(name),
                _shape_of(module),
                cache(partial(_projection, model, name, module)),
                compat.rotation_of(model, name, module.head_size) if rotated else None,
            )
            for index, (name, module) in enumerate(modules.items())
        ]
        block = group.kv_cache_spec.block_size
        row_requests = partial(compat.row_requests, self.model_runner)  # type: ignore[attr-defined]
        state = WorkerState(policy, layers, self.layout(layers[0], block), block, row_requests)
        if not policy.keeps_all:
            state.check()
        for layer in layers:
            setattr(layer.module, STATE, (state, layer.index))
        return state

    def layout(self, layer: EvictingLayer, block: int) -> CacheLayout:
        """Return the layout of the layers' caches.

        Args:
            layer: One of the layers.
            block: Tokens of a block of the manager.
        """
        raise NotImplementedError


def _shape_of(module: Any) -> AttentionShape:
    """Return scale, soft cap and sinks of a layer's attention; sinks are logits beside those of entries (gpt-oss)."""
    sinks = getattr(module.impl, "sinks", None)
    cap = float(module.impl.logits_soft_cap or 0)
    return AttentionShape(module.impl.scale, cap, sink_logits=None if sinks is None else sinks.detach().float())


@torch.inference_mode()
def _projection(model: torch.nn.Module, name: str, module: Any) -> torch.Tensor:
    """Return (Hq * value_dim, hidden) float32: the output projection behind an attention layer.

    vLLM repacks weights for its kernels, so the projection is asked for its result on each unit vector.

    Raises:
        UnsupportedModelError: there is none where it is looked for.
    """
    projection: Any = getattr(dict(model.named_modules()).get(name.rsplit(".", 1)[0]), "o_proj", None)
    method = getattr(projection, "quant_method", None)
    if method is None:
        raise UnsupportedModelError(
            f"millpond: the method reads the output projection behind {name}, which is not called o_proj there; "
            "use snapkv"
        )
    dtype = getattr(projection, "params_dtype", torch.float32)
    units = torch.eye(projection.input_size_per_partition, dtype=dtype, device=module.kv_cache.device)
    found: torch.Tensor = method.apply(projection, units, bias=None).float()
    return found
