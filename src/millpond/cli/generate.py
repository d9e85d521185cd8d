"""`millpond generate`: a prompt in, text out while it comes, and what the cache held."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from millpond.cli.console import errors, held_of, notes
from millpond.cli.options import (
    BudgetText,
    CalibrationFile,
    Chat,
    CodecName,
    DeviceName,
    DtypeName,
    MethodName,
    MethodOptions,
    ModelName,
    PresetName,
    PromptFile,
    kept_as,
    optional,
    parse_options,
)
from millpond.engine.sampling.params import SamplingParams
from millpond.errors import OptionError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from millpond.bench.common.stopwatch import Stopwatch
    from millpond.hf.stats import CacheStats


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; temperature 0 takes the most likely one."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    typical_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise OptionError(f"temperature={self.temperature} must not be negative; 0 is greedy")
        for name in ("top_p", "typical_p"):
            if not 0 < getattr(self, name) <= 1:
                raise OptionError(f"{name}={getattr(self, name)} must lie in (0, 1]; 1 turns it off")
        if self.top_k < 0:
            raise OptionError(f"top_k={self.top_k} must not be negative; 0 turns it off")
        if self.temperature == 0 and (self.top_p < 1 or self.top_k or self.typical_p < 1):
            raise OptionError(
                "top_p, top_k and typical_p have no effect at temperature 0; set --temperature, for example 0.7"
            )

    def kwargs(self) -> dict[str, Any]:
        """For `generate()`."""
        if self.temperature == 0:
            return {"do_sample": False}
        return {
            "do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k,
            "typical_p": self.typical_p,
        }  # fmt: skip


def generate(
    context: typer.Context,
    prompt: Annotated[str | None, optional(help="The prompt.")] = None,
    prompt_file: PromptFile = None,
    model: ModelName = "pond-recall",
    method: MethodName = "h2o",
    budget: BudgetText = None,
    option: MethodOptions = None,
    codec: CodecName = "auto",
    preset: PresetName = None,
    calibration: CalibrationFile = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the most likely tokens of this total probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from so many most likely tokens; 0: all.")] = 0,
    typical_p: Annotated[
        float, typer.Option(help="Draw from the tokens of this total probability whose surprise is the usual one.")
    ] = 1.0,
    min_new_tokens: Annotated[int, typer.Option(min=0, help="The text does not end before so many.")] = 0,
    bad_word: Annotated[
        list[str] | None, optional(help="Never written, with or without a space before it; may be given again.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    dtype: DtypeName = "auto",
    device: DeviceName = None,
    memory_limit: Annotated[
        str | None, optional(help="Most memory for pages ('2GiB'); beyond it generation stops.")
    ] = None,
    page_slots: Annotated[
        int | None, optional(help="Entries per page, a power of two. Default: measured.")
    ] = None,
    chunk: Annotated[
        int | None,
        optional(min=1, help="Read the prompt in chunks of so many tokens: the peak stays near the budget."),
    ] = None,
    chat: Chat = None,
) -> None:  # fmt: skip
    """Generate text from a prompt inside a KV budget."""
    sampling = Sampling(temperature, top_p, top_k, typical_p, seed)
    if min_new_tokens > max_new_tokens:
        raise OptionError(f"--min-new-tokens {min_new_tokens} is more than --max-new-tokens {max_new_tokens}; lower it")
    words = SamplingParams(bad_words=tuple(bad_word or ())).bad_words
    text = read_prompt(prompt, prompt_file)
    options: dict[str, Any] = dict(parse_options(option or []))
    kept = kept_as(context, preset, method, budget, codec)
    import torch

    from millpond.cache.pages.pool import DEFAULT_SLOTS
    from millpond.cli.text_streamer import TextStopwatch
    from millpond.engine.sampling.banned_tokens import sequences_of
    from millpond.hf.compress import compress
    from millpond.models.chat_template import end_ids
    from millpond.models.load import load_model, load_tokenizer

    where = pick_device(device)
    loaded: Any = load_model(model, dtype).to(where)  # type: ignore[arg-type]
    tokenizer = load_tokenizer(model)
    ids = encode(tokenizer, text, chat).to(where)
    torch.manual_seed(seed)
    extra: dict[str, Any] = {"prefill_chunk_size": chunk} if chunk else {}
    if wants_template(tokenizer, chat) and (ends := end_ids(loaded, tokenizer)) is not None:
        extra["eos_token_id"] = ends
    if bad := sequences_of(words, tokenizer):
        extra["bad_words_ids"] = [list(ids) for ids in bad]
    if min_new_tokens:
        extra["min_new_tokens"] = min_new_tokens
    with notes(), compress(
        loaded, memory_limit=memory_limit, page_slots=page_slots or DEFAULT_SLOTS,
        tokenizer=tokenizer, calibration=calibration, **kept, **options
    ) as cache:  # fmt: skip
        watch = TextStopwatch(tokenizer)
        loaded.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, streamer=watch,
            max_new_tokens=max_new_tokens, **sampling.kwargs(), **extra,
        )  # fmt: skip
        stats = cache.stats()
    errors().print(f"[dim]{escape(closing_line(ids.shape[1], watch, stats))}[/]", soft_wrap=True, highlight=False)


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """The prompt from one of its two sources.

    Raises:
        OptionError: neither or both are given, the file cannot be read, or the prompt is empty.
    """
    if (prompt is None) == (prompt_file is None):
        raise OptionError("give the prompt either as --prompt TEXT or as --prompt-file FILE (- for standard input)")
    if prompt_file == "-":
        prompt = sys.stdin.read()
    elif prompt_file is not None:
        try:
            prompt = Path(prompt_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"prompt file {prompt_file!r} cannot be read: {error}") from error
    assert prompt is not None
    if not prompt.strip():
        raise OptionError("the prompt is empty")
    return prompt


def pick_device(name: str | None) -> torch.device:
    """The device of that name; without a name, a GPU if there is one.

    Raises:
        OptionError: torch knows no such device, or cannot use it here.
    """
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise OptionError(f"--device {name}: torch cannot use it here ({reason})") from error
    return device


def encode(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool | None) -> Tensor:
    """(1, n) token ids, through the chat template if wanted, or if there is one.

    Raises:
        OptionError: a chat template is wanted and there is none.
    """
    if wants_template(tokenizer, chat):
        messages = [{"role": "user", "content": text}]
        inputs: Any = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(text, return_tensors="pt")
    ids: Tensor = inputs["input_ids"]
    return ids


def wants_template(tokenizer: PreTrainedTokenizerBase, chat: bool | None) -> bool:
    """Whether the chat template is to be used: as `chat` says, and without a word if there is one.

    Raises:
        OptionError: a chat template is wanted and there is none.
    """
    from millpond.models.chat_template import has_template

    found = has_template(tokenizer)
    if chat and not found:
        raise OptionError("--chat: this tokenizer has no chat template; leave --chat out")
    return found and chat is not False


def closing_line(n_prompt: int, watch: Stopwatch, stats: CacheStats) -> str:
    """What was done, how fast, and what the cache holds of what a full one would."""
    prefill = n_prompt / watch.prefill_s if watch.prefill_s else 0.0
    return (
        f"prompt {n_prompt:,} tokens at {prefill:,.0f} tokens/s · {len(watch.ticks):,} new at "
        f"{watch.tokens_per_s:,.1f} tokens/s · {held_of(stats.kv_bytes, stats.unused_bytes, stats.full_kv_bytes)}"
    )
