"""SequenceCodec: the storage codec of an engine for whole sequences, and the caches that it can code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from millpond.cache.batch_cache import BatchCache, Pages
from millpond.cache.coded.coder import TextCoder
from millpond.cache.coded.fill import fill_layer, layer_entries
from millpond.cache.coded.swap import SequenceFacts
from millpond.cache.coded.tensors import text_of, text_tensors
from millpond.cache.coded.text import CodedText, LayerEntries
from millpond.cache.pages.ref_counted_pool import Pool
from millpond.engine.coded.kept_codec import KeptCodec, why_not_kept
from millpond.engine.storage_codec import ModelCodec
from millpond.errors import CacheMismatchError, DataError, OptionError
from millpond.hf.document import PREFIX, restore_states, state_tensors
from millpond.hf.state_layers import States
from millpond.kernels.args import AttentionShape
from millpond.kernels.thread_count import alone
from millpond.policy.codec_refusal import storage_refusal
from millpond.runner.cache_factory import CacheFactory
from millpond.runner.packed_model import PackedModel

T = TypeVar("T")

#: Number formats of live entries that codes are made from: their own errors are far below those of codes.
CLOSE = {"int8", "fp8"}
#: Prefix of the names of codes among the tensors of a sequence, and end of the name of a layer's attention.
CODES, SHAPE = "codes.", ".shape"


@dataclass(frozen=True, slots=True, eq=False)
class SequenceEntries:
    """A sequence outside of any cache.

    Attributes:
        layers: What each layer holds, on the host.
        others: Settings of the attention of each layer, and states of a hybrid, on the host.
    """

    layers: Sequence[LayerEntries]
    others: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of entries and states."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Return all of it by name."""
        entries = {
            f"{index}.{name}": side
            for index, layer in enumerate(self.layers)
            for name, side in (("keys", layer.keys), ("values", layer.values))
        }
        return entries | self.others


