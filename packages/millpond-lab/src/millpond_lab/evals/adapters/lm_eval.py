"""`millpond` as a model of EleutherAI's lm-evaluation-harness: every answer comes from the evicting cache.

Importing this module registers the model; `millpond lm-eval` does so. Needs the extra `lm-eval`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

import millpond
from millpond.budget import Budget
from millpond.errors import DataError, OptionError
from millpond.hf.model_profile import ModelProfile
from millpond.methods import METHODS
from millpond.models.load import load_model, load_tokenizer
from millpond.models.untrusted.render import write_chat
from millpond_lab.evals.adapters.asked import greedy_question
from millpond_lab.evals.adapters.reading import PromptReader, prompt_of
from millpond_lab.evals.candidates.candidate import Compressed
from millpond_lab.evals.decoding.batch import PromptBatch
from millpond_lab.evals.sample import Question
from millpond_lab.evals.spec import Spec


class CutShortWarning(UserWarning):
    """Something did not fit into the model's positions."""


@register_model("millpond")
class MillpondLM(TemplateLM):  # type: ignore[misc]
    """A model with a budget for its KV cache.

    Args:
        pretrained: a folder, a hub id, or a bundled model.
        method: with options after it, as in "h2o:recent=0.1", or given by themselves in `options`.
        budget: "20%" of each prompt, 512 tokens per KV head, or "64KiB" a sequence; `full` takes none.
        codec, dtype, device: as in `millpond eval`. batch_size: sequences at once; no number depends on it.
        max_length: fewer positions than the model has.
        truncate: cut the beginning of a prompt that is too long, instead of refusing it.
        trust_remote_code: as of `load_model`.
        **options: of the method.

    Raises:
        OptionError: an unknown name or option, or values that do not fit.
    """

    def __init__(
        self,
        pretrained: str = "pond-recall",
        method: str = "h2o",
        budget: str | int | float | None = None,
        codec: str = "auto",
        dtype: str = "auto",
        device: str | None = None,
        batch_size: int | str = 1,
        max_length: int | None = None,
        truncate: bool = False,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        spec = Spec.parse(str(method))
        candidate = Compressed(spec.name, {**spec.options, **options})
        self._policy = METHODS.get(spec.name)(**candidate.options)
        self.budget = candidate.default_budget if budget is None else _budget_text(budget)
        candidate.check(self.budget, codec)
        size = _whole("batch_size", batch_size, 'a number, 1 or more ("auto" is not known here)')
        self.tokenizer = load_tokenizer(pretrained, trust_remote_code=trust_remote_code)
        loaded: Any = load_model(pretrained, dtype, trust_remote_code=trust_remote_code)
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        model = loaded.to(self._device)
        limit = ModelProfile.of(model).position_limit
        if max_length is not None:
            limit = min(_whole("max_length", max_length, "a number, 1 or more"), limit or max_length)
        self._truncate = truncate
        self._cut_short = 0
        self._reading = PromptReader(model, self.tokenizer, candidate, codec, size, limit)
        candidate.open(model, self.tokenizer, PromptBatch("aware", "generate", ()), self.budget, codec).close()
        self._described = {
            "millpond": millpond.__version__,
            "pretrained": str(pretrained),
            "method": str(method),
            **options,
            "budget": self.budget or "all",
            "codec": codec,
            "model_dtype": str(model.dtype).removeprefix("torch."),
        }

    # ------------------------------------------------------------------ what lm-eval asks of a tokenizer

    @property
    def eot_token_id(self) -> int:
        """Ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Begins a text that has nothing before it."""
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        raise OptionError("the tokenizer has neither a first nor a last token, so an empty context cannot be read")

    @property
    def max_length(self) -> int | None:
        """Positions of the model; None for no limit."""
        return self._reading.limit

    @property
    def tokenizer_name(self) -> str:
        """Tells request caches apart."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Tokens of a text; with the tokenizer's own marks unless the text brings its first token, or False."""
        bos = self.tokenizer.bos_token
        marks = not (bos and string.startswith(bos)) if add_special_tokens is None else add_special_tokens
        return [int(t) for t in self.tokenizer(string, add_special_tokens=marks, verbose=False)["input_ids"]]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, by the tokenizer's template."""
        return write_chat(
            self.tokenizer,
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template itself, as lm-eval stores it with the results."""
        return self.tokenizer.chat_template if chat_template else ""

    # ------------------------------------------------------------------ requests

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        fitted = [self._fitted(context, target) for _, context, target in requests]
        groups = [(own[0][0], [t for _, t in own]) for own in (list(g) for _, g in groupby(fitted, lambda f: f[0]))]
        prompts = [prompt_of(context, Question(""), targets) for context, targets in groups]
        found: list[tuple[float, bool]] = []
        with tqdm(total=len(requests), disable=disable_tqdm, desc="millpond: loglikelihood") as bar:
            for fed in self._reading.feed(prompts, self.budget):
                for one in fed:
                    texts = requests[len(found)][0]
                    found.append((one.logprob, one.is_greedy))
                    self.cache_hook.add_partial("loglikelihood", texts, found[-1])
                bar.update(len(fed))
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, every token a decoding step.

        A share is of all the tokens of a window, as there is no prompt.

        Raises:
            OptionError: the method evicts after a prompt only, so it would keep everything.
        """
        if not self._policy.keeps_all and not self._policy.every_step:
            raise OptionError(
                f"method {self._described['method']!r} evicts when a prompt was read, and here every token is decoded, "
                "so it would keep everything; name one that evicts at each step, or its option that does (decode=evict)"
            )
        found = []
        for request in tqdm(requests, disable=disable_tqdm, desc="millpond: loglikelihood_rolling"):
            (text,) = request.args
            total = sum(self._window(*window) for window in self._windows(text))
            found.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers.

        Raises:
            OptionError: a request for sampling, or with an argument that is not known here.
        """
        questions = [greedy_question(request.args[1]) for request in requests]
        contexts = [self.tok_encode(request.args[0]) or [self.prefix_token_id] for request in requests]
        prompts = [prompt_of(self._with_room(c, q), q) for c, q in zip(contexts, questions, strict=True)]
        texts = []
        answers = self._reading.answer(prompts, self.budget)
        bar = tqdm(answers, total=len(prompts), disable=disable_tqdm, desc="millpond: generate_until")
        for request, answer in zip(requests, bar, strict=True):
            self._cut_short += answer.cut_short
            texts.append(answer.text)
            self.cache_hook.add_partial("generate_until", request.args, answer.text)
        if self._cut_short:
            warnings.warn(
                f"{self._cut_short} answers did not end within the model's {self.max_length} positions",
                CutShortWarning,
                stacklevel=2,
            )
        return texts

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes with the results: the method, and what its caches held when answering began."""
        held = self._reading.held
        count = max(len(held), 1)
        return {
            **self._described,
            "kept_share": sum(h.share for h in held) / count,
            "kv_bytes": sum(h.kv_bytes for h in held) / count,
            "full_kv_bytes": sum(h.full_kv_bytes for h in held) / count,
            "cut_short": self._cut_short,
        }

    # ------------------------------------------------------------------ what must fit

    def _fitted(self, context: Sequence[int], target: Sequence[int]) -> tuple[list[int], list[int]]:
        """Context and target as they are, or shortened at the beginning where that was requested."""
        if not target:
            raise DataError("a continuation has no tokens; give each choice some text")
        limit = self.max_length
        too_long = 0 if limit is None else len(context) + len(target) - 1 - limit
        if too_long <= 0:
            return list(context), list(target)
        if not self._truncate or too_long >= len(context):
            raise OptionError(
                f"a request of {len(context)} tokens, with {len(target)} to follow, is longer than the model's {limit} "
                "positions; name a task with shorter prompts, or cut their beginning with truncate=True"
            )
        warnings.warn(f"the beginning of prompts longer than {limit} tokens is cut", CutShortWarning, stacklevel=3)
        return list(context[too_long:]), list(target)

    def _with_room(self, context: Sequence[int], question: Question) -> list[int]:
        """The context; where it may be shortened, with room for the longest answer after it."""
        return self._fitted(context, [0] * (question.max_new_tokens if self._truncate else 1))[0]

    def _windows(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
        tokens = self.tok_encode(text, add_special_tokens=False)
        length = self.max_length or max(len(tokens), 1)
        for window in get_rolling_token_windows(tokens, self.prefix_token_id, length, context_len=1):
            context, target = make_disjoint_window(window)
            yield list(context), list(target)

    def _window(self, context: list[int], target: list[int]) -> float:
        """The log-likelihood of `target` behind `context`."""
        budget = self.budget
        if budget and Budget.parse(budget).kind == "ratio":
            share = Budget.parse(budget).entries(len(context) + len(target) - 1)
            budget = str(max(share, self._policy.protect.minimum()))
        (fed,) = next(self._reading.feed([prompt_of(context, Question(""), [target])], budget))
        return fed.logprob


def _budget_text(budget: str | int | float) -> str:
    """As `millpond eval` writes it; lm-eval reads 0.2 and 512 as numbers."""
    return f"{100 * budget:g}%" if isinstance(budget, float) else str(budget)


def _whole(name: str, value: object, rule: str) -> int:
    try:
        number = int(str(value))
    except ValueError:
        number = 0
    if number < 1:
        raise OptionError(f"{name}={value!r} must be {rule}")
    return number
