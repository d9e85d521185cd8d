"""kvpress in an environment of its own: a child process that takes one request per line and answers in JSON.

`benchmarks/kvpress_env.sh` makes the environment, `benchmarks/kvpress_generate.py` is the child. Both live in the
repository, not in the package.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel

from millpond.bench.candidates import Candidate, Reading
from millpond.budget import Budget
from millpond.errors import MillpondError

if TYPE_CHECKING:
    from millpond.bench.generate import Plan

PRESSES = ("SnapKV", "ObservedAttention", "AdaKV(SnapKV)")


class PeerError(MillpondError):
    """The child process could not answer."""


class Peer:
    """A running child, or the reason why there is none (`note`)."""

    def __init__(self, python: Path, script: Path) -> None:
        self._child: subprocess.Popen[str] | None = None
        self.note = ""
        if not python.exists():
            self.note = "kvpress skipped: no environment; make one with benchmarks/kvpress_env.sh"
            return
        self._child = subprocess.Popen(
            [str(python), "-W", "ignore", str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            self.note = str(self.ask({"hello": True})["versions"])
        except PeerError as error:
            self.note = f"kvpress skipped: {error}"
            self.close()

    def candidates(self, plan: Plan) -> list[Candidate]:
        """Its presses at the plan's budget, and its own full cache; none if it does not run."""
        if self._child is None:
            return []
        setup = {"config": plan.shape.config(), "seed": plan.seed, "threads": plan.threads}
        ratio = 1 - float(Budget.parse(plan.budget).amount)
        full = Candidate("kvpress, no press", "sdpa", self._runner(setup, "none", 0.0))
        return [full, *(Candidate(f"kvpress {p}", plan.budget, self._runner(setup, p, ratio)) for p in PRESSES)]

    def _runner(self, setup: dict[str, Any], press: str, ratio: float) -> Any:
        def run(model: PreTrainedModel, prompts: Tensor, new_tokens: int) -> Reading:
            request = {**setup, "press": press, "ratio": ratio, "prompts": prompts.tolist(), "new_tokens": new_tokens}
            return Reading(**self.ask(request))

        return run

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request, one answer.

        Raises:
            PeerError: the child is gone, or it answered with an error.
        """
        if self._child is None or self._child.stdin is None or self._child.stdout is None:
            raise PeerError(self.note or "the kvpress process is closed")
        try:
            self._child.stdin.write(json.dumps(request) + "\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except OSError as error:
            raise PeerError(f"the kvpress process is gone ({error})") from error
        if not line:
            raise PeerError("the kvpress process ended without an answer")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(str(answer["error"]))
        return answer

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            child, self._child = self._child, None
            if child.stdin is not None:
                child.stdin.close()
            if child.stdout is not None:
                child.stdout.close()
            child.wait(timeout=30)

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
