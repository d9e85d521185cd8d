"""Measurement of what calls take besides products and attention, on two small models whose layers are read."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from millpond.cache.tiered.disk_tier import DiskTier
from millpond.engine.config import EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.offload.clock import computing_clock
from millpond.engine.offload.machine import CallTimes
from millpond.engine.request import Request
from millpond.engine.sampling.params import SamplingParams
from millpond.models.weights.sizes import WeightSizes
from millpond.models.weights.skeleton import Skeleton
from millpond.models.weights.streamed import StreamedLayers
from millpond.tiers.ledger import Ledger, Tier

#: Layers of the two models: what grows with them is of a layer, the rest of a step.
_LAYERS = (2, 10)
#: So small that products take next to nothing; heads as in models of a billion parameters.
_WIDTH, _HEADS, _KV_HEADS, _HEAD_DIM, _VOCABULARY = 64, 8, 4, 64, 128
#: Tokens of a piece of a prompt, more than kernels for few rows take; pieces of a prompt; and entries that are kept.
_PIECE, _PIECES, _BUDGET = 48, 3, 64
#: Sequences that decode, few and many, and their steps.
_FEW, _MANY, _STEPS = 1, 16, 16
#: Prompts that are read alone.
_PROMPTS = 4


class _Steps(NamedTuple):
    """Median seconds of steps: a piece of a prompt, one that ends it, and one token of few and of many sequences."""

    piece: float
    end: float
    few: float
    many: float


class _Time(NamedTuple):
    """Seconds of a step: of `computing_clock`, and of the wall."""

    computed: float
    passed: float


class _Measured(NamedTuple):
    """Steps by `computing_clock`, and by the wall."""

    computed: _Steps
    passed: _Steps


def call_times() -> tuple[CallTimes, CallTimes]:
    """Measure, in about 6 s, with the threads that torch has now.

    The cache evicts (`h2o`): a method that keeps everything plans faster.

    Returns:
        What a step takes, and what it takes more where KV lies on a disk: the way of pages, waited for.
    """
    here = [_steps(n, on_disk=False) for n in _LAYERS]
    away = [_steps(n, on_disk=True) for n in _LAYERS]
    computed = _per_layer(*(steps.computed for steps in here))
    near, far = (_per_layer(*(steps.passed for steps in steps_of)) for steps_of in (here, away))
    more = {field.name: max(getattr(far, field.name) - getattr(near, field.name), 0.0) for field in fields(CallTimes)}
    return computed, CallTimes(**more)


def _per_layer(shallow: _Steps, deep: _Steps) -> CallTimes:
    """What grows with the layers is of a layer."""
    layers = _LAYERS[1] - _LAYERS[0]
    piece, end, few, many = (max(more - less, 0.0) / layers for less, more in zip(shallow, deep, strict=True))
    sequence = max(many - few, 0.0) / (_MANY - _FEW)
    return CallTimes(
        step_s=max(shallow.few - _LAYERS[0] * few, 0.0),
        layer_s=max(few - _FEW * sequence, 0.0),
        sequence_s=sequence,
        piece_s=piece,
        prompt_s=max(end - piece, 0.0),
    )


def _steps(n_layers: int, on_disk: bool) -> _Measured:
    """Steps of a model with as many layers, and KV in memory or on a disk."""
    ends: list[_Time] = []
    pieces: list[_Time] = []
    with (
        tempfile.TemporaryDirectory(prefix="millpond-calls-") as folder,
        _engine(Path(folder), n_layers, on_disk) as engine,
    ):
        for _ in range(_PROMPTS):
            times = _timed(engine, sequences=1, new=2)  # with one token nothing is kept, so nothing is planned
            pieces += times[: _PIECES - 1]
            ends.append(times[_PIECES - 1])
        few, many = (_timed(engine, sequences=n, new=_STEPS)[-_STEPS // 2 :] for n in (_FEW, _MANY))
    kinds = (pieces, ends, few, many)
    computed, passed = (_Steps(*(statistics.median(time[n] for time in kind) for kind in kinds)) for n in (0, 1))
    return _Measured(computed, passed)


def _timed(engine: Engine, sequences: int, new: int) -> list[_Time]:
    """The steps that prompts and answers of some sequences take."""
    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    for n in range(sequences):
        prompt = tuple((7 * place + n) % _VOCABULARY for place in range(_PIECE * _PIECES))
        engine.add(Request(request_id=str(n), prompt=prompt, params=params))
    times, clock = [], computing_clock()
    while engine.busy:
        began, at = clock(), time.perf_counter()
        engine.step()
        times.append(_Time(clock() - began, time.perf_counter() - at))
    return times


@contextmanager
def _engine(folder: Path, n_layers: int, on_disk: bool) -> Iterator[Engine]:
    """An engine whose layers are all read in every step."""
    _write_model(folder, n_layers)
    skeleton, ledger = Skeleton.of(folder), Ledger([Tier("host", "host")])
    streamed = StreamedLayers(skeleton, WeightSizes(skeleton), ledger)
    tier = DiskTier(folder, range(n_layers), micro_batch=_MANY) if on_disk else None
    config = EngineConfig(method="h2o", budget=_BUDGET, max_step_tokens=_PIECE)
    engine = Engine(streamed.model, None, config, streamed=streamed, tier=tier)
    try:
        yield engine
    finally:
        engine.close()


def _write_model(folder: Path, n_layers: int) -> None:
    """A Llama with random weights in bf16."""
    draw = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=draw).div_(columns**0.5).bfloat16()

    one = torch.ones(_WIDTH, dtype=torch.bfloat16)
    tensors = {"model.embed_tokens.weight": matrix(_VOCABULARY, _WIDTH), "model.norm.weight": one.clone()}
    for index in range(n_layers):
        shapes = {
            "self_attn.q_proj": (_HEADS * _HEAD_DIM, _WIDTH),
            "self_attn.k_proj": (_KV_HEADS * _HEAD_DIM, _WIDTH),
            "self_attn.v_proj": (_KV_HEADS * _HEAD_DIM, _WIDTH),
            "self_attn.o_proj": (_WIDTH, _HEADS * _HEAD_DIM),
            "mlp.gate_proj": (_WIDTH, _WIDTH),
            "mlp.up_proj": (_WIDTH, _WIDTH),
            "mlp.down_proj": (_WIDTH, _WIDTH),
        }
        layer = {f"{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        layer |= {f"{name}.weight": one.clone() for name in ("input_layernorm", "post_attention_layernorm")}
        tensors |= {f"model.layers.{index}.{name}": tensor for name, tensor in layer.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": _WIDTH,
        "intermediate_size": _WIDTH,
        "num_hidden_layers": n_layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": 2 * _PIECE * _PIECES,
        "tie_word_embeddings": True,
        "eos_token_id": None,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
