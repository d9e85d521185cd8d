"""Measurement of a calibration on a text: the statistics of a model for KVQuant (arXiv:2401.18079).

Keys before RoPE and values of every layer are collected with the gradients of the loss at them; an error of a number
costs about its squared gradient (Fisher information), which weighs the clustering.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache, PreTrainedModel

from millpond.codec.calibration import Calibration, LayerCalibration, Numbers
from millpond.codec.groups import TABLES
from millpond.codec.nuq import as_table, kmeans, normalised_keys, normalised_token_values, normalised_values, q_norm
from millpond.codec.presets import codec_named
from millpond.errors import DataError, NumericsError, OptionError, UnsupportedModelError
from millpond.hf.calibration.load import model_mark, rotations_before_rope
from millpond.hf.layer import PassLayer
from millpond.hf.model_support import supported
from millpond.hf.signals.rotary import ModelRotation
from millpond.models.cache_argument import cache_argument

#: Called with the number of steps done and of all steps.
Progress = Callable[[int, int], None]
#: Fewest tokens for a measurement of ranges whose outer 1 % is left out.
MIN_TOKENS = 256
#: Entries of a page of codes.
SLOTS = codec_named("kvquant4").slots


def calibrate(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    bits: Sequence[int] = (2, 3, 4),
    windows: int = 16,
    length: int = 1024,
    outliers: float = 0.01,
    sinks: int = 1,
    fisher: bool = True,
    by_range: bool = True,
    normalise: Sequence[int] = (),
    progress: Progress = lambda done, total: None,
) -> Calibration:
    """Find the ranges of the key channels, and the numbers that codes represent.

    Args:
        model: Model to measure.
        ids: Tokens of a text, (n,), of which `windows` runs of `length` tokens are read, spread over it.
        bits: Bits of the codes: 2, 3 or 4.
        windows: Most runs of tokens to read.
        length: Tokens of a run.
        outliers: Share of the numbers that is stored as outliers.
        sinks: First entries of a text that stay plain, and are left out here.
        fisher: Whether to weigh by squared gradients; else every number alike.
        by_range: Whether to weigh by the squared range of a number's channel or token too: the codes represent numbers
            divided by it, so that is what an error costs. Departs from the published code, which weighs by the
            gradients alone (False).
        normalise: Bits whose codes are read as numbers of the mean and deviation of the text's (Q-Norm).
        progress: Function that is called with the steps done and all steps.

    Raises:
        OptionError: bits without a format, a share or a count out of range, or a head_dim that pages cannot hold.
        DataError: the text is too short.
        NumericsError: the model makes NaN of it.
        UnsupportedModelError: a model whose keys cannot be stored before RoPE.
    """
    profile = supported(model)
    if profile.latent is not None:
        raise UnsupportedModelError(f"{type(model).__name__} stores latents (MLA), which have no channels of keys")
    if profile.state_layers:
        raise UnsupportedModelError(
            f"{type(model).__name__} is a hybrid, whose layers differ in what they hand to a cache; use a codec "
            "without calibration"
        )
    if profile.shared:
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers that read the keys of others, whose attention a calibration would not "
            "weigh; use a codec without calibration"
        )
    _check_options(bits, normalise, windows, outliers, sinks)
    runs = _runs(ids, windows, min(length, profile.position_limit or length))
    n_layers = profile.n_layers
    rotations, total = rotations_before_rope(profile), len(runs) + n_layers
    read = []
    for done, run in enumerate(runs):
        progress(done, total)
        read.append(_read(model, run, rotations, sinks, fisher))
        for keys, values, *_ in read[-1]:
            codec_named("kvquant4").check_dims(keys.shape[2], values.shape[2])
    layer_calibrations = []
    for index in range(n_layers):
        progress(len(runs) + index, total)
        layer_calibrations.append(_layer(_joined([run[index] for run in read]), bits, outliers, by_range, normalise))
    progress(total, total)
    return Calibration(tuple(layer_calibrations), model_mark(model), type(model).__name__, outliers, sinks)


def _check_options(bits: Sequence[int], normalise: Sequence[int], windows: int, outliers: float, sinks: int) -> None:
    for b in (*bits, *normalise):
        if b not in TABLES:
            raise OptionError(f"bits={b}: tables have {', '.join(map(str, TABLES))} bits")
    if not bits or set(normalise) - set(bits):
        raise OptionError(
            f"bits={list(bits)}: name those that tables are made for, q-norm's {list(normalise)} included"
        )
    if not 0 <= outliers <= 0.1:
        raise OptionError(f"outliers={outliers} must be a share from 0 to 0.1")
    for name, number, min_number in (("windows", windows, 1), ("sinks", sinks, 0)):
        if number < min_number:
            raise OptionError(f"{name}={number} must be at least {min_number}")


def _runs(ids: Tensor, windows: int, length: int) -> list[Tensor]:
    """Return runs (1, length) of a text, spread over it; fewer if it is short."""
    if len(ids) < MIN_TOKENS:
        raise DataError(f"the text has {len(ids)} tokens; calibrating takes at least {MIN_TOKENS}, better 16,000")
    length = min(length, len(ids))
    count = min(windows, len(ids) // length)
    starts = [i * (len(ids) - length) // max(count - 1, 1) for i in range(count)]
    return [ids[None, s : s + length].long() for s in starts]


#: Keys before RoPE and values (H, n, D), and the squares of the gradients at them, or None.
_LayerStatistics = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def _read(
    model: PreTrainedModel, run: Tensor, rotations: Sequence[ModelRotation | None], sinks: int, fisher: bool
) -> list[_LayerStatistics]:
    """Return the keys and values of each layer for a run of tokens, in 16 bits.

    The first `sinks` tokens are left out.
    """
    recorder = _RecordingCache(len(rotations))
    undo = model.get_input_embeddings().register_forward_hook(_begin_gradients)
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(fisher):
            logits = model(run.to(model.device), **cache_argument(recorder), use_cache=True).logits[0]
            loss = F.cross_entropy(logits[:-1].float(), run[0, 1:].to(logits.device), reduction="sum")
            seen = recorder.recorded(type(model).__name__)
            grads = torch.autograd.grad(loss, [t for pair in seen for t in pair]) if fisher else ()
    finally:
        undo.remove()
    if not bool(torch.isfinite(loss)):
        raise NumericsError("the model's loss on this text is not a number; load it with --dtype f32 or bf16")
    positions = torch.arange(run.shape[1], device=logits.device)[None]
    statistics: list[_LayerStatistics] = []
    for index, (k, v) in enumerate(seen):
        key_and_grad = [t.detach().float() for t in ((k, grads[2 * index]) if fisher else (k,))]
        if (rotary := rotations[index]) is not None:
            key_and_grad = [rotary.rotate(t, positions, inverse=True) for t in key_and_grad]
        keys, *key_grad = (t[0, :, sinks:].cpu() for t in key_and_grad)
        value_grad = grads[2 * index + 1].float().square()[0, :, sinks:].cpu() if fisher else None
        statistics.append(
            (
                keys.bfloat16(),
                v.detach()[0, :, sinks:].cpu().bfloat16(),
                key_grad[0].square() if fisher else None,
                value_grad,
            )
        )
    return statistics


def _begin_gradients(module: Any, args: Any, out: Tensor) -> Tensor:
    return out.detach().requires_grad_(torch.is_grad_enabled())


def _joined(runs: list[_LayerStatistics]) -> _LayerStatistics:
    """Return the statistics of one layer over several runs of tokens."""
    keys, values, key_fisher, value_fisher = zip(*runs, strict=True)
    if key_fisher[0] is None:
        return torch.cat(keys, 1), torch.cat(values, 1), None, None
    return torch.cat(keys, 1), torch.cat(values, 1), torch.cat(key_fisher, 1), torch.cat(value_fisher, 1)


def _layer(
    statistics: _LayerStatistics, bits: Sequence[int], outliers: float, by_range: bool, normalise: Sequence[int]
) -> LayerCalibration:
    keys, values, key_fisher, value_fisher = statistics
    n_heads, _, dim = keys.shape
    keys_of_heads, weights = (None if t is None else t.transpose(0, 1).flatten(1) for t in (keys, key_fisher))
    assert keys_of_heads is not None
    y, w, scale, zero = normalised_keys(keys_of_heads, weights, outliers, by_range=by_range)
    pages, page_weights = (None if t is None else _pages(t) for t in (values, value_fisher))
    assert pages is not None
    n_extra = round(outliers * SLOTS * values.shape[2])
    y_values, w_values = normalised_values(pages, page_weights, n_extra, by_range=by_range)
    tokens, token_weights = (None if t is None else t.transpose(0, 1).flatten(1) for t in (values, value_fisher))
    assert tokens is not None
    y_tokens, w_tokens = normalised_token_values(tokens, token_weights, outliers, by_range=by_range)
    return LayerCalibration(
        scale.view(n_heads, dim),
        zero.view(n_heads, dim),
        {b: _numbers(y, w, b, b in normalise) for b in bits},
        {b: _numbers(y_values, w_values, b, b in normalise) for b in bits},
        {b: _numbers(y_tokens, w_tokens, b, b in normalise) for b in bits},
    )


def _pages(x: Tensor) -> Tensor:
    """Return x (H, n, D) as pages, (P, slots, D), without an incomplete one."""
    return x[:, : x.shape[1] // SLOTS * SLOTS].reshape(-1, SLOTS, x.shape[2])


def _numbers(y: Tensor, weights: Tensor, bits: int, normalise: bool) -> Numbers:
    table = as_table(kmeans(y, weights, 1 << bits))
    return Numbers(*q_norm(table, y)) if normalise else Numbers(table)


class _RecordingLayer(PassLayer):  # type: ignore[no-untyped-call]
    """Layer that records the keys and values of one pass and hands them on."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.recorded = key_states, value_states
        return key_states, value_states


class _RecordingCache(Cache):
    """Cache of a pass whose keys and values are recorded."""

    def __init__(self, n_layers: int) -> None:
        self._recording = [_RecordingLayer() for _ in range(n_layers)]
        super().__init__(layers=list(self._recording))

    def recorded(self, name: str) -> list[tuple[Tensor, Tensor]]:
        """Return keys after RoPE and values (1, H, n, D) of every layer.

        Raises:
            UnsupportedModelError: a layer of the model `name` brought none.
        """
        recorded = [layer.recorded for layer in self._recording if layer.recorded is not None]
        if len(recorded) < len(self._recording):
            raise UnsupportedModelError(f"{name}: not every layer hands its keys and values to a cache")
        return recorded
