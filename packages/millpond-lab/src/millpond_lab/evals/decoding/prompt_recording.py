"""One reading of a prompt for many settings of the cache: layers of each are given what those of the full one were.

A method that evicts when a prompt has been read, and not inside it, changes nothing of what the model computes for the
prompt. The first pass is therefore run once, with the full cache, and each layer of another cache is then given the
queries, keys and values that the model would have given it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millpond.cache.attention.paged import PagedAttention
from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.state.reconstruction import ReconstructionProbe
from millpond.cache.types import PromptChunk
from millpond.hf.attention_inputs import AttentionInputs
from millpond.hf.cache import MillpondCache
from millpond.hf.grad_mode import no_autograd
from millpond.hf.layer import MillpondLayer
from millpond.hf.model_profile import ModelProfile
from millpond.hf.protocol import LayerCaches
from millpond.hf.signals.reconstruction import PromptReconstruction
from millpond.kernels.args import AttentionShape
from millpond.kernels.decode_rules import Reduce
from millpond.policy.needs import PromptRepeat

#: Bytes of a recording beyond which nothing is recorded, and each cache reads for itself.
MOST_BYTES = 4 << 30


class PromptReader(Protocol):
    """What has read some prompts: their ids and their mask (rows, columns), and the logits of each row's newest."""

    ids: Tensor
    mask: Tensor
    logits: Tensor


Openings = tuple[tuple[int, ...], ...]
#: What a layer's attention returns for a prompt: output, log-sum-exp, and column sums where they were asked for.
Attended = tuple[Tensor, Tensor, Tensor | None]


@dataclass(slots=True)
class LayerRecording:
    """What one layer was given in the pass, see `LayerCache.attend`, and its attention for each sequence.

    Attributes:
        attended: attention by sequence, reduction of the column sums (None: no sums) and their decay.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    shape: AttentionShape
    hidden: Tensor | None = None
    attended: dict[tuple[int, Reduce | None, float], Attended] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the recording, with one output of its attention."""
        given = (self.q, self.q, self.k, self.v, self.hidden)
        return sum(tensor.nbytes for tensor in given if tensor is not None)


