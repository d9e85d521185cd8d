"""`millpond remember` and `millpond ask`: a text is read and compressed once, and asked about as often as one likes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from millpond.cli.console import errors, held_of, notes, output, size
from millpond.cli.generate import encode, pick_device, read_prompt
from millpond.cli.options import (
    BudgetText,
    CalibrationFile,
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
from millpond.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


def remember(
    out: Annotated[str, typer.Argument(help="The file to write.")],
    prompt: Annotated[str | None, optional(help="The text.")] = None,
    prompt_file: PromptFile = None,
    model: ModelName = "pond-recall",
    method: MethodName = "kvzip",
    budget: BudgetText = None,
    option: MethodOptions = None,
    codec: CodecName = "auto",
    calibration: CalibrationFile = None,
    dtype: DtypeName = "auto",
    device: DeviceName = None,
    chunk: Annotated[int | None, optional(min=1, help="Read the text in chunks of so many tokens.")] = None,
) -> None:
    """Read a text, keep what the budget allows, and write that to a file for `millpond ask`."""
    text = read_prompt(prompt, prompt_file)
    options: dict[str, Any] = dict(parse_options(option or []))
    from millpond.hf.compress import compress
    from millpond.hf.document import read_document, save_document
    from millpond.models.load import load_model, load_tokenizer

    loaded: Any = load_model(model, dtype).to(pick_device(device))  # type: ignore[arg-type]
    tokenizer = load_tokenizer(model)
    ids = encode(tokenizer, text, chat=False).to(loaded.device)
    with (
        notes(),
        compress(loaded, method, budget, codec, tokenizer=tokenizer, calibration=calibration, **options) as cache,
    ):
        with errors().status(f"reading {ids.shape[1]:,} tokens"):
            read_document(loaded, cache, ids, chunk)
        n_bytes = save_document(cache, ids, out, note=json.dumps({"model": model, "dtype": dtype}))
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
    """Ask questions about a remembered text: it is not read again."""
    import torch

    from millpond.hf.document import document_note, restore_document
    from millpond.models.load import load_model, load_tokenizer

    made = _made_with(document, document_note(document))
    name = model or made["model"]
    loaded: Any = load_model(name, dtype or made["dtype"]).to(pick_device(device))  # type: ignore[arg-type]
    tokenizer = load_tokenizer(name)
    for question in questions:
        cache, ids = restore_document(loaded, document, tokenizer=tokenizer)
        with notes(), cache:
            whole = torch.cat([ids, _behind(tokenizer, question).to(ids)], 1)
            answer = loaded.generate(
                whole, attention_mask=torch.ones_like(whole), past_key_values=cache, max_new_tokens=max_new_tokens,
                do_sample=False,
            )  # fmt: skip
        text = str(tokenizer.decode(answer[0, whole.shape[1] :], skip_special_tokens=True))
        output().print(f"[bold]{escape(question)}[/]\n{escape(text)}", soft_wrap=True, highlight=False)


def _behind(tokenizer: PreTrainedTokenizerBase, question: str) -> Tensor:
    """(1, n) ids of a question that follows a text: no begin of text again."""
    inputs: Any = tokenizer(question, add_special_tokens=False, return_tensors="pt")
    ids: Tensor = inputs["input_ids"]
    return ids


def _made_with(document: str, note: str) -> dict[str, str]:
    try:
        made = json.loads(note)
        return {"model": str(made["model"]), "dtype": str(made["dtype"])}
    except (ValueError, TypeError, KeyError):
        raise DataError(f"{document!r} does not say which model read it: give --model and --dtype") from None
