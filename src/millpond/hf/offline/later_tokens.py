"""Tokens behind a prompt, read with gradients by a frozen model whose attention to the prompt is given from outside."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from millpond.errors import UnsupportedModelError
from millpond.hf.attention_switch import switch
from millpond.hf.model_profile import ModelProfile

NAME = "millpond_later_tokens"

#: attend(layer, q, k, v): q (query heads, m, key_dim), k (KV heads, m, key_dim) and v (KV heads, m, value_dim) of the
#: later tokens, after RoPE, of the layers with attention in their order -> (query heads, m, value_dim).
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class _Running(threading.local):
    """What this thread reads."""

    attend: Attend | None = None
    layer: int = 0


_running = _Running()


def read_later(model: PreTrainedModel, ids: Tensor, begin: int, attend: Attend) -> Tensor:
    """(m, vocabulary) logits of the tokens ids (m,) from position `begin` on; gradients flow through `attend`.

    The weights of the model are constants. No cache is used, so `attend` says all that these tokens see.

    Raises:
        UnsupportedModelError: an attention that is given more than queries, keys and values, or that never came.
    """
    profile = ModelProfile.of(model)
    if "position_ids" not in profile.arguments:
        raise UnsupportedModelError(f"{profile.name} takes no position_ids, so later tokens cannot be read alone")
    if NAME not in AttentionInterface._global_mapping:
        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    places = torch.arange(begin, begin + len(ids), device=model.device)
    undo = switch(profile.config, NAME)
    _running.attend, _running.layer = attend, 0
    try:
        with _constant(model):
            out = model(input_ids=ids[None].to(model.device), position_ids=places[None], use_cache=False)
        if _running.layer != profile.n_layers:
            raise UnsupportedModelError(
                f"{profile.name} has {profile.n_layers} layers with attention, and {_running.layer} of them use "
                "transformers' attention interface"
            )
    finally:
        _running.attend = None
        undo()
    logits: Tensor = out.logits[0]
    return logits


@contextmanager
def _constant(model: PreTrainedModel) -> Iterator[None]:
    """Inside it the weights of the model take no gradients."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer by the function of the running call. Shapes as in transformers."""
    assert _running.attend is not None, "the model is switched for one call"
    if dropout or position_bias is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} drops attention out or adds a position bias, which is not followed here; call "
            "model.eval() first, or take another model"
        )
    layer, _running.layer = _running.layer, _running.layer + 1
    out = _running.attend(layer, query[0], key[0], value[0])
    return out.to(query.dtype).transpose(0, 1)[None].contiguous(), None