class PromptRecording:
    """The first pass of some prompts, recorded with the full cache.

    Attributes:
        openings: tokens of the prompts. done: whether the pass was run. given_up: whether it takes too many bytes.
        ids, mask: of the pass, (rows, columns). logits: (rows, vocabulary) after each row's newest token.
        layers: by number of the layer in the model; empty where recording was given up.
        repeated: what each layer received when the prompts were repeated (KVzip).
    """

    def __init__(self, openings: Openings) -> None:
        self.openings = openings
        self.logits = torch.empty(0)
        self.ids = self.mask = torch.empty(0, dtype=torch.long)
        self.layers: dict[int, LayerRecording] = {}
        self.repeated: dict[PromptRepeat, list[ReconstructionProbe]] = {}
        self.done = self.given_up = False

    @contextmanager
    def of(self, model: PreTrainedModel, cache: MillpondCache, hidden: bool) -> Iterator[None]:
        """Record the pass inside the block.

        Args:
            cache: a full cache.
            hidden: whether what the attention modules read is recorded too.
        """
        inputs = AttentionInputs(ModelProfile.of(model), lambda: cache.passes.running) if hidden else None
        numbers = {number: place for place, number in enumerate(cache.entry_layers)}

        def see(layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: AttentionShape) -> None:
            read = None if inputs is None else inputs.take(numbers[layer])
            self._keep(layer, LayerRecording(q, k, v, mask, shape, read), len(numbers))

        cache.watch(see)
        undo = [self._watch(layer.attention, number) for number, layer in cache.entry_layers.items()]
        try:
            yield
            self.done = True
        finally:
            for restore in undo:
                restore()
            cache.watch(None)
            if inputs is not None:
                inputs.close()

    def take(self, reader: PromptReader) -> None:
        """Take what the pass of a reader gave besides what the layers were given."""
        self.ids, self.mask, self.logits = reader.ids, reader.mask, reader.logits

    def _keep(self, layer: int, recording: LayerRecording, n_layers: int) -> None:
        self.given_up |= recording.nbytes * n_layers > MOST_BYTES
        if self.given_up:
            self.layers.clear()
        else:
            self.layers[layer] = recording

    def _watch(self, attention: PagedAttention, number: int) -> Callable[[], None]:
        """Let a layer's attention to a recorded prompt be computed once; return what undoes it."""
        compute = attention.chunk

        def chunk(chunk: PromptChunk, reduce: Reduce | None, decay: float = 1.0) -> Attended:
            recording = self.layers.get(number)
            if recording is None or not self._is_prompt(chunk):
                return compute(chunk, reduce, decay)
            key = (chunk.sequence, reduce, decay)
            if key not in recording.attended:
                out, lse, sums = compute(chunk, reduce, decay)
                plain = recording.attended.setdefault((chunk.sequence, None, 1.0), (out, lse, None))
                recording.attended[key] = (*plain[:2], sums)  # one output for all
            return recording.attended[key]

        attention.chunk = chunk  # type: ignore[method-assign]

        def undo() -> None:
            del attention.chunk

        return undo

    def _is_prompt(self, chunk: PromptChunk) -> bool:
        """Whether a chunk is a whole prompt; its numbers may be rotated, which changes no log-sum-exp and no sums."""
        return len(chunk.q_pos) == chunk.entries.positions.shape[1] == len(self.openings[chunk.sequence])

    def fits(self, cache: MillpondCache) -> bool:
        """Whether the model computes the same of these prompts with a cache, which is empty, as with the full one."""
        policy, needs = cache.policy, cache.policy.needs
        inside = policy.prefill != "once" or policy.positions != "absolute" or needs.prompt_flags is not None
        inside |= needs.block_lookup is not None or needs.prompt_patterns is not None or needs.entropies is not None
        inside |= policy.gates is not None and policy.gates.adapter is not None
        inside |= any(codec.prune_values for codec in cache.codecs)  # by the norms of outputs, of each basis
        plain = all(type(layer) is MillpondLayer and type(layer.layer_cache) is LayerCache for layer in cache.layers)
        known = [*self.layers] == [*cache.entry_layers] and not cache.shared_layers
        read = not policy.reads_hidden or all(layer.hidden is not None for layer in self.layers.values())
        return known and plain and read and not inside and all(len(opening) > 1 for opening in self.openings)

    @no_autograd
    def give(self, cache: MillpondCache) -> None:
        """Let an empty cache that `fits` read the prompts, without the model."""
        cache.begin_pass(0, self.ids, self.ids.shape[1])
        layers: Any = cache.layers
        for number, recording in self.layers.items():
            layer = layers[number]
            undo = self._watch(layer.layer_cache.attention, number)
            hidden = recording.hidden if cache.policy.reads_hidden else None
            given = (recording.q, recording.k, recording.v, recording.mask, recording.shape)
            if layer.observer is not None:
                layer.observer(number, *given)
            try:
                layer.draft_rollback.attend(layer.layer_cache, *given, hidden)
            finally:
                undo()
        if cache.rebuilder is not None:
            self._watch_repetition(cache.rebuilder)
        cache.end_pass()

    def _watch_repetition(self, rebuilder: PromptReconstruction) -> None:
        """Let the repetition of the prompts be computed once; those of later turns are not of the prompts alone."""
        compute = rebuilder.measure

        def measure(cache: LayerCaches) -> list[ReconstructionProbe]:
            del rebuilder.measure
            wanted = rebuilder.settings
            for known, probes in self.repeated.items():
                if known == wanted or (not wanted.queries and replace(known, queries=0) == wanted):
                    return probes
            return self.repeated.setdefault(wanted, compute(cache))

        rebuilder.measure = measure  # type: ignore[method-assign]


class PromptRecordings:
    """Recordings for the settings of a run: that of the newest prompts is kept.

    Args:
        hidden: whether a setting reads what the attention modules read.
    """

    def __init__(self, hidden: bool) -> None:
        self.hidden = hidden
        self._newest: PromptRecording | None = None

    def of(self, openings: Sequence[Sequence[int]]) -> PromptRecording | None:
        """The recording of these prompts: a new one, to be made, where they are not those of the last call.

        None where the last one was given up: then those to come, of prompts of the same task, would be too.
        """
        wanted = tuple(tuple(opening) for opening in openings)
        if self._newest is not None and self._newest.given_up:
            return None
        if self._newest is None or self._newest.openings != wanted:
            self._newest = None  # free the last one first
            self._newest = PromptRecording(wanted)
        return self._newest
