"""One stage of a model whose layers are in several processes, and the links between two of them.

Source: DistServe, arXiv:2401.09670, section 3 (inter-operator parallelism). All stages run one engine each, with the
same requests in the same steps. A stage computes its own layers and holds their caches, and each step has its hidden
states from the stage before it and its logits from the last one.
"""

from __future__ import annotations

import hashlib
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

from millpond.errors import MillpondError, OptionError, UnsupportedModelError

#: Models whose layers are alike, and whose embeddings and head nothing scales outside of them.
FAMILIES = ("llama", "qwen2", "qwen3")
#: Seconds in which another stage computes its part of a step.
STEP_S = 600.0
_DIGEST = 16


class StageLostError(MillpondError):
    """Another stage has ended, does not answer, or runs another step."""


class StageLink:
    """Tensors to a neighbour, with a digest of the ids of their step.

    Args:
        connection: One end of a pipe between two processes of one owner.
        name: What the other stage is called in errors.
    """

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection, self._name = connection, name

    def send(self, digest: bytes, tensor: Tensor) -> None:
        """Send a tensor.

        Raises:
            StageLostError: the other stage has ended.
        """
        try:
            self._connection.send_bytes(digest + tensor.contiguous().view(torch.uint8).numpy().tobytes())
        except OSError:
            raise StageLostError(f"{self._name} has ended: begin again with a new pipeline") from None

    def receive(self, digest: bytes, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Wait for a tensor of this shape that is of the same step.

        Raises:
            StageLostError: the other stage has ended, does not answer, or sends what is of another step.
        """
        size = torch.Size(shape).numel() * dtype.itemsize
        try:
            if not self._connection.poll(STEP_S):
                raise StageLostError(f"{self._name} has not answered within {STEP_S:g} seconds")
            data = bytearray(self._connection.recv_bytes(_DIGEST + size))
        except (OSError, EOFError):
            raise StageLostError(f"{self._name} has ended, or sent too much: begin again with a new pipeline") from None
        if bytes(data[:_DIGEST]) != digest or len(data) != _DIGEST + size:
            raise StageLostError(f"{self._name} runs another step than this one: report this")
        return torch.frombuffer(data, dtype=torch.uint8, offset=_DIGEST).view(dtype).reshape(shape)

    def close(self) -> None:
        """Close this end, so that the other stage hears of it."""
        self._connection.close()


class _Entry(nn.Module):
    """Hidden states of a step: embeddings in the first stage, else from the stage before."""

    def __init__(self, embed: nn.Module | None, before: StageLink | None, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed, self._before, self._width, self._dtype = embed, before, width, dtype
        self.digest = b""
        self.under_way = False

    def forward(self, ids: Tensor) -> Tensor:
        self.under_way = True
        self.digest = hashlib.blake2b(ids.numpy().tobytes(), digest_size=_DIGEST).digest()
        if self.embed is not None:
            hidden: Tensor = self.embed(ids)
            return hidden
        assert self._before is not None, "all stages but the first have one before them"
        return self._before.receive(self.digest, (*ids.shape, self._width), self._dtype)


class _HandOn(nn.Module):
    """Sends the hidden states of all tokens to the stage behind, in place of the last norm."""

    def __init__(self, entry: _Entry, behind: StageLink) -> None:
        super().__init__()
        self._entry, self._behind = [entry], behind  # in a list, since it is no part of this module

    def forward(self, hidden: Tensor) -> Tensor:
        self._behind.send(self._entry[0].digest, hidden)
        return hidden


class _Head(nn.Module):
    """Logits of a step: of the last stage, and sent from each stage to the one before."""

    def __init__(
        self, entry: _Entry, head: nn.Module | None, before: StageLink | None, behind: StageLink | None, vocabulary: int
    ) -> None:
        super().__init__()
        self.head, self._before, self._behind, self._vocabulary = head, before, behind, vocabulary
        self._entry = [entry]

    def forward(self, hidden: Tensor) -> Tensor:
        digest = self._entry[0].digest
        if self.head is not None:
            logits: Tensor = self.head(hidden)
        else:
            assert self._behind is not None, "the last stage has the head"
            logits = self._behind.receive(digest, (*hidden.shape[:-1], self._vocabulary), hidden.dtype)
        if self._before is not None:
            self._before.send(digest, logits)
        self._entry[0].under_way = False
        return logits


def cut(model: Any, stage: int, stages: int, before: StageLink | None, behind: StageLink | None) -> Any:
    """Keep the layers of one stage, and join their ends to other stages; the model is changed.

    Args:
        model: A transformers decoder on a CPU; others need it no more.
        stage: Number of the stage, from 0.
        stages: Number of all of them.
        before: Link to the stage before; None: this is the first.
        behind: Link to the stage behind; None: this is the last.

    Raises:
        UnsupportedModelError: a model of another family, or with windows. OptionError: fewer layers than stages.
    """
    config: Any = model.config
    windows = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if config.model_type not in FAMILIES or windows:
        raise UnsupportedModelError(
            f"a pipeline takes models of {', '.join(FAMILIES)} without windows, and this one is {config.model_type}"
            + (f" with {', '.join(sorted(windows))}" if windows else "")
        )
    decoder: Any = model.model
    first, end = (config.num_hidden_layers * n // stages for n in (stage, stage + 1))
    if config.num_hidden_layers < stages:
        raise OptionError(f"stages={stages} of a model of {config.num_hidden_layers} layers; give at most as many")
    entry = _Entry(None if before else decoder.embed_tokens, before, config.hidden_size, model.dtype)
    decoder.layers = nn.ModuleList(decoder.layers[first:end])
    for index, layer in enumerate(decoder.layers):
        layer.self_attn.layer_idx = index
    config.num_hidden_layers = end - first
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[first:end]
    decoder.embed_tokens = entry
    if behind is not None:
        decoder.norm = _HandOn(entry, behind)
    head = None if behind else model.lm_head
    model.lm_head = _Head(entry, head, before, behind, config.vocab_size)
    return model


def is_under_way(model: Any) -> bool:
    """Return whether a pass of a stage has begun and not ended: then the other stages wait for what is left of it."""
    under_way: bool = model.model.embed_tokens.under_way
    return under_way
