"""KeptCodec: the storage codec of an engine for sequences of which entries were evicted, and the caches it can code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millpond.cache.batch_cache import BatchCache
from millpond.cache.coded.kept_coder import KeptCoder, KeptCodes, KeptFacts
from millpond.cache.coded.kept_tensors import is_plain
from millpond.cache.serialization import to_tensors
from millpond.engine.storage_codec import ModelCodec
from millpond.engine.transfer.container import without_free_slots
from millpond.errors import OptionError
from millpond.hf.document import state_tensors
from millpond.hf.state_layers import States
from millpond.policy.codec_refusal import storage_refusal
from millpond.runner.cache_factory import CacheFactory
from millpond.runner.packed_model import PackedModel


class KeptCodec:
    """Codes what caches of methods that evict hold of a sequence; safe for several threads.

    Keys and values become codes; positions, scores, budgets and queries of the method stay as they are.

    Args:
        codec: Storage codec of the model.
        model: The model.
        seconds: Where seconds of coding and decoding are added up, see `KeptCoder`.

    Attributes:
        coder: Coder of the layers.
        mark: Codec, transform, and parts of single heads, in words: equal where codes can be read.
    """

    def __init__(self, codec: ModelCodec, model: PackedModel, seconds: dict[str, float]) -> None:
        transform = codec.transform
        self.coder = KeptCoder(transform, codec.codec.bits, codec.rotations, seconds)
        heads = transform.digest_of_heads() if transform.heads else "none"
        self.mark = f"{codec.codec.name} kept {transform.digest()} heads {heads}"
        self._codec, self._n_layers, self._dtype = codec, len(model.layers), model.dtype

    def has_codes(self, cache_factory: CacheFactory) -> bool:
        """Return whether the sequences of caches have such codes."""
        return why_not_kept(cache_factory, self._codec) is None

    def read(
        self, cache_factory: CacheFactory, batch_cache: BatchCache, sequence: int, *, later_prompts: bool
    ) -> dict[str, Tensor] | None:
        """Return a sequence of a batch cache, which stays there, as named tensors on the host.

        None: it holds what has no codes.

        Args:
            cache_factory: Factory of the batch cache.
            batch_cache: The batch cache, whose prompt was planned.
            sequence: Index of the sequence.
            later_prompts: See `millpond.cache.serialization.to_tensors`.
        """
        single_cache = cache_factory.make_cache()
        try:
            batch_cache.copy_to([sequence], single_cache)
            tensors: dict[str, Tensor] = {}
            for layer_cache in single_cache.layers:
                stored = to_tensors(layer_cache, later_prompts=later_prompts)
                if not is_plain(stored):
                    return None
                tensors |= {f"{layer_cache.index}.{name}": tensor.clone() for name, tensor in stored.items()}
            states: Any = single_cache.states
            if isinstance(states, States):
                tensors |= {name: tensor.clone() for name, tensor in state_tensors(states).items()}
            return tensors
        finally:
            single_cache.clear()

    def code(self, tensors: Mapping[str, Tensor], facts: KeptFacts) -> dict[str, Tensor]:
        """Return a sequence with codes in place of keys and values.

        Args:
            tensors: Tensors from `read`.
            facts: Of the sequence.
        """
        return _named(self.coder.code(self._layers(tensors), facts), tensors)

    def decode(self, tensors: Mapping[str, Tensor], ids: np.ndarray) -> tuple[dict[str, Tensor], KeptCodes]:
        """Return a decoded sequence, and what later codes of it go on from.

        It is as `fill_cache` of a container takes it.

        Args:
            tensors: Tensors from `code`.
            ids: Tokens that the sequence has read, (n,).

        Raises:
            DataError: they are damaged, do not fit together, or are of another text.
            OptionError: heads hold other tokens each, and the file has no parts for single heads.
        """
        layers, codes = self.coder.decode(self._layers(tensors), ids, self._dtype, torch.device("cpu"))
        return _named([without_free_slots(layer) for layer in layers], tensors), codes

    def _layers(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return the tensors of each layer without the prefix of their names."""
        return [
            {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            for prefix in (f"{index}." for index in range(self._n_layers))
        ]


def _named(layers: list[dict[str, Tensor]], others: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of layers by name, and those of `others` of no layer."""
    named = {f"{index}.{name}": tensor for index, layer in enumerate(layers) for name, tensor in layer.items()}
    return named | {name: tensor for name, tensor in others.items() if not name.partition(".")[0].isdigit()}


def why_not_kept(cache_factory: CacheFactory, codec: ModelCodec) -> str | None:
    """Return why what caches hold has no codes of `KeptCodec`, with the way out; None: it has."""
    policy = cache_factory.policy
    if (reason := storage_refusal(policy)) is not None:
        return reason
    if policy.keeps_all:
        return "this method drops nothing; its caches have codes of their own, see `why_no_codes`"
    if cache_factory.reach is not None:
        return "overflow='rolling' gives entries other positions; leave one of the two out"
    for number_format in cache_factory.pools.codecs:
        return (
            f"codes are made from plain numbers where a method drops entries, and codec {number_format.name!r} has "
            "codes already; use codec 'auto'"
        )
    if cache_factory.tier is not None or cache_factory.host_kv is not None:
        return "layers have their keys and values on several tiers; keep them in one memory"
    if policy.heads_differ and any(heads > 1 for heads, _, _ in codec.transform.model.shapes):
        try:
            codec.transform.check_head_bits(codec.codec.bits)
        except OptionError as error:
            return str(error)
    return None
