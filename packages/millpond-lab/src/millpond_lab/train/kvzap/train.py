"""Training of KVzap's networks: `train_kvzap(model, ask, texts, out)` on a frozen model, in minutes.

Texts are read first, each in one pass with its repetition; then each layer's network is fitted to what was drawn of
them. A call that is cut off begins again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millpond.errors import NumericsError
from millpond.hf.calibration.load import model_mark
from millpond.policy.trained.file import save_heads
from millpond.policy.trained.gelu_score import NARROWER
from millpond.policy.trained.hidden_networks import HiddenNetwork, HiddenNetworks
from millpond_lab.train.common.network_run import cpu_threads
from millpond_lab.train.kvzap.fit import Explained, fit_gelu, fit_linear
from millpond_lab.train.kvzap.labels import LayerSample, RepeatReader
from millpond_lab.train.retain.texts import Texts

#: Names of the random streams: of training, and of the texts behind R2.
TRAIN_STREAM, CHECK_STREAM = "kvzap", "kvzap-check"
#: Kind of networks.
Network = Literal["linear", "mlp"]


@dataclass(frozen=True)
class KVzapSettings:
    """The numbers of the recipe.

    Attributes:
        network: linear, or mlp. texts: that are read. tokens: drawn of each. check_texts: held-out ones behind R2.
        epochs: of an mlp over what was drawn. middle: its width; 0 for an eighth of the hidden size.
    """

    seed: int = 0
    network: Network = "linear"
    texts: int = 200
    tokens: int = 500
    check_texts: int = 16
    epochs: int = 15
    middle: int = 0


class KVzapResult(NamedTuple):
    """Result of `train_kvzap`."""

    networks: HiddenNetworks
    r2: list[list[float]]  #: of each layer, by KV head, on held-out texts
    quantiles: list[float]  #: of all labels on held-out texts: the tenth, the half, and nine tenths of them
    time_s: float


def train_kvzap(
    model: PreTrainedModel,
    ask: Sequence[int],
    texts: Texts,
    out: Path,
    settings: KVzapSettings,
    *,
    threads: int | None = None,
) -> KVzapResult:
    """Train networks into the file `out`.

    Args:
        ask: token ids of the request for a repetition. texts: equal seeds draw equal ones.
        threads: CPU threads of torch; None leaves them as they are.

    Raises:
        NumericsError: labels that are not finite.
        UnsupportedModelError: a model whose attention modules or output projections cannot be read.
    """
    begun = time.monotonic()
    with cpu_threads(threads):
        reader = RepeatReader(model, ask)
        layers = [_fitted(layer, settings) for layer in _drawn(reader, texts, settings)]
        checked, found = [Explained() for _ in layers], []
        for step in range(settings.check_texts):
            for explained, network, sample in zip(
                checked, layers, _read(reader, texts, CHECK_STREAM, step, settings), strict=True
            ):
                explained.add(network, sample.hidden, sample.labels)
                found.append(sample.labels.flatten())
    r2 = [explained.r2() for explained in checked]
    facts = {"data": texts.name, "texts": str(settings.texts), "seed": str(settings.seed), "network": settings.network}
    networks = HiddenNetworks(layers, model_mark(model), type(model).__name__, facts)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_heads(networks, out)
    quantiles = [float(torch.cat(found).quantile(share)) for share in (0.1, 0.5, 0.9)]
    return KVzapResult(networks, r2, quantiles, time.monotonic() - begun)


def _read(reader: RepeatReader, texts: Texts, name: str, step: int, settings: KVzapSettings) -> list[LayerSample]:
    found = reader.read(texts.draw(name, settings.seed, step).ids)
    for layer, sample in enumerate(found):
        if not bool(torch.isfinite(sample.labels).all()):
            raise NumericsError(f"labels of layer {layer} are not finite: load the model in f32 or bf16")
    return found


def _drawn(reader: RepeatReader, texts: Texts, settings: KVzapSettings) -> list[LayerSample]:
    """What was drawn of all texts, layer by layer; hidden states as the model computes them, in 16 bits at most."""
    draw = torch.Generator().manual_seed(settings.seed)
    hidden: list[list[Tensor]] = []
    labels: list[list[Tensor]] = []
    for step in range(settings.texts):
        found = _read(reader, texts, TRAIN_STREAM, step, settings)
        n = len(found[0].hidden)
        chosen = torch.randperm(n, generator=draw)[: settings.tokens].to(found[0].hidden.device)
        hidden, labels = hidden or [[] for _ in found], labels or [[] for _ in found]
        for layer, sample in enumerate(found):
            hidden[layer].append(sample.hidden[chosen].bfloat16())
            labels[layer].append(sample.labels[chosen])
    return [LayerSample(torch.cat(h), torch.cat(y)) for h, y in zip(hidden, labels, strict=True)]


def _fitted(sample: LayerSample, settings: KVzapSettings) -> HiddenNetwork:
    if settings.network == "linear":
        return fit_linear(sample.hidden, sample.labels)
    middle = settings.middle or max(1, sample.hidden.shape[1] // NARROWER)
    return fit_gelu(sample.hidden, sample.labels, middle, settings.epochs, settings.seed)
