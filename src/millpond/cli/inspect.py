"""`millpond inspect`: a page on which a person sees what the cache remembers after each step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from millpond.cli.console import notes, output, size
from millpond.cli.generate import pick_device, read_prompt, wants_template
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
    PromptFile,
    optional,
    parse_options,
)
from millpond.errors import OptionError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from millpond.evals.inspector.token_text import Encoded


def inspect(
    prompt: Annotated[str | None, optional(help="The text to continue.")] = None,
    prompt_file: PromptFile = None,
    model: ModelName = "pond-recall",
    method: MethodName = "h2o",
    budget: BudgetText = None,
    option: MethodOptions = None,
    codec: CodecName = "auto",
    calibration: CalibrationFile = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 64,
    dtype: DtypeName = "auto",
    device: DeviceName = None,
    chat: Chat = None,
    out: Annotated[Path, typer.Option(help="The page.")] = Path("millpond-inspect.html"),
    trace: Annotated[
        Path | None, optional(help="Write the trace itself too, as JSON; 'millpond plot' draws *.trace.json.")
    ] = None,
) -> None:  # fmt: skip
    """Generate inside a KV budget and write a page that shows, step by step, what each head still remembers."""
    text = read_prompt(prompt, prompt_file)
    options: dict[str, Any] = dict(parse_options(option or []))
    from millpond.evals.inspector import page
    from millpond.evals.inspector.trace_recorder import record_trace
    from millpond.hf.compress import compress
    from millpond.models.load import load_model, load_tokenizer

    where = pick_device(device)
    loaded: Any = load_model(model, dtype).to(where)  # type: ignore[arg-type]
    tokenizer = load_tokenizer(model)
    coded = encode(tokenizer, text, chat)
    with (
        notes(),
        compress(loaded, method, budget, codec, tokenizer=tokenizer, calibration=calibration, **options) as cache,
    ):
        setting = {"model": Path(model).name, "method": ":".join([method, *(option or [])])}
        if cache.budget is not None:
            setting["budget"] = str(cache.budget)
        setting["prompt"] = f"{len(coded.ids):,} tokens"
        made = record_trace(loaded, tokenizer, cache, coded, setting, max_new_tokens)
    write(out, page(made))
    if trace is not None:
        made.write(trace)
    screen = output()
    share = made.kv_bytes[-1] / made.full_kv_bytes[-1]
    screen.print(
        f"{made.n_prompt:,} tokens read, {len(made.tokens) - made.n_prompt:,} written; "
        f"KV {size(made.kv_bytes[-1])} held, full cache {size(made.full_kv_bytes[-1])} ({share:.0%})",
        soft_wrap=True, highlight=False,
    )  # fmt: skip
    screen.print(f"Open {escape(str(out))} in a browser.", soft_wrap=True, highlight=False)


def encode(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool | None) -> Encoded:
    """The prompt as tokens with their texts, through the chat template if wanted, or if there is one.

    Raises:
        OptionError: a chat template is wanted and there is none.
    """
    from millpond.evals.inspector.token_text import encode_pieces

    if not wants_template(tokenizer, chat):
        return encode_pieces(tokenizer, text)
    messages = [{"role": "user", "content": text}]
    rendered: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return encode_pieces(tokenizer, rendered, special_tokens=False)


def write(path: Path, text: str) -> None:
    """Write a file, its folder too.

    Raises:
        OptionError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{path} cannot be written: {error}") from error
