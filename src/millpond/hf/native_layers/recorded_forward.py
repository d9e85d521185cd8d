"""Decoding passes of `generate` through a model's weights alone, each replayed as one graph while a cache is open."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millpond.cache.layer.fused_steps import FusedSteps
from millpond.errors import UnsupportedModelError
from millpond.hf.attention import begin_pass, break_off
from millpond.hf.cache import MillpondCache
from millpond.hf.forward_hooks import ForwardHooks
from millpond.hf.grad_mode import no_autograd
from millpond.hf.model_profile import ModelProfile
from millpond.hf.native_layers.forward_override import ForwardOverride
from millpond.hf.native_layers.plain_pass import NewTokens, computes_alone, is_plain, new_tokens
from millpond.hf.signals.rotary import changes_with_length
from millpond.kernels.args import AttentionShape
from millpond.kernels.cuda_graphs import GraphRecorder, record_cuda, recording
from millpond.kernels.decoder_ops import TOLERANCE
from millpond.models.cache_argument import CACHE_ARGUMENTS, cache_among, cache_argument
from millpond.models.lean.decode_graph import DecodeGraph
from millpond.models.lean.decoder import Decoder
from millpond.models.lean.describe import describe
from millpond.models.lean.fuse import in_place
from millpond.models.lean.layers import block_of
from millpond.models.lean.trial import try_out
from millpond.models.lean.watch import Watch, own_forward

#: Positions of a trial: without a gap, at which some attention functions would begin another text.
_PLACES = (3, 4, 5)


def recorder_of(device: torch.device) -> GraphRecorder | None:
    """Return what records the steps of models on a device; None: their own forward runs."""
    return record_cuda if device.type == "cuda" and recording() else None


class _Parts(NamedTuple):
    """A model taken apart.

    Attributes:
        decoder: Decoder that computes what the model does.
        output: Class of its outputs.
    """

    decoder: Decoder
    output: type[Any]


class _ModelRecord(NamedTuple):
    """Record of a model, valid as long as its watches report it unchanged.

    Attributes:
        own: Forward of its class.
        around: The decoders inside it, whose hooks are those of caches.
        watches: Watches of these, and of the modules inside.
        tried: Whether it was taken apart.
        parts: Its parts; None if it was not taken apart, or its own forward must run.
    """

    own: Callable[..., Any]
    around: tuple[nn.Module, ...]
    watches: tuple[Watch, Watch]
    tried: bool = False
    parts: _Parts | None = None

    def same(self, model: nn.Module) -> bool:
        """Whether nothing was replaced."""
        return type(model).forward is self.own and all(watch.same() for watch in self.watches)

    def quiet(self) -> bool:
        """Whether nobody observes the modules inside, and none of them trains."""
        hooks = (hook for m in self.around for hook in (*m._forward_pre_hooks.values(), *m._forward_hooks.values()))
        if any(module.training for module in self.around):
            return False
        return self.watches[1].quiet() and all(isinstance(getattr(h, "__self__", None), ForwardHooks) for h in hooks)


_records: weakref.WeakKeyDictionary[nn.Module, _ModelRecord] = weakref.WeakKeyDictionary()


@dataclass(slots=True)
class _Steps:
    """Steps of one cache.

    Attributes:
        modules: The model's own modules whose calls are passes, held weakly: the model and the decoders inside it.
        record: Recorder of a step.
        shapes: Shapes of the attention of all layers in the last pass of the model's own forward.
        graph: Recorded steps of `parts`.
    """

    modules: list[weakref.ref[nn.Module]]
    record: GraphRecorder
    is_open: bool = True
    shapes: Sequence[AttentionShape] | None = None
    parts: _Parts | None = None
    graph: DecodeGraph | None = None

    def close(self) -> None:
        """Free the recorded steps; the cache may be passed on, to be refused."""
        self.is_open, self.shapes, self.parts, self.graph = False, None, None, None

    def learn(self, cache: MillpondCache) -> None:
        """Take note of the shapes that a pass of the model's own forward has had."""
        if self.is_open:
            self.shapes = [layer_cache.attention.shape for layer_cache in cache.layer_caches]

    @no_autograd
    def run(self, model: Any, cache: MillpondCache, new: NewTokens) -> Any:
        """Return the output of a pass of one token for each sequence.

        None if the model's own forward must run.
        """
        if self.shapes is None or not is_plain(cache, model):
            return None
        parts = self._parts_of(model)
        positions = None if parts is None else new.positions(cache)
        if positions is None or parts is None:
            return None
        steps = FusedSteps.begin(cache.layer_caches, len(new.ids), self.shapes, changes_basis=True)
        if steps is None:
            return None
        if self.graph is None or self.parts is not parts:
            self.parts, self.graph = parts, DecodeGraph(parts.decoder.forward, self.record)
        logits, lse = self.graph.step(new.ids[:, 0], positions, steps.regions(), steps.bases())
        steps.end(lse)
        return parts.output(logits=logits[:, None], **cache_argument(cache))

    def _parts_of(self, model: Any) -> _Parts | None:
        """Return the parts of the model if it may be bypassed now.

        A model of which anything was replaced is taken apart and tried out again.
        """
        record = _records.get(model)
        if record is None or not record.same(model):
            _records[model] = record = _begin(
                model, [module for module in (ref() for ref in self.modules) if module is not None]
            )
        if not record.quiet():
            return None
        if not record.tried:
            _records[model] = record = record._replace(tried=True, parts=_take_apart(model, self.shapes or ()))
        return record.parts


