"""A run of a peer into the folder of a run of ours, and the same prompts as a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millpond.budget import Budget
from millpond.errors import OptionError, unknown
from millpond.hf.model_profile import ModelProfile
from millpond_lab.evals.candidates.candidate import DEFAULT_BUDGET
from millpond_lab.evals.decoding.batch import EncodedPrompt, EncodedQuestion, PromptBatch, encode
from millpond_lab.evals.decoding.greedy_decode import before_stop, end_tokens
from millpond_lab.evals.decoding.record import PRETENDED, Cell, Protocol, Record, SummaryRow
from millpond_lab.evals.harness.plan import PROTOCOLS, EvalPlan
from millpond_lab.evals.harness.run import Progress, run
from millpond_lab.evals.peers.process import Peer, Reply, most_tokens, reply_of, request_of
from millpond_lab.evals.task import TASKS, Task
from millpond_lab.peer_process import PeerError

#: A peer compresses once, after the opening; its cache has no later turns.
KNOWN: tuple[Protocol, ...] = ("aware", "agnostic")


@dataclass(frozen=True)
class PeerPlan(EvalPlan):
    """As `EvalPlan`, for a peer; `full` is its own full cache. What its presses are called is the peer's to check.

    Attributes:
        peer: with its version, as it names itself.

    Raises:
        OptionError: an unknown task, protocol or budget, or a task that is not answered by decoding.
    """

    peer: str = "peer"

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise OptionError(f"samples={self.samples} must be at least 1")
        for protocol in self.protocols:
            if protocol not in PROTOCOLS:
                raise unknown("protocol", protocol, KNOWN)
            if protocol not in KNOWN:
                raise OptionError(f"a peer is evaluated in the protocols {' and '.join(KNOWN)}, not in {protocol!r}")
        for budget in self.budgets or ():
            Budget.parse(budget)
        if self.budgets and all(str(spec) == "full" for spec in self.methods):
            raise OptionError(f"--budget {','.join(self.budgets)}: full takes no budget; leave it out, or add a press")
        object.__setattr__(self, "candidates", {})
        object.__setattr__(self, "built", {str(spec): spec.build(TASKS) for spec in self.tasks})
        for name, task in self.built.items():
            if task.kind != "generate":
                raise OptionError(
                    f"task {name!r} is scored by {task.kind}, and a peer only decodes answers; leave it out here"
                )

    def cells(self) -> list[Cell]:
        """Every combination once, tasks outermost."""
        budgets: Sequence[str] = self.budgets or (DEFAULT_BUDGET,)
        return [
            Cell(self.model, str(spec), budget, "auto", task, protocol, self.seed, self.peer)
            for task in self.built
            for protocol in KNOWN
            if protocol in self.protocols
            for spec in dict.fromkeys(map(str, self.methods))
            for budget in (("",) if spec == "full" else budgets)
        ]


@dataclass(frozen=True, slots=True)
class PeerExaminer:
    """Examines a peer on one task, as `Examiner` examines a candidate.

    Attributes:
        eos: tokens that end a text. limit: positions of the model; None for no limit.
    """

    cell: Cell
    peer: Peer
    tokenizer: PreTrainedTokenizerBase
    task: Task
    eos: frozenset[int]
    limit: int | None

    def examine(self, batch: PromptBatch) -> list[Record]:
        """A record for every question, in the order of `Batch.names`; what fails is a counted failure."""
        return [record for prompt in batch.prompts for record in self._prompt(prompt)]

    def _prompt(self, prompt: EncodedPrompt) -> list[Record]:
        failure = misfit(prompt, self.limit)
        if failure:
            return [self._lost(prompt, asked, failure) for asked in prompt.asked]
        request = request_of(self.cell, prompt, self.eos, self.limit)
        try:
            reply = reply_of(request, self.peer.ask(request))
        except PeerError as error:
            return [self._lost(prompt, asked, f"{self.cell.peer}: {error}") for asked in prompt.asked]
        return [self._record(prompt, place, reply) for place in range(len(prompt.asked))]

    def _record(self, prompt: EncodedPrompt, place: int, reply: Reply) -> Record:
        asked, said = prompt.asked[place], reply.answers[place]
        if isinstance(said, str):
            return self._lost(prompt, asked, f"{self.cell.peer}: {said}", reply)
        most = most_tokens(prompt, place, self.limit)
        said = said[:most]
        decoded = str(self.tokenizer.decode(list(said), skip_special_tokens=True))
        text, stopped = before_stop(decoded, asked.question.stop)
        ended = stopped or bool(said and said[-1] in self.eos)
        extra = {"ended": float(ended), "tokens": float(len(said)), **_pretended(reply)}
        if not ended and len(said) >= most < asked.question.max_new_tokens:
            failure = f"the answer did not end within the model's {self.limit} positions ({len(said)} tokens)"
            return self._made(prompt, asked, text, 0.0, failure, extra, reply)
        return self._made(prompt, asked, text, float(self.task.score(asked.question, text)), "", extra, reply)

    def _lost(self, prompt: EncodedPrompt, asked: EncodedQuestion, failure: str, reply: Reply | None = None) -> Record:
        return self._made(prompt, asked, "", 0.0, failure, {} if reply is None else _pretended(reply), reply)

    def _made(
        self,
        prompt: EncodedPrompt,
        asked: EncodedQuestion,
        text: str,
        score: float,
        failure: str,
        extra: dict[str, float],
        reply: Reply | None,
    ) -> Record:
        held = reply or Reply((), 0.0, 0, 0)
        return Record(
            self.cell.key,
            prompt.sample.id,
            asked.index,
            text,
            score,
            1.0,
            prompt_tokens=len(prompt.opening) + len(asked.tokens),
            kept_share=held.kept_share,
            kv_bytes=held.kv_bytes,
            full_kv_bytes=held.full_kv_bytes,
            failure=failure,
            facts=dict(prompt.sample.facts),
            extra=extra,
        )


def misfit(prompt: EncodedPrompt, limit: int | None) -> str:
    """Why a prompt cannot be asked; "" if it can."""
    if not prompt.opening:
        return "there are no tokens before the question, so there is nothing to compress; use --protocol aware"
    if prompt.written:
        return "a peer reads no text token by token before the question; leave this task out here"
    longest = len(prompt.opening) + max(len(asked.tokens) for asked in prompt.asked)
    if limit is not None and longest > limit:
        return f"a prompt of {longest} tokens is longer than the model's {limit} positions"
    return ""


def _pretended(reply: Reply) -> dict[str, float]:
    return {} if reply.pretended_share is None else {PRETENDED: reply.pretended_share}


def run_peer(
    plan: PeerPlan,
    peer: Peer,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    note: dict[str, Any] | None = None,
    progress: Progress = lambda cell, done, total: None,
) -> list[SummaryRow]:
    """Examine every cell of `plan` and write records and summary into `folder`, continuing where it was left.

    Args:
        model: tells which weights were meant, what ends a text and how many positions there are; it is not run.

    Raises:
        OptionError, DataError: as `millpond_lab.evals.harness.run.run`; or a peer that ends on prompt after prompt.
    """
    eos, limit = end_tokens(model, tokenizer), ModelProfile.of(model).position_limit

    def examiner(cell: Cell) -> PeerExaminer:
        return PeerExaminer(cell, peer, tokenizer, plan.built[cell.task], eos, limit)

    return run(plan, model, tokenizer, folder, {**(note or {}), "peer": peer.software or peer.name}, progress, examiner)


def export(plan: PeerPlan, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path) -> int:
    """Write the requests of all cells, one a line; returns how many. Prompts that do not fit the model are left out."""
    eos, limit = end_tokens(model, tokenizer), ModelProfile.of(model).position_limit
    count = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for cell in plan.cells():
            for prompt in _prompts(plan, cell, tokenizer):
                if not misfit(prompt, limit):
                    file.write(json.dumps(request_of(cell, prompt, eos, limit), ensure_ascii=False) + "\n")
                    count += 1
    return count


def _prompts(plan: PeerPlan, cell: Cell, tokenizer: PreTrainedTokenizerBase) -> Iterator[EncodedPrompt]:
    task = plan.built[cell.task]
    for sample in task.samples(tokenizer, plan.samples, plan.seed):
        yield from encode(sample, tokenizer, task.kind, cell.protocol)
