"""A run of a peer into the folder of a run of ours, and the same prompts as a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millpond.hf.model_profile import ModelProfile
from millpond_lab.evals.decoding.batch import EncodedPrompt, encode
from millpond_lab.evals.decoding.greedy_decode import end_tokens
from millpond_lab.evals.decoding.record import Cell, SummaryRow
from millpond_lab.evals.harness.run import Progress, run
from millpond_lab.evals.peers.examine import PeerExaminer, misfit
from millpond_lab.evals.peers.lines import request_of
from millpond_lab.evals.peers.plan import PeerPlan
from millpond_lab.evals.peers.process import Peer


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
