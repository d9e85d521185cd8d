"""Which press of kvpress is which method of ours. Where windows and kernels have other defaults, ours are named."""

from __future__ import annotations

PEER = "kvpress"
_SNAPKV = "window_size=32:kernel_size=7"

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
    "kvzip": "KVzipPress:layerwise=true",
    "lagkv": "LagKVPress",
    "merge_on_evict": f"MergingPress(SnapKVPress):{_SNAPKV}",
    "pyramidkv": f"PyramidKVPress:{_SNAPKV}",
    "random": "RandomPress",
    "snapkv": f"SnapKVPress:{_SNAPKV}",
    "streaming": "StreamingLLMPress",
    "tova": "TOVAPress",
}

#: Ours in the settings of a press whose defaults are others: the mean of attention instead of its sum and no recent
#: window (H2O), the mean over neighbours instead of their maximum (SnapKV), positions of the text (StreamingLLM), the
#: newest entry pinned (TOVA), other words (KVzip). A press compresses once, and neither the answer nor a later
#: question makes anything leave: decode=once. What stands here with and without it says what that is worth.
ALIKE = {
    "expected_attention:decode=once": PRESSES["expected_attention"],
    "h2o:recent=0:sinks=0:average=true": PRESSES["h2o"],
    "h2o:recent=0:sinks=0:average=true:decode=once": PRESSES["h2o"],
    "keydiff:decode=once": PRESSES["keydiff"],
    "knorm:decode=once": PRESSES["knorm"],
    "kvzip:ask=Repeat the previous context exactly.": PRESSES["kvzip"],
    "random:recent=0:sinks=0:decode=once": PRESSES["random"],
    "snapkv:pool=avg": PRESSES["snapkv"],
    "snapkv:pool=avg:decode=once": PRESSES["snapkv"],
    "streaming:positions=absolute": PRESSES["streaming"],
    "streaming:positions=absolute:decode=once": PRESSES["streaming"],
    "tova:pin_newest=true:decode=once": PRESSES["tova"],
}


def is_press(method: str, of: str, peer: str) -> bool:
    """Whether a contender of that name, by that peer, is the press of our method `of`, options and all."""
    return peer.startswith(PEER) and (PRESSES | ALIKE).get(of) == method
