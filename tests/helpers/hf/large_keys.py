"""Tiny models whose keys are as hard to code as those of trained ones: large biases, massive channels, a first token
unlike the rest. Random weights alone have none of these."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.helpers.hf.families import VOCABULARY, family

#: Shape of every model here: groups of all formats divide 64 channels.
HEADS, KV_HEADS, DIM = 4, 2, 64
#: Size of the biases, of what massive channels are multiplied with, and how far the first token lies out.
BIAS, MASSIVE, FIRST = 60.0, 6.0, 5.0
#: The first token of every text.
BOS = 1


@torch.no_grad()
def with_large_keys(name: str) -> PreTrainedModel:
    """A model of a family with such keys."""
    wide = {"hidden_size": HEADS * DIM, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    own: dict[str, Any] = dict(family(name).options)
    if "head_dim" in own:
        wide["head_dim"] = DIM
    if "word_embed_proj_dim" in own:
        wide["word_embed_proj_dim"] = HEADS * DIM
    model = family(name).make(**wide, max_position_embeddings=512, initializer_range=0.06)
    _far_first_token(model)
    g = torch.Generator().manual_seed(11)
    for module in list(model.modules()):
        if hasattr(module, "k_norm") and isinstance(getattr(module.k_norm, "weight", None), Tensor):
            _massive_by_norm(module)
        elif hasattr(module, "k_proj"):
            _massive(module.q_proj, module.k_proj)
            _add_bias(module.k_proj, _bias(module.k_proj.weight.shape[0] // DIM, g))
        elif hasattr(module, "qkv_proj"):
            q = HEADS * DIM
            _add_bias(module.qkv_proj, nn.functional.pad(_bias(KV_HEADS, g).flatten(), (q, KV_HEADS * DIM)))
        elif hasattr(module, "query_key_value"):
            rows = torch.zeros(HEADS, 3, DIM)
            rows[:, 1] = _bias(HEADS, g)
            _add_bias(module.query_key_value, rows)
        elif hasattr(module, "c_attn"):
            q = HEADS * DIM
            module.c_attn.bias[q : 2 * q] += _bias(HEADS, g).flatten()
    return model


def _bias(heads: int, g: torch.Generator) -> Tensor:
    """(heads, D): a few channels are large, most are small."""
    found = torch.randn(heads, DIM, generator=g)
    for head in found:
        head[torch.randperm(DIM, generator=g)[:5]] *= BIAS / 2
    return found


def _add_bias(linear: nn.Linear, bias: Tensor) -> None:
    before = 0.0 if linear.bias is None else linear.bias
    linear.bias = nn.Parameter(bias.flatten() + before)


def _massive(q: nn.Linear, k: nn.Linear) -> None:
    """The keys' channels of one rotation pair are multiplied, and the queries' divided: attention stays as it is."""
    for channel in (3, 3 + DIM // 2):
        k.weight[channel::DIM] *= MASSIVE
        q.weight[channel::DIM] /= MASSIVE


def _massive_by_norm(attention: Any) -> None:
    """The same where queries and keys are normalised; a norm's weight may stand for 1 + weight (Gemma)."""
    shift = 1.0 if float(attention.k_norm.weight.detach().abs().mean()) < 0.5 else 0.0
    for channel in (3, 3 + DIM // 2):
        for norm, factor in ((attention.k_norm, MASSIVE), (attention.q_norm, 1 / MASSIVE)):
            norm.weight[..., channel] = (norm.weight[..., channel] + shift) * factor - shift


def _far_first_token(model: PreTrainedModel) -> None:
    """The first token has one massive channel of the hidden state, which keys take up much of."""
    embedding: Any = model.get_input_embeddings()
    embedding.weight[:, 0] *= 0.01
    embedding.weight[BOS] *= 0.1
    embedding.weight[BOS, 0] = 0.5 * FIRST * math.sqrt(embedding.weight.shape[1])
    for module in model.modules():
        if hasattr(module, "k_proj"):
            module.k_proj.weight[:, 0] *= FIRST


def text_with_first_token(length: int, seed: int = 0) -> Tensor:
    """Token ids (1, length)."""
    ids = torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))
    ids[0, 0] = BOS
    return ids
