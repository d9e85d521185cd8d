"""kvpress in `bench generate`: its presses, each a candidate that a child process answers for.

`benchmarks/peers/kvpress_env.sh` makes the environment, `benchmarks/peers/kvpress_generate.py` is the child.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel

from millpond.budget import Budget
from millpond_lab.bench.common.optional_peer import OptionalPeer
from millpond_lab.bench.generate.candidates import GenerateCandidate, GenerateTiming

if TYPE_CHECKING:
    from millpond_lab.bench.generate.plan import GeneratePlan

PRESSES = ("SnapKV", "ObservedAttention", "AdaKV(SnapKV)")


class KVPress(OptionalPeer):
    """A running child with kvpress, or the reason why there is none."""

    def __init__(self, python: Path, script: Path) -> None:
        super().__init__("kvpress", python, script, made_by="benchmarks/peers/kvpress_env.sh")

    def candidates(self, plan: GeneratePlan) -> list[GenerateCandidate]:
        """Its presses at the plan's budget, and its own full cache; none if it does not run."""
        if not self.running:
            return []
        setup = {"config": plan.shape.config(), "seed": plan.seed, "threads": plan.threads}
        ratio = 1 - float(Budget.parse(plan.budget).amount)
        full = GenerateCandidate("kvpress, no press", "sdpa", self._runner(setup, "none", 0.0))
        return [full, *(GenerateCandidate(f"kvpress {p}", plan.budget, self._runner(setup, p, ratio)) for p in PRESSES)]

    def _runner(self, setup: dict[str, Any], press: str, ratio: float) -> Any:
        def run(model: PreTrainedModel, prompts: Tensor, new_tokens: int) -> GenerateTiming:
            request = {**setup, "press": press, "ratio": ratio, "prompts": prompts.tolist(), "new_tokens": new_tokens}
            return GenerateTiming(**self.ask(request))

        return run
