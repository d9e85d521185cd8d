"""Candidates of `bench generate --codec`: our full cache in each codec, and transformers' over optimum-quanto.

Without optimum-quanto, or without the compiler and ninja with which it builds its own kernels when it is first used,
quanto's row says what is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, QuantizedCache

from millpond.codec import codec_named
from millpond_lab.bench.common.memory import storage_bytes
from millpond_lab.bench.generate.candidates import GenerateCandidate, GenerateTiming, ours, timed

BITS = {"int4": 4, "int2": 2}  #: our codecs that it has a counterpart of


def coded_candidates(codecs: Sequence[str]) -> list[GenerateCandidate]:
    """Our full cache in bf16, and in each of the codecs; quanto's with as many bits, where it has such.

    Raises:
        OptionError: no such codec.
    """
    for codec in codecs:
        codec_named(codec)
    mine = [ours("full", "", codec=codec) for codec in dict.fromkeys(["bf16", *codecs])]
    return [*mine, *(quanto(codec) for codec in dict.fromkeys(codecs) if codec in BITS)]


def quanto(codec: str) -> GenerateCandidate:
    """Its cache with as many bits as `codec` has, in its default groups and residual window."""

    def run(model: PreTrainedModel, prompts: Tensor, new_tokens: int) -> GenerateTiming:
        cache = QuantizedCache("quanto", model.config, nbits=BITS[codec])
        return timed(model, prompts, new_tokens, cache, lambda: _held(cache))

    return GenerateCandidate("transformers QuantizedCache", f"quanto {codec}", run)


def _held(cache: QuantizedCache) -> int:
    """Bytes of codes, scales and shifts, and of the window that is not quantised yet."""
    layers: Any = cache.layers
    names = ("keys", "values", "_quantized_keys", "_quantized_values")
    return storage_bytes(part for layer in layers for name in names for part in _parts(getattr(layer, name)))


def _parts(tensor: Any) -> Iterator[Tensor]:
    """The plain tensors that a quantised one is made of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    inner, _ = tensor.__tensor_flatten__()
    for name in inner:
        yield from _parts(getattr(tensor, name))
