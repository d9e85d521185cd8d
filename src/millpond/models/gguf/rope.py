"""Scaling of rotary positions that a GGUF file stores in tensors, and transformers in numbers of its configuration."""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from millpond.models.gguf.header import GGUFHeader, GGUFTensor, read_floats

#: Factors of Llama 3.1 and later, one per frequency; those of LongRoPE (Phi-3 and later), short and long.
FREQS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
#: The published numbers of Llama 3.1 to 3.3, of which files state none; only `factor` differs among them.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
#: Relative distance of factors that differ by the rounding of float32 alone, over the few operations that make them.
_ROUNDING = 2e-6
#: A factor from which on a frequency counts as 0: llama.cpp writes 1e30 for what is not rotated.
_UNROTATED = 1e20


class RopeTensors(NamedTuple):
    """Names of tensors of factors, and a phrase for those that no configuration expresses."""

    names: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


def take_rope(path: Path, header: GGUFHeader, config: PreTrainedConfig) -> RopeTensors:
    """Write into `config` the rotary positions of a file that transformers leaves out.

    That is `rope_parameters` of the type llama3 (arXiv:2407.21783) for a tensor of factors per frequency that these
    parameters give to the rounding of float32; of the type longrope (arXiv:2402.13753) for short and long factors; and
    the share of each head that is rotated.

    Args:
        path: GGUF file.
        header: Header of the file.
        config: Configuration by transformers from the metadata; changed in place.

    Raises:
        DataError: such a tensor is not of the type F32.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if FREQS in tensors and isinstance(rope.get("full_attention"), dict):
        return _proportional(config, read_floats(path, tensors[FREQS]))
    if "rope_theta" not in rope:
        return RopeTensors()
    _take_share(header, config)
    if FREQS in tensors:
        return _llama3(header, config, read_floats(path, tensors[FREQS]))
    if SHORT in tensors and LONG in tensors:
        return _longrope(path, header, config, tensors)
    return RopeTensors()


def rotated(config: PreTrainedConfig) -> int:
    """Return the rotated numbers of each head, in a model with one kind of rotary positions."""
    return int(_head_dim(config) * float(config.rope_parameters.get("partial_rotary_factor") or 1.0))


def _take_share(header: GGUFHeader, config: PreTrainedConfig) -> None:
    """Set `partial_rotary_factor` of types that have it (Phi-4-mini rotates three quarters)."""
    count = header.metadata.get(f"{header.architecture}.rope.dimension_count")
    if isinstance(count, int) and 0 < count < _head_dim(config) and "partial_rotary_factor" in config.rope_parameters:
        config.rope_parameters["partial_rotary_factor"] = count / _head_dim(config)


def _llama3(header: GGUFHeader, config: PreTrainedConfig, factors: list[float]) -> RopeTensors:
    if all(math.isclose(factor, 1, rel_tol=_ROUNDING) for factor in factors):
        return RopeTensors((FREQS,))
    stated = header.metadata.get(f"{header.architecture}.rope.scaling.original_context_length")
    lengths = [*([stated] if isinstance(stated, int) and stated > 0 else []), 8192]
    for length in lengths:
        scaled = {"rope_type": "llama3", "factor": factors[-1], **_LLAMA3, "original_max_position_embeddings": length}
        if _close(_factors(config, scaled), factors):
            config.rope_parameters = config.rope_parameters | scaled
            return RopeTensors((FREQS,))
    lengths_text = " or ".join(map(str, lengths))
    stated = f"its {len(factors)} factors, {min(factors):.6g} to {max(factors):.6g}"
    return RopeTensors(
        (FREQS,),
        (
            f"the tensor {FREQS}: {stated}, are not those of "
            f"Llama 3 (low_freq_factor 1, high_freq_factor 4, original_max_position_embeddings {lengths_text})",
        ),
    )


def _longrope(path: Path, header: GGUFHeader, config: PreTrainedConfig, tensors: dict[str, GGUFTensor]) -> RopeTensors:
    short, long = (read_floats(path, tensors[name]) for name in (SHORT, LONG))
    both = f"the tensors {SHORT} and {LONG}"
    before = header.metadata.get(f"{header.architecture}.rope.scaling.original_context_length")
    if not isinstance(before, int) or before < 1:
        return RopeTensors((SHORT, LONG), (f"{both} without rope.scaling.original_context_length",))
    if not len(short) == len(long) == rotated(config) // 2:
        counts = f"{len(short)} and {len(long)} factors for {rotated(config) // 2} frequencies"
        return RopeTensors((SHORT, LONG), (f"{both} with {counts}",))
    scaled: dict[str, Any] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    scaled["original_max_position_embeddings"] = before
    # llama.cpp multiplies by 1 where a file states nothing, transformers by a number made of the two lengths
    scaled["attention_factor"] = header.metadata.get(f"{header.architecture}.rope.scaling.attn_factor", 1.0)
    config.rope_parameters = config.rope_parameters | scaled
    if hasattr(config, "original_max_position_embeddings"):  # of Phi-3, where this number counts
        config.original_max_position_embeddings = before
    return RopeTensors((SHORT, LONG))


def _proportional(config: PreTrainedConfig, factors: list[float]) -> RopeTensors:
    """Set the factors of a model whose layers differ.

    The tensor is that of full attention, and marks the numbers that are not rotated.
    """
    kind = config.rope_parameters["full_attention"]
    unrotated = [factor >= _UNROTATED for factor in factors]
    plain = all(math.isclose(factor, 1, rel_tol=_ROUNDING) or factor >= _UNROTATED for factor in factors)
    share = kind.get("partial_rotary_factor", 1.0)
    if plain and unrotated == [index >= int(share * len(factors)) for index in range(len(factors))]:
        return RopeTensors((FREQS,))
    return RopeTensors(
        (FREQS,), (f"the tensor {FREQS} (it rotates the first {share:.4g} of each head of full attention)",)
    )


def _factors(config: PreTrainedConfig, scaled: dict[str, Any]) -> list[float]:
    """Return the factors that transformers makes of parameters.

    They are each frequency without them, over that with them.
    """
    plain, with_factors = deepcopy(config), deepcopy(config)
    neutral = scaled | {"factor": 1.0}
    plain.rope_parameters, with_factors.rope_parameters = (
        config.rope_parameters | neutral,
        config.rope_parameters | scaled,
    )
    make = ROPE_INIT_FUNCTIONS[scaled["rope_type"]]
    ratios = make(plain, None)[0].double() / make(with_factors, None)[0].double()
    return [float(ratio) for ratio in ratios]


def _close(factors: list[float], expected: list[float]) -> bool:
    return len(factors) == len(expected) and all(
        math.isclose(a, b, rel_tol=_ROUNDING) for a, b in zip(factors, expected, strict=True)
    )


def _head_dim(config: PreTrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