def _begin(model: nn.Module, passes: Sequence[nn.Module]) -> _ModelRecord:
    """Return the record of a model in its current state, not taken apart yet.

    Args:
        model: The model.
        passes: Modules whose calls are passes: the model, and the decoders inside it.
    """
    around = tuple(module for module in passes if module is not model)
    inside = [module for module in model.modules() if module not in passes]
    layers = [module for decoder in around for module in getattr(decoder, "layers", ())]
    settings = [module for layer in layers for module in layer.modules()]
    watches = Watch(around, around=model, settings=[]), Watch(inside, settings=settings)
    return _ModelRecord(type(model).forward, around, watches)


def _take_apart(model: Any, shapes: Sequence[AttentionShape]) -> _Parts | None:
    """Return the parts of a model with attention of these shapes.

    None if they do not compute what its own forward does.
    """
    if any(own_forward(module) is not None for module in model.modules()):
        return None
    try:
        described = describe(model, move=False)
        blocks = tuple(block_of(layer, in_place) for layer in described.layers)
    except UnsupportedModelError:
        return None
    decoder = replace(described.decoder, blocks=blocks)
    return _try_out(model, decoder, described.layers, shapes) if len(blocks) == len(shapes) else None


def _try_out(
    model: Any, decoder: Decoder, layers: Sequence[nn.Module], shapes: Sequence[AttentionShape]
) -> _Parts | None:
    """Return the parts of a model, if its decoder and its own forward agree on a few tokens.

    None if they do not. It runs inside a pass, before its first layer.
    """
    if model.dtype not in TOLERANCE:
        return None
    outputs: list[Any] = []

    def run(ids: Tensor, positions: Tensor) -> Tensor:
        break_off()  # without a cache, as stock passes are
        try:
            one = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
            output = type(model).forward(model, **one, position_ids=positions[None], use_cache=False, return_dict=True)
        finally:
            begin_pass()
        outputs.append(output)
        logits: Tensor = output.logits[0]
        return logits

    try:
        try_out(decoder, layers, type(model).__name__, run, lambda: shapes, model.device, _PLACES)
    except (UnsupportedModelError, AttributeError, LookupError, TypeError, ValueError, RuntimeError):
        return None  # another model after all
    output = outputs[0]
    if output.logits.dtype is not model.dtype or set(output) - {"logits", *CACHE_ARGUMENTS}:
        return None
    return _Parts(decoder, type(output))


_open: weakref.WeakKeyDictionary[MillpondCache, _Steps] = weakref.WeakKeyDictionary()
_overrides: weakref.WeakKeyDictionary[type[nn.Module], ForwardOverride] = weakref.WeakKeyDictionary()


def _override_of(kind: type[Any]) -> ForwardOverride:
    """Return the override of models of a class, whose signature `generate` reads."""
    if kind not in _overrides:

        @wraps(kind.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            cache = None if torch.compiler.is_compiling() else cache_among(kwargs)
            steps = _open.get(cache) if isinstance(cache, MillpondCache) else None
            if steps is None or cache is None:
                return type(self).forward(self, *args, **kwargs)
            new = new_tokens(self, args, kwargs) if computes_alone(self) else None
            output = None if new is None else steps.run(self, cache, new)
            if output is not None:
                return output
            output = type(self).forward(self, *args, **kwargs)
            steps.learn(cache)
            return output

        forward.__name__ = "forward"
        _overrides[kind] = ForwardOverride(forward)
    return _overrides[kind]


def use_recorded_forward(model: PreTrainedModel, profile: ModelProfile, cache: MillpondCache) -> Callable[[], None]:
    """Let the model's decoding passes with this cache run as one recorded step each.

    They run without its modules.

    Only `forward` of the model is replaced, and it runs its own for any pass but those of one token for each sequence
    that ask for nothing else than logits: with hooks inside the model, gradients, drafts or pads, and where a layer of
    the cache needs more than its step. Weights are read where they are.

    Returns:
        Function that undoes it, once no other caller needs it.
    """
    recorder = recorder_of(model.device)
    kept_out = cache.entropies is not None or cache.policy.reads_hidden or profile.takes_images
    if recorder is None or kept_out or changes_with_length(profile):
        return lambda: None
    override = _override_of(type(model))
    if "forward" in vars(model) and not override.serves(model):
        return lambda: None
    if not override.serves(model):
        try:
            describe(model, move=False)
        except UnsupportedModelError:
            return lambda: None
    steps = _open[cache] = _Steps([weakref.ref(module) for module in profile.modules], recorder)
    end = override.begin([model])
    model_is_gone = weakref.finalize(model, steps.close)  # which hold its weights
    model_is_gone.atexit = False

    def undo() -> None:
        model_is_gone.detach()
        steps.close()
        end()

    return undo
