"""Greedy generation of a padded batch of two, and how equal two of them are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from millpond import MillpondCache
from millpond.hf.attention import switch
from millpond.hf.model_profile import ModelProfile
from millpond.hf.stock_attention import plain
from millpond.models.cache_argument import cache_argument

NAME = "millpond_masked"
#: Positions held, by number of the layer in the model: [sequence][KV head].
Held = Mapping[int, Sequence[Sequence[Sequence[int]]]]


class _Full(DynamicCache):
    """transformers' own cache, which tells what layer has taken in keys last: its attention follows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.layer = 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.layer = layer_idx
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class Masked:
    """Attention over all keys and values, of which each KV head shows what is held and what is new.

    Attributes:
        held: positions that are visible besides the new ones; None shows all.
        pads: columns of padding before each sequence, (B,).
    """

    def __init__(self, pads: Tensor) -> None:
        self.pads = pads
        self.held: Held | None = None
        self._cache: _Full | None = None
        self._owners: dict[int, int] = {}

    def cache(self, model: PreTrainedModel) -> DynamicCache:
        """A cache for the run: all keys and values, and the states of a hybrid."""
        profile = ModelProfile.of(model)
        self._owners = profile.shared
        self._cache = _Full(config=profile.config) if profile.state_layers else _Full()
        for number, layer in enumerate(self._cache.layers):
            if type(layer) is DynamicSlidingWindowLayer:  # the model's mask hides what is outside, as with the others
                self._cache.layers[number] = DynamicLayer()  # type: ignore[no-untyped-call]
        return self._cache

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attention with masks: query (B, Hq, Q, D), key and value (B, Hkv, T, D) -> (B, Q, Hq, D)."""
        batch, n_heads, n_new, dim = query.shape
        if not hasattr(module, "layer_idx") or getattr(module, "is_cross_attention", False):  # to a picture
            shown = torch.ones(1, 1, 1, key.shape[2], dtype=torch.bool)
        else:
            assert self._cache is not None, "the run has a cache of `cache`"
            number = module.layer_idx
            assert isinstance(number, int), "modules of attention are numbered"
            shown = self._shown(self._owners.get(number, self._cache.layer), batch, n_heads, n_new, key.shape[2])
        if attention_mask is not None:
            shown = shown & (attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0)
        scale = scaling if scaling is not None else dim**-0.5
        return plain(query, key, value, shown, scale, softcap, s_aux).contiguous(), None

    def _shown(self, layer: int, batch: int, n_heads: int, n_new: int, n: int) -> Tensor:
        """(B, Hq, 1, T): what each query head may see, but for the model's own mask."""
        shown = torch.ones(batch, n_heads, 1, n, dtype=torch.bool)
        if self.held is None:
            return shown
        for sequence, heads in enumerate(self.held[layer]):
            group = n_heads // len(heads)
            for head, positions in enumerate(heads):
                seen = torch.zeros(n, dtype=torch.bool)
                seen[torch.tensor(positions, dtype=torch.long) + self.pads[sequence]] = True
                seen[n - n_new :] = True
                shown[sequence, head * group : (head + 1) * group] = seen
        return shown


@contextmanager
def attending(model: PreTrainedModel, masked: Masked) -> Iterator[None]:
    """Inside, the language side of the model attends through `masked`."""
    AttentionInterface.register(NAME, masked.attention)
    AttentionMaskInterface.register(NAME, _mask)
    undo = switch(ModelProfile.of(model).config, NAME)
    try:
        yield
    finally:
        undo()
        del AttentionInterface._global_mapping[NAME], AttentionMaskInterface._global_mapping[NAME]


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask of transformers, never left out for being causal."""
    return sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False})


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


LENGTHS = [24, 17]  #: of the prompts; padded on the left
NEW = 6  #: tokens that are generated
WITHIN = 1e-4  #: logits that are equal, relative to the largest one where that is above 1


class Wrong(Exception):
    """Not what it ought to be; the message says what and by how much."""


@dataclass(frozen=True, slots=True)
class Run:
    """ids (B, n + new), logits (new, B, V) in float64, and what was held after each pass."""

    ids: Tensor
    logits: Tensor
    held: list[Held]


def generated(
    model: PreTrainedModel, cache: Any, follow: Callable[[Tensor, Tensor], Tensor] | None = None, new: int = NEW
) -> Run:
    """Greedy generation of `new` tokens after the prompts; `follow` may replace the scores of each step."""
    ids, mask = prompts()
    held: list[Held] = []

    def note(ids: Tensor, scores: Tensor) -> Tensor:
        if isinstance(cache, MillpondCache):
            held.append({n: [cache.positions(n, s) for s in range(len(ids))] for n in cache.entry_layers})
        return scores if follow is None else follow(ids, scores)

    given: dict[str, Any] = {} if cache is None else cache_argument(cache)
    picture = picture_inputs(model.config.model_type, mask)
    # that of the model, where it takes a picture in; else not, as one may pass no processors on (Janus)
    generate: Any = type(model).generate if picture else GenerationMixin.generate  # type: ignore[attr-defined]
    out = generate(
        model,
        **picture,
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
        logits_processor=[note],
        **given,
    )
    return Run(out.sequences, torch.stack(out.logits).double(), held)


def prompts() -> tuple[Tensor, Tensor]:
    """Token ids and mask, (B, n)."""
    width = max(LENGTHS)
    ids = torch.randint(3, 80, (len(LENGTHS), width), generator=torch.Generator().manual_seed(1))
    mask = torch.stack([(torch.arange(width) >= width - n).long() for n in LENGTHS])
    return ids * mask, mask


def masked_run(model: PreTrainedModel, run: Run, hide: bool = True) -> Run:
    """Stock generation over everything that writes the tokens of `run` and shows at each step what that run held."""
    masked = Masked(torch.tensor([max(LENGTHS) - n for n in LENGTHS]))
    step = 0

    def follow(ids: Tensor, scores: Tensor) -> Tensor:
        nonlocal step
        masked.held = run.held[step] if hide else None
        wanted = run.ids[:, max(LENGTHS) + step, None]
        step += 1
        return torch.full_like(scores, -torch.inf).scatter(1, wanted, 0.0)

    with attending(model, masked):
        return generated(model, masked.cache(model), follow, new=len(run.logits))


def compare(found: Run, expected: Run, where: str, within: float = WITHIN) -> None:
    scale = max(1.0, float(expected.logits.abs().max()))
    apart = float((found.logits - expected.logits).abs().max()) / scale
    if not apart <= within:
        raise Wrong(f"{where}: logits differ by {apart:.1e}")
    if not torch.equal(found.ids, expected.ids):
        raise Wrong(f"{where}: other tokens")
