"""Workers that evict before each step."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from millpond import UnsupportedModelError
from millpond.plugins import AttentionShape
from millpond_vllm import compat
from millpond_vllm.attention_backend import STATE
from millpond_vllm.cache_layout import HeadMajorLayout
from millpond_vllm.engine_check import check_engine
from millpond_vllm.worker_state import EvictingLayer, WorkerState


class EvictingWorker:
    """What a worker of vLLM does otherwise where requests evict."""

    backend_name: str
    backend_path: str

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        compat.install()
        self._settings = check_engine(vllm_config)
        self._state: WorkerState | None = None
        super().__init__(vllm_config, *args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """Load the model, with layers that evict."""
        with compat.backend_in_use(self.backend_name, self.backend_path):
            return super().load_model(*args, **kwargs)  # type: ignore[misc]

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
        projections = _output_maps(self.model_runner.model, modules) if _reads_outputs(policy) else {}  # type: ignore[attr-defined]
        model = self.model_runner.model  # type: ignore[attr-defined]
        rotated = policy.needs_rotation
        layers = [
            EvictingLayer(
                index,
                module,
                module.num_heads,
                module.num_kv_heads,
                compat.layer_number(name),
                AttentionShape(module.impl.scale, softcap=float(module.impl.logits_soft_cap or 0)),
                projections.get(name),
                compat.rotation_of(model, name, module.head_size) if rotated else None,
            )
            for index, (name, module) in enumerate(modules.items())
        ]
        state = WorkerState(
            policy, layers, self.layout(layers[0], group.kv_cache_spec.block_size), group.kv_cache_spec.block_size
        )
        if not policy.keeps_all:
            state.check()
        for layer in layers:
            setattr(layer.module, STATE, (state, layer.index))
        return state

    def layout(self, layer: EvictingLayer, block: int) -> Any:
        """Return the layout of the layers' caches."""
        raise NotImplementedError


def _reads_outputs(policy: Any) -> bool:
    return type(policy.score).__name__ == "CriticalValues"


@torch.inference_mode()
def _output_maps(model: torch.nn.Module, modules: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return (Hq * value_dim, hidden) float32: the projection behind each attention layer.

    vLLM repacks weights for its kernels, so the projection is asked for its result on each unit vector.

    Raises:
        UnsupportedModelError: there is none where it is looked for.
    """
    found = {}
    named = dict(model.named_modules())
    for name in modules:
        projection = getattr(named.get(name.rsplit(".", 1)[0]), "o_proj", None)
        method = getattr(projection, "quant_method", None)
        if method is None:
            raise UnsupportedModelError(
                f"millpond: the method reads the output projection behind {name}, which is not called o_proj there; "
                "use snapkv"
            )
        dtype = getattr(projection, "params_dtype", torch.float32)
        device = modules[name].kv_cache.device
        units = torch.eye(projection.input_size_per_partition, dtype=dtype, device=device)
        found[name] = method.apply(projection, units, bias=None).float()
    return found


class MillpondCPUWorker(EvictingWorker, CPUWorker):
    """vLLM's worker for CPUs, whose requests evict."""

    backend_name = "CPU_ATTN"
    backend_path = "millpond_vllm.attention_backend.EvictingCPUBackend"

    def layout(self, layer: EvictingLayer, block: int) -> HeadMajorLayout:
        """Return the layout that the CPU kernels of this processor use."""
        module = layer.module

        def write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
            module.impl.do_kv_cache_update(module, keys, values, cache, slots)

        cache = layer.cache
        return HeadMajorLayout.probe(layer.n_kv_heads, block, cache.shape[3] // 2, cache.dtype, write)
