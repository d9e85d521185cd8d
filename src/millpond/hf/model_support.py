"""Model support: which models run on a Millpond cache, why others cannot."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from millpond.errors import UnsupportedModelError
from millpond.hf.model_profile import BOTH, FULL, NEITHER, STATE_ONLY, ModelProfile

#: Families that compute attention in their own code and ignore the attention interface.
BYPASS = {
    "bloom",
    "falcon",
    "gptj",
    "gpt_neo",
    "codegen",
    "mpt",
    "xglm",
    "cpmant",
    "gpt_neox_japanese",
    "ctrl",
    "xlnet",
}
#: Types whose configuration looks like those of models that run, and why they do not.
REFUSED = {
    "diffllama": "attends to the keys of each layer twice, and a cache follows one attention per layer",
    "diffusion_gemma": "writes blocks of text by diffusion, whose tokens see ahead",
    "doge": "masks attention by the values of all tokens, which would not follow an eviction",
    "hrm_text": "passes its layers several times over, with keys and values of their own each time",
    "minimax": "takes no cache but one of its own class",
    "recurrent_gemma": "keeps recurrent states in its modules, so that they would not follow the sequences of a cache",
    "git": "takes in keys and attends to them in its own code, so nothing would be compressed",
    "mllama": "has layers that attend to images alone, which hand no keys and values of text to a cache",
    "mllama_text_model": "has layers that attend to images alone, which hand no keys and values of text to a cache",
    "evolla": "is given all of its text again at each step, so a cache would hold it many times over",
}
#: Kinds of layers of which entries can be chosen, and of the other layers of a hybrid.
LAYER_TYPES = {FULL, "sliding_attention"} | set(BOTH) | STATE_ONLY | NEITHER


def unwrapped(model: Any) -> Any:
    """Return the transformers model inside a wrapper of PEFT or `torch.compile`.

    Anything else is returned as it is. The adapters are inside the model, so a PEFT model's `generate` goes through it
    and uses its cache.

    Raises:
        UnsupportedModelError: a wrapper that passes keys and values of its own, or one that spreads the model.
    """
    while not isinstance(model, PreTrainedModel):
        name = type(model).__name__
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise UnsupportedModelError(
                f"{name}: prefix and prompt tuning pass keys and values or embeddings of their own before each text; "
                "only adapters inside the layers (LoRA and its kin) go together with a cache"
            )
        base = getattr(model, "get_base_model", None)
        inner = base() if callable(base) else getattr(model, "_orig_mod", None)
        if inner is None:
            spread = getattr(model, "module", None)
            if isinstance(spread, PreTrainedModel):
                raise UnsupportedModelError(f"{name} spreads a model over devices; pass the model inside, model.module")
            return model
        model = inner
    return model


def supported(model: PreTrainedModel) -> ModelProfile:
    """Return the profile of a model that Millpond runs on.

    Raises:
        UnsupportedModelError: the model's attention cannot be replaced; the message says which part and why.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"{type(model).__name__} is not a transformers model")
    profile = ModelProfile.of(model)
    name, config = profile.name, profile.config
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()):
        raise UnsupportedModelError(
            f"{name} was compiled in place (model.compile()), and torch cannot trace a cache that grows and evicts; "
            "load it again and do not compile it, or call torch.compile(model) and generate with that"
        )
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder; only decoders keep a KV cache that can be compressed"
        )
    if config.model_type in BYPASS:
        raise UnsupportedModelError(
            f"{name} (model type {config.model_type!r}) computes attention in its own code and bypasses transformers' "
            "attention interface, so nothing would be compressed"
        )
    for kind in (profile.outer_type, config.model_type):
        if kind in REFUSED:
            raise UnsupportedModelError(f"{name} (model type {kind!r}) {REFUSED[kind]}")
    for module in profile.decoders:
        if not module._can_set_attn_implementation():
            raise UnsupportedModelError(
                f"{type(module).__name__} does not use transformers' attention interface, so nothing would be "
                "compressed"
            )
    if getattr(config, "index_topk", None):
        raise UnsupportedModelError(
            f"{name} chooses what it attends to with an indexer of its own, whose cache would not follow an eviction"
        )
    unknown_types = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if unknown_types:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(sorted(unknown_types))}, whose cache is not a list of entries"
        )
    if profile.depth and not profile.attending:
        raise UnsupportedModelError(
            f"{name} has no attention layers: its states have one size however long the text, so there is nothing to "
            "compress; generate without a cache of Millpond"
        )
    for field in ("num_hidden_layers", "num_attention_heads"):
        if not _names(config, field):
            raise UnsupportedModelError(
                f"{name} is not one stack of attention layers: its configuration names no {field}"
            )
    return profile


def _names(config: PreTrainedConfig, field: str) -> bool:
    try:
        return getattr(config, field, None) is not None
    except RuntimeError:  # each layer has its own
        return True
