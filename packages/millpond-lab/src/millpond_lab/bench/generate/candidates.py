"""Candidates of `bench generate`: our methods, and transformers' caches in their default and best settings.

Every candidate runs unmodified generate() on the same model and prompts and reports what its cache really holds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import (
    Cache,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    QuantizedCache,
    StaticCache,
)

from millpond.codec import codec_named
from millpond.hf.compress import compress
from millpond.hf.native_layers.decoder_layers import use_native_layers
from millpond.hf.stopwatch import Stopwatch
from millpond.models.cache_argument import cache_argument
from millpond_lab.bench.common.machine import PeakMemory, storage_bytes
from millpond_lab.bench.generate.saved_model import SavedModel

_GQA = "TRANSFORMERS_SDPA_FORCE_GQA"


@dataclass(frozen=True)
class ModelShape:
    """A random Llama; the defaults have 168M parameters, tied."""

    layers: int = 12
    width: int = 1024
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 64
    ffn: int = 2816
    vocab: int = 32000

    def config(self) -> dict[str, Any]:
        """The arguments of a LlamaConfig."""
        return {
            "num_hidden_layers": self.layers,
            "hidden_size": self.width,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn,
            "vocab_size": self.vocab,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": None,
            "pad_token_id": None,
        }

    def build(self, seed: int = 0) -> PreTrainedModel:
        """The model in bfloat16 with random weights."""
        torch.manual_seed(seed)
        config: Any = LlamaConfig(**self.config())
        model: PreTrainedModel = LlamaForCausalLM(config).bfloat16()
        model.train(False)
        return model

    def weight_bytes(self) -> int:
        """Bytes of the weights, which a step reads once: of tied embeddings as the head."""
        with torch.device("meta"):
            return sum(weight.nbytes for weight in self.build().parameters())


#: What a benchmark runs on: a random model of a shape, or trained weights.
BenchModel: TypeAlias = ModelShape | SavedModel

#: For a check of the machinery, not for a result.
TINY = ModelShape(layers=2, width=128, heads=4, kv_heads=2, head_dim=32, ffn=256, vocab=512)


@dataclass(frozen=True)
class GenerateTiming:
    """One run of one candidate."""

    prefill_s: float
    decode_ms: float
    kv_bytes: int
    peak_bytes: int | None


@dataclass(frozen=True)
class GenerateCandidate:
    """A name, the setting it stands for, and how to run it: (model, prompts, new tokens) -> Reading."""

    name: str
    setting: str
    run: Callable[[PreTrainedModel, Tensor, int], GenerateTiming]


def draw_prompts(shape: BenchModel, batch: int, length: int, seed: int) -> Tensor:
    """(batch, length) random ids, every row another."""
    return torch.randint(shape.vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def ours(method: str, budget: str, **options: Any) -> GenerateCandidate:
    """One of our methods; "full" keeps everything."""

    def run(model: PreTrainedModel, prompts: Tensor, new_tokens: int) -> GenerateTiming:
        with compress(model, method, None if method == "full" else budget, **options) as cache:
            return timed(model, prompts, new_tokens, cache, lambda: cache.stats().kv_bytes)

    setting = [] if method == "full" else [budget]
    setting += [options["codec"]] if "codec" in options else []
    setting += [] if options.get("native_layers", True) else ["transformers' layers"]
    return GenerateCandidate(f"millpond {method}", ", ".join(setting), run)


def stock(
    kind: str, attention: str = "sdpa", *, force_gqa: bool = False, our_layers: bool = False
) -> GenerateCandidate:
    """A DynamicCache ("dynamic") or StaticCache ("static") of transformers under one of its own attentions.

    `our_layers`: its layers are ours, so that what remains of the difference is the cache and its attention.
    """

    def run(model: PreTrainedModel, prompts: Tensor, new_tokens: int) -> GenerateTiming:
        room = prompts.shape[1] + new_tokens
        with _attention(model, attention, force_gqa):
            static: Any = StaticCache
            cache = DynamicCache(config=model.config) if kind == "dynamic" else static(model.config, max_cache_len=room)
            undo = use_native_layers(model) if our_layers else lambda: None
            try:
                return timed(model, prompts, new_tokens, cache, lambda: _held(cache))
            finally:
                undo()

    setting = attention + (", GQA forced" if force_gqa else "") + (", our layers" if our_layers else "")
    return GenerateCandidate(f"transformers {kind.capitalize()}Cache", setting, run)


def _held(cache: Cache) -> int:
    """Bytes of the buffers of a stock cache."""
    layers: Any = cache.layers
    return storage_bytes(tensor for layer in layers for tensor in (layer.keys, layer.values))


def timed(
    model: Any, prompts: Tensor, new_tokens: int, cache: Cache, kv_bytes: Callable[[], int], **given: Any
) -> GenerateTiming:
    """Greedy generate() with a cache, and what else it is `given`; `kv_bytes` tells at the end what the cache holds."""
    peak, watch = PeakMemory(), Stopwatch()
    model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        **cache_argument(cache),
        streamer=watch,
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        disable_compile=True,
        **given,
    )
    return GenerateTiming(watch.prefill_s, 1e3 * watch.decode_s, kv_bytes(), peak.growth())


@contextmanager
def _attention(model: PreTrainedModel, name: str, force_gqa: bool) -> Iterator[None]:
    """The model with one of transformers' own attentions, for a while."""
    before, variable = model.config._attn_implementation, os.environ.get(_GQA)
    model.set_attn_implementation(name)
    os.environ[_GQA] = "1" if force_gqa else "0"
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        if variable is None:
            os.environ.pop(_GQA, None)
        else:
            os.environ[_GQA] = variable


def default_candidates(budget: str) -> list[GenerateCandidate]:
    """Ours, and each cache of transformers in its default setting and in those that may be its best."""
    return [
        ours("full", budget),
        ours("h2o", budget),
        ours("snapkv", budget),
        ours("ada", budget),
        ours("full", budget, native_layers=False),
        ours("h2o", budget, native_layers=False),
        *(
            candidate
            for kind in ("dynamic", "static")
            for candidate in (stock(kind), stock(kind, force_gqa=True), stock(kind, "eager"))
        ),
        stock("dynamic", our_layers=True),
    ]


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
        return timed(model, prompts, new_tokens, cache, lambda: _codec_bytes(cache))

    return GenerateCandidate("transformers QuantizedCache", f"quanto {codec}", run)


def _codec_bytes(cache: QuantizedCache) -> int:
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
