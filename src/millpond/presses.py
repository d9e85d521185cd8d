"""Presses of kvpress, as methods, budgets and options of this package.

Names and defaults are those of kvpress 0.5.5. A press compresses once, when the prompt was read, and what is decoded
stays: so do the methods here (`decode="once"`), where they have the choice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from millpond.errors import OptionError, unknown
from millpond.scalar import number

#: SnapKV's window and pool in kvpress, as options of `snapkv`.
_SNAPKV: Mapping[str, Any] = MappingProxyType({"window": 64, "kernel": 5, "pool": "avg"})
_SNAPKV_OPTIONS: Mapping[str, str] = MappingProxyType({"window_size": "window", "kernel_size": "kernel"})
_ONCE: Mapping[str, Any] = MappingProxyType({"decode": "once"})


@dataclass(frozen=True)
class Equivalent:
    """Method that does what a press does.

    Attributes:
        method: Name of the method.
        options: Options with which it does so.
        renamed: Options of the press, and their names here.
        wraps: Whether it is a press around another, whose name stands in brackets and becomes the option `score`.
    """

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    wraps: bool = False


#: By press; those that wrap another take its name in brackets.
EQUIVALENTS: Mapping[str, Equivalent] = MappingProxyType(
    {
        "SnapKVPress": Equivalent("snapkv", {**_SNAPKV, **_ONCE}, _SNAPKV_OPTIONS),
        "ObservedAttentionPress": Equivalent("h2o", {"recent": 0, "sinks": 0, "average": True, **_ONCE}),
        "StreamingLLMPress": Equivalent("streaming", {"positions": "absolute", **_ONCE}, {"n_sink": "sinks"}),
        "TOVAPress": Equivalent("tova", {"pin_newest": True, **_ONCE}),
        "KnormPress": Equivalent("knorm", _ONCE),
        "KeyDiffPress": Equivalent("keydiff", _ONCE),
        "RandomPress": Equivalent("random", {"recent": 0, "sinks": 0, **_ONCE}, {"seed": "seed"}),
        "LagKVPress": Equivalent("lagkv", _ONCE, {"n_sink": "sinks", "lag_size": "lag", "cross_scoring": "across"}),
        "ExpectedAttentionPress": Equivalent(
            "expected_attention",
            _ONCE,
            {
                "n_future_positions": "future",
                "n_sink": "sinks",
                "use_covariance": "covariance",
                "use_vnorm": "value_norms",
                "epsilon": "eps",
            },
        ),
        "CompactorPress": Equivalent(
            "compactor",
            _ONCE,
            {"sink_size_start": "sinks", "sink_size_end": "recent", "sketch_dimension": "sketch", "blending": "blend"},
        ),
        "KVzipPress": Equivalent(
            "kvzip",
            {"ask": "Repeat the previous context exactly.", "across": True},
            {"n_sink": "sinks", "chunk_size": "chunk"},
        ),
        "PyramidKVPress": Equivalent("pyramidkv", {"score": "snapkv/window=64/kernel=5/pool=avg"}, {"beta": "beta"}),
        "AdaKVPress": Equivalent("ada", {}, {"alpha_safeguard": "alpha"}, wraps=True),
        "CriticalKVPress": Equivalent("criticalkv", {}, {"epsilon": "eps", "first_stage_ratio": "first"}, wraps=True),
        "ChunkKVPress": Equivalent("chunkkv", {"chunk": 20}, {"chunk_length": "chunk"}, wraps=True),
        "MergingPress": Equivalent("merge_on_evict", {}, {"similarity_threshold": "threshold"}, wraps=True),
    }
)
#: Presses without an equivalent under a ratio, and what to do.
OTHERS: Mapping[str, str] = MappingProxyType(
    {
        "BlockPress": "it compresses block by block: method='keydiff', prefill='chunks'",
        "CAMPress": "it merges while it decodes: method='cam', budget=2048",
        "CapPress": "no method scores by the capacity of values",
        "ChunkPress": "it compresses chunk by chunk: prefill='chunks' of the method",
        "ComposedPress": "name one of its presses; fewer bits are a codec, in place of ThinKPress",
        "CompressionRatioDecodingPress": "a share that holds while decoding: the method with decode='evict'",
        "CriticalAdaKVPress": "CriticalKVPress(...) or AdaKVPress(...) alone",
        "CURPress": "no method scores by the leverage of keys times that of values: CompactorPress is next to it",
        "DMSPress": "its threshold says how much stays: method='kvzap', threshold=... around KVzapPress, else 'dms'",
        "DecodingPress": "a size that holds while decoding: method of its press, budget=2048, decode='evict'",
        "DuoAttentionPress": "its ratio is of heads: method='duo_attention', heads=FILE, threshold=...",
        "EntropyGatedChunkKVPress": "chunks of one length: ChunkKVPress(...)",
        "ExpectedAttentionStatsPress": "statistics of the prompt itself: ExpectedAttentionPress",
        "FastKVzipPress": "its gates are a file: 'millpond train import', method='fastkvzip', networks=FILE",
        "FinchPress": "it needs the question in the prompt: method='finch', window=tokens of the question",
        "KVComposePress": "KVzipPress, which reads the prompt twice too",
        "KVgradPress": "KVzipPress, which it builds on: no gradients are taken here",
        "KVzapPress": "its networks are a file: 'millpond train import', method='kvzap', networks=FILE",
        "KeyRerotationPress": "positions in the cache: method='streaming', which has them by default",
        "LUKVPress": "budgets by layer and head from a file: method='layer_table'",
        "LeverageScorePress": "CompactorPress with blending=1.0",
        "NonCausalAttnPress": "CompactorPress with blending=0.0",
        "PerLayerCompressionPress": "ratios by layer: method='layer_table'",
        "PrefillDecodingPress": "one method decides both: its decode='evict'",
        "QFilterPress": "filters come from a file: method='qfilters', filters=FILE",
        "RestoreKVPress": "KVzipPress, without the learned tokens",
        "ScorerPress": "it is a base class: name the press that scores",
        "SimLayerKVPress": "its threshold says how much stays: method='simlayerkv', threshold=...",
        "ThinKPress": "it drops channels, not tokens: fewer bits are a codec, as codec='int4'",
    }
)
_NAME = re.compile(r"(\w+)(?:\((\w+)\))?")


def press(name: str, compression_ratio: float, **options: Any) -> dict[str, Any]:
    """Return the method, budget and options for `compress` that a press of kvpress means.

    Args:
        name: "SnapKVPress", or a press around another as "AdaKVPress(SnapKVPress)".
        compression_ratio: Share of the prompt's entries that leave, 0 to 1: the budget is the rest. 0 evicts nothing.
        **options: Options of the press under its own names, "window_size" for example; of a press around another, the
            outer one's.

    Raises:
        OptionError: no such press or option (with a suggestion), one that has no equivalent, or a ratio out of range.

    Example:
        >>> press("StreamingLLMPress", compression_ratio=0.75, n_sink=8)
        {'method': 'streaming', 'budget': 0.25, 'positions': 'absolute', 'decode': 'once', 'sinks': 8}
        >>> press("AdaKVPress(SnapKVPress)", 0.5)["score"]
        'snapkv/window=64/kernel=5/pool=avg/decode=once'
    """
    ratio = number(compression_ratio)
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio < 1:
        raise OptionError(
            f"compression_ratio={compression_ratio!r} must be a number from 0 to below 1: the share that leaves"
        )
    found = _NAME.fullmatch(name)
    if found is None:
        raise OptionError(f"{name[:80]!r} is no press; write SnapKVPress, or AdaKVPress(SnapKVPress)")
    outer, inner = found[1], found[2]
    own = _equivalent(outer)
    if own.wraps != (inner is not None):
        way = f"write {outer}(SnapKVPress)" if own.wraps else f"write {outer} alone"
        raise OptionError(f"{name!r}: {outer} {'needs a press to wrap' if own.wraps else 'wraps no press'}; {way}")
    found_options = {**own.options, **_renamed(outer, own, options)}
    if inner is not None:
        part = _equivalent(inner)
        if part.wraps or part.method == "pyramidkv":
            raise OptionError(f"{name!r}: {inner} is a press around another itself; wrap a press that scores")
        found_options = {"score": _as_part(part), **found_options}
    if ratio == 0:
        return {"method": "full"}
    return {"method": own.method, "budget": round(1 - ratio, 12), **found_options}


def _equivalent(name: str) -> Equivalent:
    if name in OTHERS:
        raise OptionError(f"{name} has no equivalent under a compression ratio; instead: {OTHERS[name]}")
    if name not in EQUIVALENTS:
        raise unknown("press", name, [*EQUIVALENTS, *OTHERS])
    return EQUIVALENTS[name]


def _renamed(name: str, own: Equivalent, options: Mapping[str, Any]) -> dict[str, Any]:
    for option in options:
        if option not in own.renamed:
            raise unknown(f"option of {name}", option, own.renamed)
    return {own.renamed[option]: value for option, value in options.items()}


def _as_part(part: Equivalent) -> str:
    """Return a method as it stands inside another's options, `snapkv/window=64`."""
    return "/".join([part.method, *(f"{option}={_text(value)}" for option, value in part.options.items())])


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
