"""What an engine of vLLM must be for its requests to evict, checked when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond import OptionError, Policy, UnsupportedModelError
from millpond_vllm import compat
from millpond_vllm.settings import KEY, EngineSettings

#: Ways to draft tokens that add no attention layers of their own.
_DRAFTS_WITHOUT_LAYERS = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
#: Dtypes of the cache whose entries can be read and moved one by one.
_CACHE_DTYPES = ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2")

#: Line that starts vLLM with all that is needed.
USE = "use `millpond-vllm serve MODEL --method snapkv --budget 20%`, or LLM(MODEL, **millpond_vllm.engine_args(...))"


def check_engine(vllm_config: Any) -> EngineSettings:
    """Return the settings of an engine, or refuse it.

    Raises:
        OptionError: no settings, wrong ones, or classes that belong together and are not given together.
        UnsupportedModelError: something of this engine would break or be broken by eviction.
    """
    given = (vllm_config.additional_config or {}).get(KEY)
    if given is None:
        raise OptionError(f"millpond's scheduler and worker need its settings in additional_config; {USE}")
    settings = EngineSettings.parse(given)
    compat.check_version(force=settings.force)
    _check_classes(vllm_config)
    for bad, what in _refusals(vllm_config, settings):
        if bad:
            raise UnsupportedModelError(f"millpond: {what}")
    return settings


def _check_classes(vllm_config: Any) -> None:
    scheduler = str(vllm_config.scheduler_config.scheduler_cls)
    worker = str(vllm_config.parallel_config.worker_cls)
    for name, path in (("scheduler", scheduler), ("worker", worker)):
        if "millpond_vllm" not in path:
            raise OptionError(
                f"millpond's settings are given and the {name} is {path}: its requests would lose what they need; {USE}"
            )


def _refusals(config: Any, settings: EngineSettings) -> list[tuple[bool, str]]:
    parallel, policy = config.parallel_config, settings.policy()
    speculative = config.speculative_config is not None
    return [
        (
            config.model_config.use_mla,
            "this model caches latents (MLA), one entry for all heads; run it without millpond",
        ),
        (
            config.model_config.is_encoder_decoder,
            "this model's decoder reads an encoder (cross-attention), whose entries are no text; run it alone",
        ),
        (
            speculative and config.speculative_config.method not in _DRAFTS_WITHOUT_LAYERS,
            "a draft model has attention layers of its own, whose queries choose no entries; draft by ngram or suffix",
        ),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "context parallelism divides the entries of a request among workers, and each would choose alone; use "
            "--tensor-parallel-size",
        ),
        (bool(getattr(parallel, "enable_dbo", False)), "dual-batch overlap reads one step's rows twice; leave it out"),
        (
            config.kv_transfer_config is not None,
            "a KV connector or offloader would store packed blocks under the hashes of the original ones; leave it out",
        ),
        (
            policy.scores_entries and parallel.tensor_parallel_size > 1,
            f"method {settings.method!r} scores an entry by the queries, keys and values of all heads, and each worker "
            "has some of them; use --pipeline-parallel-size, or snapkv",
        ),
        (
            speculative and policy.every_step,
            f"speculative decoding and method {settings.method!r}, which evicts while decoding: rejected drafts would "
            "move its events; give options={'decode': 'grow'}, or leave one out",
        ),
    ]


def check_layers(layers: Mapping[str, Any], config: Any, policy: Policy) -> None:
    """Refuse a model whose full-attention layers cannot evict.

    Args:
        layers: vLLM's attention layers by name, as they are loaded.
        config: Configuration of the engine.
        policy: Policy of the engine.

    Raises:
        UnsupportedModelError: a layer cannot evict; the reason, and the nearest thing that works.
    """
    full = {name: layer for name, layer in layers.items() if layer.sliding_window is None and not _is_local(layer)}
    windowed = len(full) < len(layers)
    if windowed and full and config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise UnsupportedModelError(
            "millpond: without the hybrid KV cache manager, layers of a sliding window share blocks with those that "
            "evict, and a window counts positions in a row whose blocks have moved; leave "
            "--disable-hybrid-kv-cache-manager (and what turns it off) out"
        )
    shared = {layer.kv_sharing_target_layer_name for layer in layers.values()}
    for name, layer in full.items():
        for bad, what in _layer_refusals(name, layer, shared, policy):
            if bad:
                raise UnsupportedModelError(f"millpond: layer {name} {what}")


def _is_local(layer: Any) -> bool:
    """Whether a layer attends to the chunk of its query alone."""
    return type(layer).__name__ == "ChunkedLocalAttention"


def _layer_refusals(name: str, layer: Any, shared: set[Any], policy: Policy) -> list[tuple[bool, str]]:
    """Return what a layer of full attention may be that cannot evict, and what works instead."""
    impl, backend = layer.impl, layer.attn_backend.get_name()
    alone = "run the model without millpond"
    dtype = str(layer.kv_cache_dtype)
    return [
        (
            layer.attn_type != "decoder",
            f"attends as {getattr(layer.attn_type, 'value', layer.attn_type)}, not as a decoder's; {alone}",
        ),
        (
            layer.kv_sharing_target_layer_name is not None or name in shared,
            f"shares its entries with other layers, whose queries would have no say in what is kept; {alone}",
        ),
        (
            getattr(impl, "alibi_slopes", None) is not None,
            f"adds a bias by distance (ALiBi), and a kernel counts distances in rows that have moved; {alone}",
        ),
        (
            bool(getattr(layer, "use_mm_prefix", False)),
            "lets tokens of an image see each other by positions in a row whose blocks have moved; serve text alone "
            "(--language-model-only), or run it without millpond",
        ),
        (
            layer.head_size_v != layer.head_size,
            f"has values of another width than its keys ({layer.head_size_v}, {layer.head_size}); {alone}",
        ),
        (
            not hasattr(impl, "shows_queries"),
            f"is computed by {backend}, which hides no null blocks; give --attention-backend FLASH_ATTN, FLASHINFER or "
            "TRITON_ATTN",
        ),
        (
            policy.observes_all and dtype.startswith("fp8"),
            "stores entries in 8 bits, which the sums of this method do not read; give --kv-cache-dtype auto, or "
            "method snapkv",
        ),
        (
            dtype not in _CACHE_DTYPES,
            f"stores entries as {dtype}, whose scales lie beside them; give --kv-cache-dtype auto or fp8",
        ),
    ]
