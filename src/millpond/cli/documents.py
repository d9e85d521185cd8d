"""`millpond remember` and `millpond ask`: a text is read and compressed once, and asked about as often as one likes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.markup import escape

from millpond.cli.console import errors, held_of, notes, output, size, working
from millpond.cli.generate import pick_device, read_prompt, wants_template
from millpond.cli.options import (
    BudgetText,
    CalibrationFile,
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
from millpond.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


def remember(
    context: typer.Context,
    out: Annotated[str, typer.Argument(help="The file to write.")],
    prompt: Annotated[str | None, optional(help="The text.")] = None,
    prompt_file: PromptFile = None,
    model: ModelName = "pond-recall",
    method: MethodName = "kvzip",
    budget: BudgetText = None,
    option: MethodOptions = None,
    codec: CodecName = "auto",
    preset: PresetName = None,
    calibration: CalibrationFile = None,
    dtype: DtypeName = "auto",
    device: DeviceName = None,
    chunk: Annotated[int | None, optional(min=1, help="Read the text in chunks of so many tokens.")] = None,
    chat: Annotated[
        bool | None,
        optional(
            "--chat/--no-chat",
            help="The text begins a user's message, and a question ends it. Default: if there is a chat template.",
        ),
    ] = None,
) -> None:
    """Read a text, keep what the budget allows, and write that to a file for `millpond ask`."""
    text = read_prompt(prompt, prompt_file)
    options: dict[str, Any] = dict(parse_options(option or []))
    kept = kept_as(context, preset, method, budget, codec)
    from millpond.hf.compress import compress
    from millpond.hf.document import read_document, save_document
    from millpond.models.load import load_model, load_tokenizer

    with working(f"loading {model}"):
        loaded: Any = load_model(model, dtype).to(pick_device(device))  # type: ignore[arg-type]
        tokenizer = load_tokenizer(model)
    in_chat = wants_template(tokenizer, chat)
    ids = beginning(tokenizer, text, in_chat).to(loaded.device)
    with notes(), compress(loaded, tokenizer=tokenizer, calibration=calibration, **kept, **options) as cache:
        with working(f"reading {ids.shape[1]:,} tokens"):
            read_document(loaded, cache, ids, chunk)
            note = json.dumps({"model": model, "dtype": dtype, "chat": in_chat})
            n_bytes = save_document(cache, ids, out, note=note)
        stats = cache.stats()
    errors().print(
        f"[dim]{ids.shape[1]:,} tokens read · "
        f"{held_of(stats.kv_bytes, stats.unused_bytes, stats.full_kv_bytes)} · "
        f"{escape(out)}: {size(n_bytes)}[/]",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


def ask(
    document: Annotated[str, typer.Argument(help="A file from `millpond remember`.")],
    questions: Annotated[list[str], typer.Argument(help="One or more; each is asked by itself.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 64,
    model: Annotated[str | None, optional(help="The model that read the text, if it has moved.")] = None,
    dtype: Annotated[str | None, optional(help="Of its weights, if not as they were.")] = None,
    device: DeviceName = None,
) -> None:
    """Ask questions about a remembered text: it is not read again. Answers are shown while they come."""
    import torch

    from millpond.cli.text_streamer import TextStopwatch
    from millpond.hf.document import document_note, restore_document
    from millpond.models.chat_template import end_ids
    from millpond.models.load import load_model, load_tokenizer

    made = _made_with(document, document_note(document))
    name = model or made.model
    with working(f"loading {name}"):
        loaded: Any = load_model(name, dtype or made.dtype).to(pick_device(device))  # type: ignore[arg-type]
        tokenizer = load_tokenizer(name)
    ends = end_ids(loaded, tokenizer) if made.chat else None
    ended: dict[str, Any] = {} if ends is None else {"eos_token_id": ends}
    for question in questions:
        cache, ids = restore_document(loaded, document, tokenizer=tokenizer)
        with notes(), cache:
            output().print(f"[bold]{escape(question)}[/]", soft_wrap=True, highlight=False)
            whole = torch.cat([ids, ending(tokenizer, question, made.chat).to(ids)], 1)
            loaded.generate(
                whole, attention_mask=torch.ones_like(whole), past_key_values=cache, max_new_tokens=max_new_tokens,
                do_sample=False, streamer=TextStopwatch(tokenizer), **ended,
            )  # fmt: skip


def beginning(tokenizer: PreTrainedTokenizerBase, text: str, in_chat: bool) -> Tensor:
    """(1, n) ids of a text that questions will follow: in a chat, the begin of the user's message."""
    from millpond.models.chat_template import around_user

    if not in_chat:
        return _ids(tokenizer, text, special=True)
    return _ids(tokenizer, around_user(tokenizer).before + text, special=False)


def ending(tokenizer: PreTrainedTokenizerBase, question: str, in_chat: bool) -> Tensor:
    """(1, n) ids of a question behind a text: no begin of text again; in a chat, the end of the user's message."""
    from millpond.models.chat_template import around_user

    if not in_chat:
        return _ids(tokenizer, question, special=False)
    return _ids(tokenizer, f"\n\n{question}{around_user(tokenizer).behind}", special=False)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, special: bool) -> Tensor:
    inputs: Any = tokenizer(text, add_special_tokens=special, return_tensors="pt", verbose=False)
    ids: Tensor = inputs["input_ids"]
    return ids


class _Made(NamedTuple):
    """What a document says of how it was made."""

    model: str
    dtype: str
    chat: bool


def _made_with(document: str, note: str) -> _Made:
    try:
        made = json.loads(note)
        return _Made(str(made["model"]), str(made["dtype"]), bool(made.get("chat", False)))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise DataError(f"{document!r} does not say which model read it: give --model and --dtype") from None
