"""Calibration of the codec `transform` on a model: forward passes over texts, then a transform for each layer."""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel

from millpond.cache.atomic_files import publish, remove_file, write_part
from millpond.codec.transform.allocation import allocate, check_bits
from millpond.codec.transform.exact_tokens import SHARE
from millpond.codec.transform.fit import EPS_KEYS, EPS_VALUES, SideTransform, fit_side
from millpond.codec.transform.prompt_header import Sides, total_bits
from millpond.codec.transform.transform_file import Calibrated, FittedModel, ModelTransform
from millpond.errors import DataError, NumericsError, OptionError, UnsupportedModelError
from millpond.hf.calibration.attention_moments import (
    MOST_SAMPLES,
    LayerMoments,
    LayerPass,
    add_pass,
    metric_of_keys,
    metric_of_values,
)
from millpond.hf.calibration.hidden_state_hooks import removed_afterwards
from millpond.hf.calibration.load import model_mark, rotations_before_rope
from millpond.hf.compress import compress
from millpond.hf.model_profile import ModelProfile
from millpond.hf.model_support import supported, unwrapped
from millpond.hf.signals.output_projection import layer_output_maps
from millpond.kernels.args import AttentionShape
from millpond.models.cache_argument import cache_argument

#: Called with the number of steps done and of all steps.
Progress = Callable[[int, int], None]
#: Tokens of a layer, in multiples of its numbers a token: fewer are refused, and fewer are warned of.
LEAST_TOKENS, ENOUGH_TOKENS = 8, 64
#: Fewest tokens of a window: a query looks at entries 64 tokens back.
SHORTEST = 128
#: Tokens of a window at most, where a caller does not say.
LENGTH = 1024
#: Seconds between two writings of the sums that a calibration resumes from.
SAVE_SECONDS = 20.0
#: End of the name of the file of these sums.
RESUME = ".resume"


class FewTokensWarning(UserWarning):
    """Warning: a calibration read few tokens for the numbers that it fits."""


def calibrate_transform(
    model: PreTrainedModel,
    texts: Sequence[Tensor],
    *,
    length: int = LENGTH,
    most_bits: float = 4.0,
    most_head_bits: float | None = None,
    resume: str | os.PathLike[str] | None = None,
    progress: Progress = lambda done, total: None,
) -> ModelTransform:
    """Fit the codec `transform` to a model.

    Attention of every 8th query weighs errors of keys and values; no gradients are computed. The result is the same if
    it was interrupted and resumed.

    Args:
        model: Model to measure.
        texts: Token ids of texts, (n,) each; each is cut into windows of `length`, and a rest of 128 or more is read.
        length: Tokens of a window.
        most_bits: Mean bits a number up to which rows are held; fewer make a smaller file.
        most_head_bits: The same of the parts for single heads, which caches that evict need; None for `most_bits`, 0
            for no such parts.
        resume: File of the sums so far, written every 20 seconds and removed at the end; an existing one of the same
            model and texts is continued, any other is replaced. None for no file.
        progress: Function that is called with the steps done and all steps.

    Raises:
        OptionError: a length or bits out of range.
        DataError: fewer than 8 tokens for each number that a layer holds of a token, or sums that cannot be written.
        UnsupportedModelError: MLA, layers that share keys, or a rotation that cannot be undone.
        NumericsError: the model computes NaN on these texts.
    """
    check_bits(most_bits)
    most_head_bits = checked_head_bits(most_bits, most_head_bits)
    if length < SHORTEST:
        raise OptionError(f"length={length}: a window has at least {SHORTEST} tokens")
    model = unwrapped(model)
    profile = supported(model)
    _check_supported(profile)
    windows = _windows(texts, min(length, profile.position_limit or length))
    if not windows:
        raise DataError(f"no text has {SHORTEST} tokens: give longer ones")
    reading = _Reading(model, profile, windows, None if resume is None else Path(resume))
    total = len(windows) + profile.n_layers
    was_training = model.training
    model.train(False)
    try:
        with removed_afterwards(model):
            for done in range(reading.done, len(windows)):
                progress(done, total)
                reading.read(windows[done])
    finally:
        model.train(was_training)
    layers: list[Sides] = []
    heads: list[list[Sides]] = []
    with torch.no_grad():
        for index, moments in enumerate(reading.layers):
            progress(len(windows) + index, total)
            sums = _LayerSums.of(moments, reading.maps(index), reading.shapes[index])
            layers.append(sums.fitted())
            if most_head_bits:
                heads.append([sums.fitted(head) for head in range(sums.n_heads)])
    progress(total, total)
    n_tokens = sum(len(window) for window in windows)
    calibrated = Calibrated(n_tokens, _digest(windows), EPS_KEYS, EPS_VALUES, most_bits, most_head_bits)
    thresholds = torch.stack([moments.attention.quantile(1 - SHARE) for moments in reading.layers])
    reading.finish()
    return ModelTransform(
        fitted_model(model, profile, reading.shapes),
        calibrated,
        _kept(layers, most_bits),
        thresholds,
        _kept_heads(heads, most_head_bits),
    )


