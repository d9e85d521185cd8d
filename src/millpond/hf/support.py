"""Which models can run on a Millpond cache, and why others cannot."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from millpond.errors import UnsupportedModelError

#: Families that compute attention in their own code and ignore the attention interface.
BYPASS = {
    "bloom", "falcon", "gptj", "gpt_neo", "codegen", "mpt", "xglm", "cpmant", "gpt_neox_japanese", "ctrl", "xlnet",
}  # fmt: skip
#: Kinds of attention layers whose entries a policy can choose from.
LAYER_TYPES = {"full_attention", "sliding_attention"}


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The configuration of the language side of a model."""
    config: PreTrainedConfig = model.config.get_text_config(decoder=True)
    return config


def check_supported(model: PreTrainedModel) -> None:
    """
    Raises:
        UnsupportedModelError: the model's attention cannot be replaced; the message says which part and why.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"{type(model).__name__} is not a transformers model")
    name, config = type(model).__name__, text_config(model)
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder; only decoders keep a KV cache that can be compressed")
    if config.model_type in BYPASS:
        raise UnsupportedModelError(
            f"{name} (model type {config.model_type!r}) computes attention in its own code and bypasses transformers' "
            "attention interface, so nothing would be compressed"
        )
    for module in _decoder_models(model, config):
        if not module._can_set_attn_implementation():
            raise UnsupportedModelError(
                f"{type(module).__name__} does not use transformers' attention interface, so nothing would be compressed"
            )
    others = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if others:
        raise UnsupportedModelError(f"{name} has layers of type {', '.join(sorted(others))}, whose cache is not a list of entries")


def _decoder_models(model: PreTrainedModel, config: PreTrainedConfig) -> list[PreTrainedModel]:
    return [m for m in model.modules() if isinstance(m, PreTrainedModel) and m.config is config]


def stores_latents(config: PreTrainedConfig) -> bool:
    """Whether the model caches one latent per token and expands it to keys and values on each pass (MLA)."""
    return getattr(config, "kv_lora_rank", None) is not None


def n_layers(config: PreTrainedConfig) -> int:
    """Layers that hold a cache."""
    count: Any = config.num_hidden_layers
    return int(count)


def rotary_of(model: nn.Module) -> nn.Module | None:
    """The module that makes cosines and sines for (x, position_ids), or None."""
    for name, module in model.named_modules():
        if name.split(".")[-1] == "rotary_emb" and hasattr(module, "inv_freq"):
            return module
    return None
