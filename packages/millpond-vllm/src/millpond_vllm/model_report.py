"""What eviction can do for a model in the installed vLLM, from its configuration alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from millpond import MillpondError, list_methods
from millpond.plugins import make_policy
from millpond_vllm import compat
from millpond_vllm.engine_check import check_engine
from millpond_vllm.event_times import NEVER
from millpond_vllm.methods import Change, changes, refusal
from millpond_vllm.settings import BlockRules, EngineSettings, RequestSettings

#: Names of `layer_types` whose layers cache every token, and those whose layers cache a window.
_FULL = ("full_attention", "attention")
_WINDOW = ("sliding_attention", "chunked_attention")


@dataclass(frozen=True, slots=True)
class KVBytes:
    """Bytes of the KV cache of one text.

    Attributes:
        tokens: Tokens of the text.
        full: Bytes of layers that cache every token: they can evict.
        window: Bytes of layers that cache a window.
        kept: Bytes of the first that stay after the text's eviction.
    """

    tokens: int
    full: int
    window: int
    kept: int

    @property
    def share(self) -> float:
        """Share of the bytes that can be evicted."""
        return self.full / (self.full + self.window) if self.full else 0.0


@dataclass(slots=True)
class ModelReport:
    """What `millpond-vllm check` shows.

    Attributes:
        version: Version of vLLM.
        backend: Attention backend.
        block: Tokens of a block.
        layers: Layers by kind.
        bytes: Bytes of a text.
        refusals: Why it cannot run; empty if it can.
        changes: What the method does otherwise here than in `millpond.compress`.
    """

    version: str
    backend: str
    block: int
    layers: Counter[str]
    bytes: KVBytes
    refusals: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)


def method_refusals() -> dict[str, str | None]:
    """Return why each method cannot act on blocks of vLLM; None for one that can."""
    found: dict[str, str | None] = {}
    for name in list_methods():
        try:
            found[name] = refusal(make_policy(name, {}))
        except MillpondError as error:
            found[name] = f"needs options: {error}"
    return found


def layers_by_kind(config: Any) -> Counter[str]:
    """Return the number of layers of each kind that a text configuration names, as `layer_types` calls them."""
    given = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if given:
        return Counter(str(kind) for kind in given)
    kind = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    if kind == "sliding_attention" and getattr(config, "use_sliding_window", True) is False:
        kind = "full_attention"
    return Counter({kind: int(config.num_hidden_layers)})


def report(vllm_config: Any, given: Mapping[str, Any], tokens: int) -> ModelReport:
    """Return what eviction can do for an engine.

    Args:
        vllm_config: Its configuration, with millpond's classes and settings.
        given: The settings.
        tokens: Tokens of the text whose bytes are counted.
    """
    settings, model = EngineSettings.parse(given), vllm_config.model_config
    policy = settings.policy()
    layers = layers_by_kind(model.hf_text_config)
    block = vllm_config.cache_config.block_size
    found = ModelReport(
        compat.vllm_version(),
        backend_name(vllm_config),
        block,
        layers,
        _bytes(vllm_config, layers, BlockRules(settings, policy, block), tokens),
        changes=changes(make_policy(settings.method, dict(settings.options))),
    )
    for check in (lambda: check_engine(vllm_config), BlockRules(settings, policy, block).check):
        try:
            check()
        except MillpondError as error:
            found.refusals.append(str(error))
    return replace(found, refusals=[*found.refusals, *_model_refusals(model.hf_text_config, layers)])


def _model_refusals(config: Any, layers: Counter[str]) -> list[str]:
    """Return what a configuration shows of the refusals that a model meets when it is loaded; see `check_layers`."""
    found = []
    if not any(layers[kind] for kind in _FULL):
        found.append("no layer of this model caches every token: there is nothing to evict from")
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    if shared:
        found.append(
            f"the last {shared} layers share the entries of earlier ones, and would have no say in what is kept; run "
            "the model without millpond"
        )
    if getattr(config, "alibi", False):
        found.append("the model adds a bias by distance (ALiBi), and rows of evicted entries have moved; run it alone")
    return found


def backend_name(vllm_config: Any) -> str:
    """Return the attention backend that the platform takes for layers of full attention."""
    from vllm.platforms import current_platform

    chosen = vllm_config.attention_config.backend
    if chosen is not None:
        return str(chosen.name)
    return "CPU_ATTN" if current_platform.is_cpu() else "chosen by vLLM when the model is loaded"


def _bytes(vllm_config: Any, layers: Counter[str], rules: BlockRules, tokens: int) -> KVBytes:
    """Return the bytes of a text, at the numbers of heads and the head size that most layers have."""
    entry = compat.bytes_of_entry(vllm_config)
    full, narrow = (sum(layers[kind] for kind in kinds) for kinds in (_FULL, _WINDOW))
    window = getattr(vllm_config.model_config.hf_text_config, "sliding_window", None) or tokens
    kept = tokens
    try:
        times = rules.times(tokens, RequestSettings())
        if times.packed < NEVER and times.left(tokens) > times.packed:
            kept = tokens - (times.left(tokens) - times.packed) * rules.block
    except MillpondError:  # the budget leaves no block, which is a refusal
        pass
    return KVBytes(tokens, full * tokens * entry, narrow * min(tokens, window) * entry, full * kept * entry)
