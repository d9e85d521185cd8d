"""A model of any type in tiny form, with random weights that make its attention matter."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from millpond_lab.bench.model_types.fields import FIELDS
from millpond_lab.bench.model_types.tiny_config import tiny_config

#: Standard deviation of the weights. transformers' own 0.02 leaves attention even, and then nothing that is evicted
#: is missed.
SPREAD = 0.2


def causal_types() -> dict[str, str]:
    """Type -> the model class, of every language model that the installed transformers has."""
    return dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def composite_types() -> dict[str, str]:
    """The same for models that take pictures or sound as well as text."""
    found: Mapping[str, str] = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    return {kind: name for kind, name in found.items() if kind not in causal_types()}


def tiny_model(kind: str, seed: int = 0) -> PreTrainedModel:
    """A model of this type; the same weights for the same seed.

    Raises: whatever transformers raises where the type cannot be made.
    """
    name = (causal_types() | composite_types())[kind]
    model_class: Any = getattr(transformers, name)
    config = tiny_config(_config_class(kind, model_class), FIELDS)
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: PreTrainedModel = model_class(config).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1 and weight.is_floating_point():
                weight.normal_(0.0, SPREAD, generator=draw)
    settings = model.generation_config
    settings.eos_token_id = settings.forced_eos_token_id = None
    settings.pad_token_id = 0
    return model


def _config_class(kind: str, model_class: Any) -> type[PreTrainedConfig]:
    """That of the type, or of the part of it that the model class takes."""
    whole: type[PreTrainedConfig] = CONFIG_MAPPING[kind]
    own: type[PreTrainedConfig] = model_class.config_class
    parts = [getattr(whole(), name, None) for name in whole.sub_configs]
    return own if own in map(type, parts) else whole
