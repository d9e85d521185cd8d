"""Claims of papers, as pairs of candidates that a run can have. Data only.

A pair names two methods of ours that differ in what is claimed, and in as little else as their options allow.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """An ordering.

    Attributes:
        name: of its place on the page. title: in words. source: who says so. pairs: the better one first.
        middle: only questions about facts between a quarter and three quarters of the text.
        `beside`: what else differs within a pair, by the better one's name.
    """

    name: str
    title: str
    source: str
    pairs: tuple[tuple[str, str], ...]
    middle: bool = False
    beside: tuple[tuple[str, str], ...] = ()


CLAIMS = (
    Claim(
        "ada",
        "Head budgets by competition over equal ones",
        "Ada-KV, arXiv:2407.11550",
        (("ada", "snapkv"), ("ada:score=h2o", "h2o"), ("ada:score=pyramidkv", "pyramidkv")),
    ),
    Claim(
        "floor",
        "A higher floor for every head over the default of 0.2",
        "ours, to see what competition costs",
        (("ada:alpha=0.6", "ada"), ("ada:alpha=0.6", "snapkv")),
    ),
    Claim(
        "critical",
        "Attention and values over attention alone",
        "CriticalKV, arXiv:2502.03805",
        (("criticalkv", "snapkv"),),
    ),
    Claim(
        "pyramid",
        "A pyramid of layer budgets over equal ones",
        "PyramidKV, arXiv:2406.02069",
        (("pyramidkv", "snapkv"),),
    ),
    Claim(
        "merge",
        "Merging over dropping",
        "D2O, EMS, KVMerger, CaM and Elastic Cache",
        (
            ("merge_on_evict", "snapkv"),
            ("merge_on_evict:score=h2o", "h2o"),
            ("kvmerger", "h2o:recent=0.34:sinks=0:decode=grow"),
            ("kvmerger", "h2o:recent=0.34:sinks=0"),
            ("d2o", "h2o"),
            ("ems", "ems:threshold=1.1"),
            ("cam", "streaming:positions=absolute"),
            ("elastic", "elastic:merge=none"),
        ),
        beside=(
            (
                "kvmerger",
                "keeps runs of neighbours where h2o keeps single entries; it grows after the prompt, as does "
                "h2o with decode=grow, and h2o without it does not",
            ),
            ("d2o", "shares its budget out over the layers"),
        ),
    ),
    Claim(
        "alike",
        "Merging only what is nearly equal over merging everything",
        "ours, to see what merging costs",
        (("merge_on_evict:threshold=0.9", "merge_on_evict"), ("merge_on_evict:threshold=0.9", "snapkv")),
    ),
    Claim(
        "mass",
        "Counting what a merged entry stands for over not counting it",
        "ours: with it, merging equal entries is lossless",
        tuple((f"{name}:mass_bias=true", name) for name in ("merge_on_evict", "kvmerger", "d2o", "ems", "cam")),
    ),
    Claim("heavy", "Heavy hitters over the window", "H2O, arXiv:2306.14048", (("h2o", "window"),)),
    Claim(
        "chance",
        "Heavy hitters over entries by chance, with the same recent half and the same sinks",
        "ours, to see what the sum of attention is worth",
        (("h2o", "random:recent=0.5"),),
    ),
    Claim(
        "pool",
        "A pool of 21 neighbours over the paper's 7",
        "ours: answers of several tokens",
        (("snapkv", "snapkv:kernel=7"),),
    ),
    Claim(
        "forget",
        "Sums of attention that forget over sums that do not",
        "A2SF, arXiv:2407.20485",
        (("h2o:decay=0.9", "h2o"), ("h2o:decay=0.9", "window")),
    ),
    Claim(
        "needles",
        "The prompt's last queries over sinks and newest, for facts in the middle of the text",
        "SnapKV, arXiv:2404.14469",
        (("snapkv", "streaming"),),
        middle=True,
    ),
)

#: The places of the comparisons with kvpress on the page: as many entries kept, and as many bytes held.
PEERS, AT_BYTES = "kvpress", "kvpress-bytes"
