"""Examination of a peer: one prompt after another, its replies scored by our tasks as records."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from millpond_lab.evals.decoding.batch import EncodedPrompt, EncodedQuestion, PromptBatch
from millpond_lab.evals.decoding.greedy_decode import before_stop
from millpond_lab.evals.decoding.record import PRETENDED, Cell, Record
from millpond_lab.evals.peers.lines import Reply, most_tokens, reply_of, request_of
from millpond_lab.evals.peers.process import Peer
from millpond_lab.evals.task import Task
from millpond_lab.peer_process import PeerError


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
    longest = len(prompt.opening) + max(len(asked.tokens) for asked in prompt.asked)
    if limit is not None and longest > limit:
        return f"a prompt of {longest} tokens is longer than the model's {limit} positions"
    return ""


def _pretended(reply: Reply) -> dict[str, float]:
    return {} if reply.pretended_share is None else {PRETENDED: reply.pretended_share}