class SequenceCodec:
    """Codes the sequences of caches; safe for several threads.

    Args:
        codec: Storage codec of the model.
        model: The model.

    Attributes:
        coder: Coder of the model.
        name: Name of the codec, such as "transform:1.5".
        mark: Name and digest of the transform, in words: equal where codes can be read.
        kept: Codes what caches of methods that evict hold.
        thread: Where requests are coded and decoded beside the steps.
    """

    def __init__(self, codec: ModelCodec, model: PackedModel) -> None:
        self.coder = TextCoder(codec.transform, codec.codec.bits, codec.rotations)
        self.name = codec.codec.name
        self.mark = f"{self.name} {self.coder.digest}"
        self.kept = KeptCodec(codec, model, self.coder.seconds)
        self.thread = ThreadPoolExecutor(1, "millpond-codes")
        self._model = model

    def close(self) -> None:
        """End the thread; what it has not begun is not done."""
        self.thread.shutdown(cancel_futures=True)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Let the thread of codes do some work, on one core."""
        return self.thread.submit(alone, work)

    # ------------------------------------------------------------------ into codes

    def read(self, cache_factory: CacheFactory, batch_cache: BatchCache, sequence: int) -> SequenceEntries | None:
        """Return a sequence of a batch cache, which stays there.

        None: it has no codes, since some of its tokens were dropped, or others are held in each head.
        """
        single_cache = cache_factory.make_cache()
        try:
            batch_cache.copy_to([sequence], single_cache)
            end = int(single_cache.tracker.seen[0])
            layers, others = [], dict[str, Tensor]()
            for layer_cache in single_cache.layers:
                layer = layer_entries(layer_cache.read(0), end)
                if layer is None:
                    return None
                layers.append(layer)
                shape = layer_cache.attention.shape
                numbers = [shape.scale, shape.softcap, shape.window]
                others[f"{layer_cache.index}{SHAPE}"] = torch.tensor(numbers, dtype=torch.float64)
            states: Any = single_cache.states
            if isinstance(states, States):
                others |= {name: tensor.clone() for name, tensor in state_tensors(states).items()}
            return SequenceEntries(layers, others)
        finally:
            single_cache.clear()

    def code(self, entries: SequenceEntries, facts: SequenceFacts) -> tuple[dict[str, Tensor], CodedText]:
        """Return a sequence as named tensors with codes, and the codes."""
        text = self.coder.code(entries.layers, facts.exact, facts.ids, facts.codes)
        codes = {CODES + name: tensor for name, tensor in text_tensors(text).items()}
        return {**entries.others, **codes}, text

    # ------------------------------------------------------------------ out of codes

    def decode(self, tensors: Mapping[str, Tensor], ids: np.ndarray) -> tuple[SequenceEntries, CodedText]:
        """Return the sequence of `code`, and its codes.

        Args:
            tensors: Tensors from `code`.
            ids: Tokens that the sequence has read, (n,).

        Raises:
            DataError: they are damaged, do not fit together, or are of another text.
        """
        codes = {name.removeprefix(CODES): tensor for name, tensor in tensors.items() if name.startswith(CODES)}
        text = text_of(codes, self.coder.transform, ids)
        others = {name: tensor for name, tensor in tensors.items() if not name.startswith(CODES)}
        for index in range(len(self._model.layers)):
            shape = others.get(f"{index}{SHAPE}")
            if shape is None or shape.shape != (3,) or not bool(shape.isfinite().all()):
                raise DataError(f"layer {index}: codes of a text lack its attention; read its prompt again")
        layers = list(self.coder.decode(text, self._model.dtype, torch.device("cpu")))
        return SequenceEntries(layers, others), text

    def pages(self, cache_factory: CacheFactory, n: int, n_seq: int = 1) -> Pages:
        """Return the pages that `fill` takes, and slots of states.

        Args:
            cache_factory: Factory of the cache.
            n: Most tokens of a sequence.
            n_seq: Number of sequences.
        """
        need: Counter[Pool] = Counter()
        for layer in self._model.layers:
            pool = cache_factory.prompt_pool(layer)
            need[pool] += n_seq * layer.n_kv_heads * -(-n // pool.slots)
        if cache_factory.slots is not None:
            need[cast(Pool, cache_factory.slots)] += n_seq
        return dict(need)

    def fill(self, batch_cache: BatchCache, entries: SequenceEntries, ids: Tensor) -> None:
        """Fill an empty batch cache with a sequence, as if it had read its prompt.

        Args:
            batch_cache: The batch cache, which reads a prompt.
            entries: The sequence.
            ids: Tokens that it has read, (n,).

        Raises:
            DataError: states of other layers. The caller clears the batch cache then.
            PoolFullError: no memory is free. The caller clears the batch cache then.
        """
        for layer_cache, layer in zip(batch_cache.layers, entries.layers, strict=True):
            scale, softcap, window = entries.others[f"{layer_cache.index}{SHAPE}"].tolist()
            fill_layer(layer_cache, layer, AttentionShape(scale, softcap, int(window)), ids.device)
        states: Any = batch_cache.states
        if isinstance(states, States):
            stored = {name: tensor for name, tensor in entries.others.items() if name.startswith(PREFIX)}
            restore_states(states, stored, ids.device)
        batch_cache.tracker.adopt(ids[None])
        for layer_cache in batch_cache.layers:
            layer_cache.columns = len(ids)

    def check_mark(self, mark: str) -> None:
        """Check that codes were written by this codec.

        Raises:
            CacheMismatchError: they were not.
        """
        if mark not in (self.mark, self.kept.mark):
            raise CacheMismatchError(
                f"codes were written by {mark[:120]}, and this engine reads those of {self.mark}: give both the same "
                "storage_codec and the same transform file as calibration"
            )


def check_codes(cache_factory: CacheFactory, method: str, codec: ModelCodec, where: str) -> None:
    """Check that caches of a method have codes.

    Args:
        cache_factory: Factory of the caches.
        method: Name of the method.
        codec: The storage codec.
        where: The setting that stores them.

    Raises:
        OptionError: they have none; the message says why, and what has.
    """
    name = f"storage_codec={codec.codec.name!r} with {where}"
    policy = cache_factory.policy
    if not policy.keeps_all or storage_refusal(policy) is not None:
        if (reason := why_not_kept(cache_factory, codec)) is not None:
            raise OptionError(f"{name} and method {method!r}: {reason}")
        return
    why = why_no_codes(cache_factory, method)
    if why is None and where != "cache_dir=" and cache_factory.pools.codecs:
        why = "pages of codes stay as they are where they wait"
    if why is not None:
        formats = "'auto'" if where != "cache_dir=" else "'auto', 'int8' or 'fp8'"
        raise OptionError(
            f"{name} codes a token of a sequence in all heads together, and {why}; use method 'full' with codec "
            f"{formats}, or leave one of the two out"
        )


def why_no_codes(cache_factory: CacheFactory, method: str) -> str | None:
    """Return why the sequences of caches have no codes; None: they have."""
    policy = cache_factory.policy
    if cache_factory.reach is not None:
        return "overflow='rolling' gives entries other positions"
    if not policy.keeps_all or policy.takes_budget or policy.needs.block_lookup is not None:
        return f"method {method!r} drops tokens, or keeps more than keys and values"
    for codec in cache_factory.pools.codecs:
        if codec.name not in CLOSE:
            return f"codec {codec.name!r} leaves only codes of its own, too far from the numbers that the model made"
    if cache_factory.tier is not None or cache_factory.host_kv is not None:
        return "layers have their keys and values on several tiers"
    return None


def has_codes(cache_factory: CacheFactory) -> bool:
    """Return whether the sequences of caches have codes."""
    return why_no_codes(cache_factory, "of a request") is None
