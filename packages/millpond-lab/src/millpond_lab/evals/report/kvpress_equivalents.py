"""kvpress's presses and our equivalent methods, and the pool of each one's attention.

Where a press has another window or kernel by default than the paper, the paper's are named.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from millpond.methods import METHODS
from millpond.policy.scores.attention import WindowAttention
from millpond_lab.evals.spec import Spec

PEER = "kvpress"
_SNAPKV = "window_size=32:kernel_size=7"
_BASED = ("ada", "chunkkv", "criticalkv", "merge_on_evict", "pyramidkv")

#: Press by method. Not here: QFilterPress and DuoAttentionPress (fetch what was found for published models),
#: FinchPress (wants a token of the vocabulary between context and question), SimLayerKVPress and DMSPress (a threshold
#: says how much stays, so bytes cannot be made equal), CAMPress (compresses while decoding alone).
PRESSES = {
    "ada": f"AdaKVPress(SnapKVPress):{_SNAPKV}",
    "chunkkv": f"ChunkKVPress(SnapKVPress):chunk_length=10:{_SNAPKV}",
    "compactor": "CompactorPress",
    "criticalkv": f"CriticalKVPress(SnapKVPress):{_SNAPKV}",
    "expected_attention": "ExpectedAttentionPress",
    "h2o": "ObservedAttentionPress",
    "keydiff": "KeyDiffPress",
    "knorm": "KnormPress",
    "kvzip": "KVzipPress",
    "lagkv": "LagKVPress",
    "merge_on_evict": f"MergingPress(SnapKVPress):{_SNAPKV}",
    "pyramidkv": f"PyramidKVPress:{_SNAPKV}",
    "random": "RandomPress",
    "snapkv": f"SnapKVPress:{_SNAPKV}",
    "streaming": "StreamingLLMPress",
    "tova": "TOVAPress",
}

#: Ours in the settings of a press whose defaults are others: the mean of attention instead of its sum and no recent
#: window (H2O), seven neighbours and not 21, and their mean and not their maximum (SnapKV and what builds on it),
#: positions of the text (StreamingLLM), the newest entry pinned (TOVA), other words (KVzip). A press compresses once,
#: and neither the answer nor a later question makes anything leave: decode=once. What stands here with and without it
#: says what that is worth.
ALIKE = {
    **{f"{name}:score=snapkv/kernel=7": PRESSES[name] for name in _BASED},
    **{f"{name}:score=snapkv/pool=avg/kernel=7": PRESSES[name] for name in _BASED},
    "expected_attention:decode=once": PRESSES["expected_attention"],
    "h2o:recent=0:sinks=0:average=true": PRESSES["h2o"],
    "h2o:recent=0:sinks=0:average=true:decode=once": PRESSES["h2o"],
    "keydiff:decode=once": PRESSES["keydiff"],
    "knorm:decode=once": PRESSES["knorm"],
    "kvzip:across=false": "KVzipPress:layerwise=true",
    "kvzip:ask=Repeat the previous context exactly.:across=false": "KVzipPress:layerwise=true",
    "random:recent=0:sinks=0:decode=once": PRESSES["random"],
    "snapkv:kernel=7": PRESSES["snapkv"],
    "snapkv:pool=avg:kernel=7": PRESSES["snapkv"],
    "snapkv:pool=avg:kernel=7:decode=once": PRESSES["snapkv"],
    "streaming:positions=absolute": PRESSES["streaming"],
    "streaming:positions=absolute:decode=once": PRESSES["streaming"],
    "tova:pin_newest=true:decode=once": PRESSES["tova"],
}


def is_press(method: str, of: str, peer: str) -> bool:
    """Whether a candidate of that name, by that peer, is the press of our method `of`, options and all."""
    return peer.startswith(PEER) and (PRESSES | ALIKE).get(of) == method


def pool(method: str, peer: str = "millpond") -> str:
    """What pools the attention of the last queries over neighbours: "max 21"; "" where nothing does.

    Args:
        method: as `Row.method` has it; of a press with its options.
    """
    if peer.startswith(PEER):
        width = Spec.parse(method).options.get("kernel_size") if "SnapKV" in method or "PyramidKV" in method else None
        return f"avg {width}" if width else ""  # kvpress pools by the mean
    spec = Spec.parse(method)
    if spec.name not in METHODS.names():
        return ""
    found = _pooled(spec.build(METHODS))
    return "" if found is None else f"{found.pool} {found.kernel}"


def _pooled(part: Any) -> WindowAttention | None:
    """The pooled score in a policy, however deep it lies."""
    if isinstance(part, WindowAttention):
        return part if part.pool != "none" and part.kernel > 1 else None
    if not is_dataclass(part):
        return None
    inner = (_pooled(getattr(part, field.name)) for field in fields(part))
    return next((one for one in inner if one is not None), None)
