"""Dense reference of a prompt of which only some rows are computed, from the modules of a Llama, in plain torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel


class Unrotated(NamedTuple):
    """Keys before RoPE and values of one layer, (Hkv, n, D) each."""

    keys: Tensor
    values: Tensor


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


@torch.no_grad()
def blended(
    model: PreTrainedModel, ids: Tensor, rows: Tensor, given: list[Unrotated] | None = None
) -> tuple[Tensor, list[Unrotated]]:
    """Logits (R, vocabulary) of some rows of a text, and the keys and values of all of it.

    Args:
        ids: (n,). rows: (R,) those that are computed. given: keys and values of all n tokens per layer, in which those
            of the rows are replaced; None: all rows are computed.
    """
    base: Any = model.model
    config, dim = model.config, base.layers[0].self_attn.head_dim
    x = base.embed_tokens(ids[rows])
    places = torch.arange(len(ids))
    cos, sin = (t[0] for t in base.rotary_emb(x[None], places[None]))
    hidden = places[None] > rows[:, None]
    found = []
    for number, layer in enumerate(base.layers):
        attn, normed = layer.self_attn, layer.input_layernorm(x)
        q, k, v = (
            proj(normed).view(len(rows), -1, dim).transpose(0, 1) for proj in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        keys, values = (t.clone() for t in ((k, v) if given is None else given[number]))
        keys[:, rows], values[:, rows] = k, v
        found.append(Unrotated(keys.clone(), values.clone()))
        turned = _turn(keys, cos, sin).repeat_interleave(config.num_attention_heads // len(keys), 0)
        wide = values.repeat_interleave(config.num_attention_heads // len(values), 0)
        logits = _turn(q, cos[rows], sin[rows]) @ turned.mT / dim**0.5
        seen = torch.softmax(logits.masked_fill(hidden, -torch.inf), -1) @ wide
        x = x + attn.o_proj(seen.transpose(0, 1).reshape(len(rows), -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.lm_head(base.norm(x)), found
