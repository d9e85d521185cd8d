"""Inputs besides the text for models that write about a picture only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SIDE = 8  #: of a picture, as `tiny_config` has it


def picture_inputs(model_type: str, mask: Tensor) -> dict[str, Any]:
    """Further arguments of `generate` for prompts with this padding mask (B, n): a picture each, or nothing."""
    n_seq, length = mask.shape
    pixels = torch.randn(n_seq, 3, _SIDE, _SIDE, generator=torch.Generator().manual_seed(2))
    if model_type == "blip-2":
        return {"pixel_values": pixels}
    if model_type == "instructblip":
        return {"pixel_values": pixels, "qformer_input_ids": torch.arange(3, 9).expand(n_seq, -1)}
    if model_type == "idefics":
        return {"pixel_values": pixels[:, None], "image_attention_mask": torch.ones(n_seq, length, 1)}
    if model_type == "kosmos-2":
        place = torch.zeros(n_seq, length, dtype=torch.long)
        place[:, -8:-4] = 1  # as many as `latent_query_num`
        return {"pixel_values": pixels, "image_embeds_position_mask": place}
    return {}
