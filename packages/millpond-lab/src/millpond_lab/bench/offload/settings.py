"""Settings of the offloading benchmark, and its cells."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Ours, by name: arguments of the engine.
OURS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "h2o": {"method": "h2o", "budget": "20%"},
    "h2o-int4-kv": {"method": "h2o", "budget": "20%", "codec": "int4"},
    "h2o-int4-weights": {"method": "h2o", "budget": "20%", "weights": "int4"},
    "h2o-rotated4-kv": {"method": "h2o", "budget": "20%", "codec": "rotated4"},
    "h2o-int4-weights-rotated4-kv": {"method": "h2o", "budget": "20%", "codec": "rotated4", "weights": "int4"},
    "full-int4-weights": {"method": "full", "weights": "int4"},
    "full-no-overlap": {"method": "full"},
}
#: Batches of Accelerate that are tried.
BATCHES = (1, 2, 4, 8, 12, 16)
#: Formats of llama.cpp's weights, and its batches.
LLAMACPP, LLAMACPP_BATCHES = ("bf16", "q4_0"), (1, 4, 16)
#: Where the weights of DeepSpeed are, with a batch; and the seconds in which one of these cells must end.
DEEPSPEED, DEEPSPEED_LIMIT_S = (("host", 1), ("host", 8), ("nvme", 8)), 1800.0
#: FlexGen's: sequences of a batch, and batches of a block; all weights on the disk, and all keys and values.
FLEXGEN = ((1, 16), (2, 8), (2, 16), (4, 4))
CELLS = (
    *OURS,
    *(f"accelerate-{batch}" for batch in BATCHES),
    *(f"llamacpp-{weights}-{batch}" for weights in LLAMACPP for batch in LLAMACPP_BATCHES),
    *(f"deepspeed-{device}-{batch}" for device, batch in DEEPSPEED),
    *(f"flexgen-{batch}x{batches}" for batch, batches in FLEXGEN),
)


@dataclass(frozen=True, kw_only=True)
class OffloadSettings:
    """What all cells of a report share.

    Attributes:
        shape: a name of `SHAPES`. memory: bytes that each may take. prompt, new: tokens of a request.
        threads: of each. steps: decoding steps of the others that are timed. our_steps: of ours; None: all.
    """

    shape: str = "1.04B"
    memory: int = 512 << 20
    prompt: int = 512
    new: int = 128
    threads: int = 2
    steps: int = 10
    our_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class Packages:
    """Where the other engines are.

    Attributes:
        accelerate: a folder that holds the package of that name. llamacpp: Python of an environment with llama.cpp.
        deepspeed: a folder that `deepspeed_env.sh` made. flexgen: a folder that `flexgen_env.sh` made.
    """

    accelerate: Path
    llamacpp: Path
    deepspeed: Path
    flexgen: Path