def fitted_model(model: PreTrainedModel, profile: ModelProfile, shapes: Sequence[tuple[int, int, int]]) -> FittedModel:
    """Return the facts by which a transform file knows its model.

    Args:
        model: The model.
        profile: Its profile.
        shapes: KV heads, channels of a key and of a value of each layer with entries.
    """
    rope = json.dumps(getattr(profile.config, "rope_parameters", None), sort_keys=True, default=str)
    return FittedModel(profile.name, tuple(shapes), rope, model_mark(model))


def _check_supported(profile: ModelProfile) -> None:
    if profile.latent is not None:
        raise UnsupportedModelError(
            f"{profile.name} stores latents (MLA), for which the codec transform has no calibration; store its cache "
            "without --storage-codec"
        )
    if profile.shared:
        raise UnsupportedModelError(
            f"{profile.name} has layers that read the keys of others, whose attention a calibration would not weigh; "
            "store its cache without --storage-codec"
        )


def _windows(texts: Sequence[Tensor], length: int) -> list[Tensor]:
    """Return the windows (n,) of texts, `SHORTEST` to `length` tokens each."""
    parts = [part.long().cpu() for text in texts for part in torch.split(text.flatten(), length)]
    return [part for part in parts if len(part) >= SHORTEST]


def _digest(windows: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for window in windows:
        digest.update(f"{len(window)} ".encode() + window.int().numpy().tobytes())
    return digest.hexdigest()


def _kept(layers: list[Sides], most_bits: float) -> tuple[Sides, ...]:
    """Return the transforms with the rows that have bits at `most_bits`, by falling bits."""
    parts = [side for layer in layers for side in layer]
    given = allocate([side.distortions for side in parts], total_bits(layers, most_bits))
    sides = []
    for side, bits in zip(parts, given, strict=True):
        order = bits.argsort(descending=True, stable=True)
        sides.append(side.chosen(order[: max(1, int((bits > 0).sum()))]))
    return tuple(zip(sides[::2], sides[1::2], strict=True))


def checked_head_bits(most_bits: float, most_head_bits: float | None) -> float:
    """Return the bits of parts for single heads, which are `most_bits` where none are given.

    Raises:
        OptionError: neither 0 nor bits that a file may have.
    """
    if most_head_bits is None:
        return most_bits
    return check_bits(most_head_bits) if most_head_bits else 0.0


def _kept_heads(layers: Sequence[Sequence[Sides]], most_bits: float) -> tuple[tuple[Sides, ...], ...]:
    """Return the same for parts of single heads, given bits together, by layer."""
    kept = iter(_kept([sides for layer in layers for sides in layer], most_bits) if layers else ())
    return tuple(tuple(next(kept) for _ in layer) for layer in layers)


@dataclass(frozen=True, slots=True, eq=False)
class _SideSums:
    """Sums that the transform of one side of a layer is fitted to: see `fit_side`."""

    metric: Tensor
    mean: Tensor
    covariance: Tensor
    samples: Tensor
    eps: float

    def fitted(self, part: slice) -> SideTransform:
        """Return the transform of some neighbouring numbers of a token."""
        return fit_side(
            self.metric[part, part], self.mean[part], self.covariance[part, part], self.samples[:, part], self.eps
        )


@dataclass(frozen=True, slots=True, eq=False)
class _LayerSums:
    """Sums of a layer's keys and values with all KV heads side by side, for their transforms."""

    key: _SideSums
    value: _SideSums
    n_heads: int

    @classmethod
    def of(cls, moments: LayerMoments, maps: Tensor, shape: tuple[int, int, int]) -> _LayerSums:
        n_kv_heads, key_dim, _ = shape
        d_key = n_kv_heads * key_dim
        mean = moments.sums / moments.tokens
        keys, values = mean[:d_key], mean[d_key:]
        key = _SideSums(
            metric_of_keys(moments),
            keys,
            moments.key_products / moments.tokens - torch.outer(keys, keys),
            moments.samples[:, :d_key],
            EPS_KEYS,
        )
        value = _SideSums(
            metric_of_values(moments, maps, n_kv_heads),
            values,
            moments.value_products / moments.tokens - torch.outer(values, values),
            moments.samples[:, d_key:],
            EPS_VALUES,
        )
        return cls(key, value, n_kv_heads)

    def fitted(self, head: int | None = None) -> Sides:
        """Return the transforms of all heads of a token together, or of one alone."""
        parts = [slice(0, len(side.mean)) for side in (self.key, self.value)]
        if head is not None:
            widths = [part.stop // self.n_heads for part in parts]
            parts = [slice(head * width, (head + 1) * width) for width in widths]
        return self.key.fitted(parts[0]), self.value.fitted(parts[1])


class _Reading:
    """Forward passes over windows and their sums, which a file holds between two processes."""

    def __init__(
        self, model: PreTrainedModel, profile: ModelProfile, windows: Sequence[Tensor], resume: Path | None
    ) -> None:
        self._model, self._profile, self._resume = model, profile, resume
        self._rotations = rotations_before_rope(profile)
        self._tokens, self._samples = sum(len(window) for window in windows), -(-MOST_SAMPLES // len(windows))
        self._facts = {"format": "millpond transform sums 2", "model": model_mark(model), "texts": _digest(windows)}
        self._saved = time.monotonic()
        self._nth = {number: nth for nth, number in enumerate(profile.attending)}
        self._found: dict[int, LayerMoments] = {}
        self._shapes: dict[int, tuple[int, int, int]] = {}
        self.done = 0
        if resume is not None and resume.exists():
            self._continue(resume)

    @property
    def layers(self) -> list[LayerMoments]:
        """Sums of all layers."""
        return [self._found[nth] for nth in range(self._profile.n_layers)]

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """KV heads, channels of a key and of a value of all layers."""
        return [self._shapes[nth] for nth in range(self._profile.n_layers)]

    def read(self, window: Tensor) -> None:
        """Run the model over a window (n,) and add to the sums.

        Raises:
            DataError: all windows together have too few tokens for this model.
            NumericsError: the model computes NaN.
            UnsupportedModelError: its residual stream cannot be read.
        """
        ids = window[None].to(self._model.device)
        with compress(self._model, "full", native_layers=False, attach=False) as cache, torch.no_grad():
            cache.watch(self._add)
            run = self._model(ids, **cache_argument(cache), logits_to_keep=1, output_hidden_states=True)
        if not bool(run.logits.isfinite().all()):
            raise NumericsError("the model computes NaN on this text; load it with --dtype f32 or bf16")
        hidden = getattr(run, "hidden_states", None)
        if hidden is None or len(hidden) <= max(self._profile.attending):
            raise UnsupportedModelError(f"{self._profile.name} does not return its residual stream (hidden_states)")
        for nth, number in enumerate(self._profile.attending):
            length = hidden[number][0].float().square().sum(-1).median().double().cpu()
            self._found[nth].residuals = torch.cat([self._found[nth].residuals, length[None]])
        if self.done == 0:
            self._check_tokens()
        self.done += 1
        if self._resume is not None and time.monotonic() - self._saved > SAVE_SECONDS:
            self._save(self._resume)

    def maps(self, nth: int) -> Tensor:
        """Return the output projection of a layer by query head."""
        return layer_output_maps(self._profile, nth)

    def finish(self) -> None:
        """Remove the file of the sums."""
        if self._resume is not None:
            remove_file(self._resume)

    def _add(self, number: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: AttentionShape) -> None:
        nth = self._nth[number]
        if nth not in self._found:
            self._shapes[nth] = (k.shape[1], k.shape[3], v.shape[3])
            self._found[nth] = LayerMoments.empty(q.shape[1], *self._shapes[nth])
        generator = torch.Generator().manual_seed(self.done * self._profile.n_layers + nth)
        part = LayerPass(q[0], k[0], v[0], shape, self._rotations[nth], self.maps(nth))
        add_pass(self._found[nth], part, generator, self._samples)

    def _check_tokens(self) -> None:
        d = max(heads * max(key, value) for heads, key, value in self._shapes.values())
        if self._tokens < LEAST_TOKENS * d:
            raise DataError(
                f"the texts have {self._tokens:,} tokens in windows of {SHORTEST} or more; a layer of this model holds "
                f"{d:,} numbers a token, and calibrating takes at least {LEAST_TOKENS * d:,} tokens, better "
                f"{ENOUGH_TOKENS * d:,}: give more text"
            )
        if self._tokens < ENOUGH_TOKENS * d:
            warnings.warn(
                f"the texts have {self._tokens:,} tokens, and {ENOUGH_TOKENS * d:,} are better for a model whose "
                f"layers hold {d:,} numbers a token: give more text",
                FewTokensWarning,
                stacklevel=4,
            )

    def _save(self, path: Path) -> None:
        """Write the sums to the file to resume from.

        Raises:
            DataError: it cannot be written.
        """
        tensors = {
            f"{nth}.{name}": t.contiguous() for nth, found in self._found.items() for name, t in found.tensors().items()
        }
        shapes = json.dumps({str(nth): shape for nth, shape in self._shapes.items()})
        try:
            publish(write_part(path, save(tensors, {**self._facts, "done": str(self.done), "shapes": shapes})), path)
        except OSError as error:
            raise DataError(f"{str(path)!r} cannot be written: {error}") from error
        self._saved = time.monotonic()

    def _continue(self, path: Path) -> None:
        """Read the sums of an earlier process, if they are of this model and these texts."""
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                if any(about.get(name) != fact for name, fact in self._facts.items()):
                    return
                shapes = {int(nth): tuple(shape) for nth, shape in json.loads(about["shapes"]).items()}
                names = [field.name for field in fields(LayerMoments)]
                found = {
                    nth: LayerMoments(**{name: file.get_tensor(f"{nth}.{name}") for name in names}) for nth in shapes
                }
                self.done, self._shapes, self._found = int(about["done"]), shapes, found
        except (OSError, SafetensorError, KeyError, ValueError):
            return  # damaged: the windows are read again
