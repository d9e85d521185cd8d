"""Image tokens of a text: their positions, and how many of them a cache still holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from millpond.errors import CacheMismatchError, UnsupportedModelError

if TYPE_CHECKING:
    from millpond.hf.protocol import LayerCaches


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """Tokens of images and videos.

    Attributes:
        seen: Tokens processed, per sequence.
        stored: Entries held, [layer][sequence][KV head]. A merged entry counts once, at its own position.
    """

    seen: list[int]
    stored: list[list[list[int]]]


def image_tokens(cache: LayerCaches, ids: frozenset[int]) -> ImageTokens:
    """Return how many tokens with one of `ids` a cache has seen, and how many it holds.

    Raises:
        UnsupportedModelError: the model has no image tokens.
        CacheMismatchError: it was not given the ids of all tokens.
    """
    tokens, seen = cache.tracker.tokens, cache.tracker.seen
    if not ids or tokens is None:
        raise UnsupportedModelError("this model's configuration names no image tokens; it takes text alone")
    image_ids = torch.tensor(sorted(ids))

    def count(sequence: int, positions: Tensor) -> list[int]:
        """Return the number of image tokens at positions (H, N), -1 for none, by row."""
        token_ids = tokens.at(torch.tensor([sequence]).to(positions.device), positions[None])[0].cpu()
        real = positions.cpu() >= 0
        if bool((token_ids[real] < 0).any()):
            raise CacheMismatchError(
                "the ids of some tokens are not known, because the model was given inputs_embeds; pass input_ids"
            )
        counts: list[int] = (torch.isin(token_ids, image_ids) & real).sum(1).tolist()
        return counts

    all_positions = [torch.arange(int(n), device=tokens.device)[None] for n in seen]
    return ImageTokens(
        seen=[count(s, positions)[0] for s, positions in enumerate(all_positions)],
        stored=[
            [count(s, layer_cache.read(s).positions) for s in range(len(seen))] for layer_cache in cache.layer_caches
        ],
    )
