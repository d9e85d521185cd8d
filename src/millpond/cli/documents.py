"""`millpond remember` and `millpond ask`: one text, read and compressed once, for any number of questions."""

from __future__ import annotations

import json
import os
from typing import Annotated, NamedTuple

import typer
from rich.markup import escape

from millpond.cli.console import errors, held_of, notes, output, size, working
from millpond.cli.options import (
    CacheChoice,
    DeviceName,
    ModelOptions,
    NewTokens,
    PromptSource,
    TrustRemoteCode,
    expand_groups,
    load_on,
    optional,
    wants_template,
)
from millpond.errors import DataError


@expand_groups
def remember(
    *,
    out: Annotated[str, typer.Argument(help="The file to write.")],
    source: PromptSource,
    model: ModelOptions,
    cache: CacheChoice,
    chunk: Annotated[
        int | None, optional(min=1, help="Read the text in chunks of N tokens, and evict after each.")
    ] = None,
    storage_codec: Annotated[
        str | None,
        optional(
            metavar="transform:BITS",
            help="Store kept entries in BITS a number (0.5 to 4), such as transform:1.5; --calibration is its file.",
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        optional(
            "--chat/--no-chat",
            help="The text begins a user's message, and a question ends it. Default: if there is a chat template.",
        ),
    ] = None,
) -> None:
    """Read a text, compress its KV cache, and write that to a file for `millpond ask`.

    A budget without a method is kvzip's, which does not need to know the questions. With a storage codec nothing is
    evicted but by a method or a budget that is given, and all but the first, the newest and the most attended tokens
    are codes in the file.
    """
    text, cache_options = source.read(), cache.for_compress()
    if storage_codec is not None:
        from millpond.codec.transform.storage_codec import parse_storage_codec

        parse_storage_codec(storage_codec)
        calibration = cache_options.pop("calibration")
        if not cache.given & {"method", "budget", "codec", "preset"}:
            cache_options["method"] = "full"
    from millpond.hf.ask import beginning, for_later_questions
    from millpond.hf.compress import compress
    from millpond.hf.document import read_document, save_document
    from millpond.hf.text_storage import TextStorage

    with working(f"loading {model.model}"):
        loaded, tokenizer = model.load()
    in_chat = wants_template(tokenizer, chat)
    ids = beginning(tokenizer, text, in_chat).to(loaded.device)
    with notes(), compress(loaded, tokenizer=tokenizer, **for_later_questions(cache_options)) as kv_cache:
        made = {"model": model.model, "dtype": model.dtype, "chat": in_chat}
        storage = None
        if storage_codec is not None:
            storage = TextStorage(kv_cache, storage_codec, calibration)
            if calibration is not None:
                made["calibration"] = os.path.abspath(calibration)
        with working(f"reading {ids.shape[1]:,} tokens"):
            read_document(loaded, kv_cache, ids, chunk)
            n_bytes = save_document(kv_cache, ids, out, note=json.dumps(made), storage=storage)
        stats = kv_cache.stats()
    errors().print(
        f"[dim]{ids.shape[1]:,} tokens read · "
        f"{held_of(stats.kv_bytes, stats.unused_bytes, stats.full_kv_bytes)} · "
        f"{escape(out)}: {size(n_bytes)}[/]",
        soft_wrap=True,
        highlight=False,
    )


def ask(
    document: Annotated[str, typer.Argument(help="A file from `millpond remember`.")],
    questions: Annotated[list[str], typer.Argument(help="One or more; each is answered on its own.")],
    max_new_tokens: NewTokens = 64,
    model: Annotated[str | None, optional(help="The model that read the text, if its path has changed.")] = None,
    dtype: Annotated[str | None, optional(help="Data type of its weights, if not the one at reading.")] = None,
    device: DeviceName = None,
    trust_remote_code: TrustRemoteCode = False,
    calibration: Annotated[
        str | None, optional(help="The transform file of a text with a storage codec, if its path has changed.")
    ] = None,
) -> None:
    """Ask questions about a text that `millpond remember` wrote, without reading it again. Answers are streamed."""
    from millpond.cli.text_streamer import TextStopwatch
    from millpond.hf.ask import answer
    from millpond.hf.document import document_note, restore_document

    origin = _made_with(document, document_note(document))
    name = model or origin.model
    with working(f"loading {name}"):
        loaded, tokenizer = load_on(name, dtype or origin.dtype, device, trust_remote_code)
    for question in questions:
        cache, ids = restore_document(
            loaded, document, tokenizer=tokenizer, calibration=calibration or origin.calibration
        )
        with notes(), cache:
            output().print(f"[bold]{escape(question)}[/]", soft_wrap=True, highlight=False)
            answer(loaded, tokenizer, cache, ids, question, origin.chat, max_new_tokens, TextStopwatch(tokenizer))


class _Made(NamedTuple):
    """Settings that a document was made with."""

    model: str
    dtype: str
    chat: bool
    calibration: str | None


def _made_with(document: str, note: str) -> _Made:
    try:
        fields = json.loads(note)
        calibration = None if fields.get("calibration") is None else str(fields["calibration"])
        return _Made(str(fields["model"]), str(fields["dtype"]), bool(fields.get("chat", False)), calibration)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise DataError(f"{document!r} does not say which model read it: give --model and --dtype") from None
