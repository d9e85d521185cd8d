"""Centres of a model's queries before RoPE, measured by forward passes over texts (TriAttention)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millpond.errors import OptionError
from millpond.hf.compress import compress
from millpond.kernels.args import AttentionShape
from millpond.models.cache_argument import cache_argument
from millpond.policy.scores.query_centres import Bands, QueryCentres


def measure_centres(
    model: PreTrainedModel, texts: Sequence[Tensor], progress: Callable[[int, int], None] | None = None
) -> QueryCentres:
    """Measure E q and E |q| per band of each layer and query head over some texts.

    Queries are those that the layers use, after the norms that some models have, turned back from their positions.

    Args:
        model: Model to measure.
        texts: Ids of texts without pads, (n,) or (1, n), each read in one pass.
        progress: Called with the texts that were read and all of them.

    Returns:
        Centres for `compress(model, "triattention", centres=path)` once `content()` is written to `path`.

    Raises:
        OptionError: there is no text.
        UnsupportedModelError: the model's rotation changes with the text, or cannot be undone.
    """
    if not texts:
        raise OptionError("no text to measure queries on: give one or more")
    means: dict[int, Tensor] = {}
    magnitudes: dict[int, Tensor] = {}
    count = 0
    with torch.no_grad(), compress(model, "triattention", "100%", decode="grow") as cache:

        def observe(layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: AttentionShape) -> None:
            rotary, n = cache.layer_caches[layer].attention.rotary, q.shape[2]
            places = torch.arange(n, device=q.device)[None]
            wide = q.float() if rotary is None else rotary.rotate(q.float(), places, inverse=True)
            bands = Bands.of(None if rotary is None else rotary.rotate, q.shape[-1], q.device)
            means[layer] = means.get(layer, 0) + wide[0].double().sum(1).cpu()
            magnitudes[layer] = magnitudes.get(layer, 0) + bands.magnitudes(wide[0]).double().sum(1).cpu()

        cache.watch(observe)
        for number, ids in enumerate(texts):
            cache.reset()
            model(ids.view(1, -1).to(model.device), **cache_argument(cache), logits_to_keep=1)
            count += ids.numel()
            if progress is not None:
                progress(number + 1, len(texts))
    mean = torch.stack([means[layer] for layer in sorted(means)]) / count
    magnitude = torch.stack([magnitudes[layer] for layer in sorted(magnitudes)]) / count
    return QueryCentres(mean.float(), magnitude.float())
