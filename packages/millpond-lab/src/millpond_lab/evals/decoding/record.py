"""Records of a run: a JSON line per answered question, and rows of a summary. Formats only, no running."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

#: aware: context and question are compressed together, all but the last token. agnostic: the context is compressed
#: before any question; each question continues from its own copy. turns: as agnostic, the questions one after another.
Protocol = Literal["aware", "agnostic", "turns"]

#: In `extra`: the share of entries that attention is let see, where the others were hidden and not freed.
PRETENDED = "pretended_share"
#: In `extra`: the share of a bf16 cache's bytes that codes would take which were only worked out, and not stored.
CLAIMED = "claimed_share"


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination that gets one score.

    Attributes:
        model: as it was named. peer: whose implementation ran: "millpond", or for example "kvpress 0.5.5".
        method: with its options, "h2o" or "h2o:recent=0.1:sinks=0". budget: as written, "" for full.
        codec: of the entries. task: with its options, "niah_single:length=4096". protocol: see `Protocol`.
        seed: of the samples.
    """

    model: str
    method: str
    budget: str
    codec: str
    task: str
    protocol: Protocol
    seed: int
    peer: str = "millpond"

    @property
    def key(self) -> str:
        """Names the cell in records."""
        return "|".join(str(value) for value in asdict(self).values())


@dataclass(frozen=True, slots=True)
class Record:
    """One answered question.

    Attributes:
        cell: `Cell.key`. sample, question: which one. answer: decoded text, or the chosen choice.
        score: 0 to 1, higher is better; for perplexity the mean negative log-likelihood in nats per token.
        weight: what the score counts for in the mean: 1, or tokens for perplexity.
        prompt_tokens: tokens of context and question. kept_share: entries held over entries seen, when answering began.
        kv_bytes: bytes of keys and values held then. full_kv_bytes: what a full cache would have held. bf16_kv_bytes:
            as `kv_bytes`, if numbers that are not coded took 2 bytes each; 0 in results from before it was counted.
        failure: why the question could not be answered (it counts as score 0); "" if it was.
        facts: of the sample. extra: what else the task measured, numbers by name.
    """

    cell: str
    sample: str
    question: int
    answer: str
    score: float
    weight: float
    prompt_tokens: int
    kept_share: float
    kv_bytes: int
    full_kv_bytes: int
    failure: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, float] = field(default_factory=dict)
    bf16_kv_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """One cell of the summary.

    Attributes:
        model ... peer: the cell.
        score: mean over questions; for perplexity exp of the weighted mean. low, high: its 95 % interval over
            samples. better: which way is better. n: questions. failures: of them, those that failed.
        kv_bytes, full_kv_bytes: means over samples. kept_share: mean.
        masks_only: True where entries were hidden, not freed: kv_bytes and kept_share are what is really held, and
            extra holds what attention is let see (`PRETENDED`).
        extra: means of what else was measured.
        scored_tokens: of texts that are fed token by token, how many counted, over all questions; 0 where answers are
            decoded or chosen, and in results from before it was written down.
    """

    model: str
    method: str
    budget: str
    codec: str
    task: str
    protocol: Protocol
    seed: int
    peer: str
    score: float
    low: float
    high: float
    better: Literal["higher", "lower"]
    n: int
    failures: int
    kv_bytes: float
    full_kv_bytes: float
    kept_share: float
    masks_only: bool = False
    extra: dict[str, float] = field(default_factory=dict)
    scored_tokens: int = 0
