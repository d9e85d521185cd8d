"""What gates keep of texts, and what the model predicts then: flags inside a prompt, or acted on at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from millpond.hf.adapter import ALL, acting
from millpond.hf.model_profile import ModelProfile
from millpond.hf.offline import read_later
from millpond.policy.prompt_flags import PromptFlags
from millpond.policy.trained.adapter import Adapter
from millpond.policy.trained.networks import CONTEXT_DTYPE, LayerGate
from millpond_lab.train.gate.objective import pinned_entries
from millpond_lab.train.gate.weighted_attention import masked_attention, weighted_attention
from millpond_lab.train.retain.features import ReadPrompt, TextReader
from millpond_lab.train.retain.texts import Asked

#: Where flags act: inside a prompt, or when it has been read in full; see `attention_gate`.
Acts = Literal["prompt", "end"]
#: flag(layer, features): features (n, inputs) of a prompt's tokens -> (KV heads, n), what is kept: 0 or 1.
Flag = Callable[[int, Tensor], Tensor]
#: Halvings of the interval in which the shift is looked for.
HALVINGS = 30
#: Readings after which the shift is taken as it is, and how near to the target it may be before.
MOST_READINGS, NEAR = 6, 0.001


class Judged(NamedTuple):
    """A text as gates judged it.

    Attributes:
        hidden: (n, units) of each layer. logits: (KV heads, n) of each layer, without the shift.
        predicted: (m, vocabulary) of the later tokens with what is kept.
    """

    hidden: list[Tensor]
    logits: list[Tensor]
    predicted: Tensor


def read_inside(reader: TextReader, asked: Asked, flag: Flag, sinks: int, window: int) -> Tensor:
    """(m, vocabulary): predictions of the later tokens where flags act inside the prompt, in every layer.

    A query of the prompt sees itself, sinks, the newest `window` entries and flagged ones; a later token what is kept
    of the prompt, and the later tokens before it. Gradients flow through flags and features of all layers.
    """
    n, total = asked.begin, len(asked.ids)
    flags, device = PromptFlags(0.5, sinks, window), reader.model.device
    always, shapes = _always(n, total, flags, device), reader.shapes

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape = shapes[layer]
        weights = flag(layer, reader.features(layer, q[None], k[None], v[None], n))
        if not flags.act_within(shape.window):
            weights = torch.ones_like(weights)
        return masked_attention(q, k, v, F.pad(weights, (0, total - n), value=1.0), always, shape)

    return read_later(reader.model, asked.ids, 0, attend, last=total - n)


def _always(n: int, total: int, flags: PromptFlags, device: torch.device) -> Tensor:
    """(total, total) bool: whether a query sees an entry whatever its flag is, if it is not newer."""
    at = torch.arange(total, device=device)
    row, column = at[:, None], at
    newest = torch.where(row < n, column > row - flags.band, column >= n - flags.window)
    return newest | (column < flags.sinks)


def read_gated(model: PreTrainedModel, asked: Asked, prompt: ReadPrompt, flags: list[Tensor]) -> Tensor:
    """(m, vocabulary): predictions of the later tokens with what `flags` (KV heads, n) per layer keep of the prompt.

    prompt: as the model read it in full.
    """

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = prompt.layers[layer]
        return weighted_attention(q, k, v, found.keys, found.values, flags[layer], found.shape)

    return read_later(model, asked.ids[asked.begin :], asked.begin, attend)


class GateJudge:
    """What gates keep of texts, by how their flags act.

    Args:
        reader: of the model. acts: see `Acts`.
        sinks, window: first and newest entries of a prompt that stay.
        adapter: of the model's projections, which acts too; None: there is none.
    """

    def __init__(self, reader: TextReader, acts: Acts, sinks: int, window: int, adapter: Adapter | None = None) -> None:
        self.pins = sinks, window
        self._reader = reader
        self._acts = acts
        self._adapters = [] if adapter is None else [(adapter, ALL)]

    @torch.no_grad()
    def judge(self, layers: Sequence[LayerGate], asked: Asked, shift: float = 0.0) -> Judged:
        """What the gates of the layers, with `shift` added to every bias, keep of one text."""
        layers = [gate.to(self._reader.model.device) for gate in layers]
        hidden: list[Tensor] = []
        logits: list[Tensor] = []

        def flag(layer: int, features: Tensor) -> Tensor:
            gate, x = layers[layer], features.float()
            queries, *context = gate.take(x)
            hidden.append(gate.hidden(x, queries, *(part.to(CONTEXT_DTYPE) for part in context)))
            logits.append(F.linear(hidden[-1], gate.w2, gate.b2).T)
            return flags_of(logits[-1] + shift, *self.pins)

        with acting(ModelProfile.of(self._reader.model), self._adapters):
            if self._acts == "prompt":
                return Judged(hidden, logits, read_inside(self._reader, asked, flag, *self.pins))
            prompt = self._reader.read_prompt(asked.ids, asked.begin)
            flags = [flag(index, layer.features) for index, layer in enumerate(prompt.layers)]
            return Judged(hidden, logits, read_gated(self._reader.model, asked, prompt, flags))

    def shift_to(self, target: float, layers: Sequence[LayerGate], texts: Iterable[Asked]) -> float:
        """Number to add to every bias so that texts keep `target` in the mean, or as near as pinned entries let.

        Where flags act inside a prompt, later layers read what they left, so the texts are read again with each shift.
        """
        texts, shift = list(texts), 0.0
        for _ in range(MOST_READINGS):
            logits = [self.judge(layers, text, shift).logits for text in texts]
            before, shift = shift, shift_to(target, logits, *self.pins)
            kept = [share_of(found, *self.pins, before) for found in logits]
            if abs(sum(kept) / len(kept) - target) <= NEAR:
                return before
        return shift


def flags_of(logits: Tensor, sinks: int, window: int) -> Tensor:
    """(KV heads, n) 0 or 1: what is kept of a prompt, given the logits of its tokens and the entries that stay."""
    return ((logits > 0) | pinned_entries(logits.shape[1], sinks, window, logits.device)).float()


def share_of(logits: Sequence[Tensor], sinks: int, window: int, shift: float = 0.0) -> float:
    """Share of the entries of one prompt that is kept with `shift` added to every bias.

    Args:
        logits: (KV heads, n) of each layer.
    """
    return float(torch.cat([flags_of(z + shift, sinks, window).flatten() for z in logits]).mean())


def shift_to(target: float, logits: Sequence[Sequence[Tensor]], sinks: int, window: int) -> float:
    """Number to add to every bias so that texts keep `target` in the mean, or as near as pinned entries let.

    Args:
        logits: (KV heads, n) by text and layer.
    """
    low, high = -30.0, 30.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        shares = [share_of(found, sinks, window, middle) for found in logits]
        low, high = (low, middle) if sum(shares) > target * len(shares) else (middle, high)
    return (low + high) / 2
