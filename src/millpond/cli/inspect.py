"""`millpond inspect`: a page that shows which entries the cache holds after each step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from millpond.cli.console import notes, output, size
from millpond.cli.options import (
    CacheChoice,
    Chat,
    ModelOptions,
    NewTokens,
    PromptSource,
    expand_groups,
    optional,
    wants_template,
)
from millpond.errors import OptionError
from millpond.presets import choose

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from millpond.inspector.token_text import Encoded


@expand_groups
def inspect(
    *,
    source: PromptSource,
    model: ModelOptions,
    cache: CacheChoice,
    max_new_tokens: NewTokens = 64,
    chat: Chat = None,
    out: Annotated[Path, typer.Option(help="The page.")] = Path("millpond-inspect.html"),
    trace: Annotated[
        Path | None, optional(help="Write the trace itself too, as JSON; 'millpond plot' draws *.trace.json.")
    ] = None,
) -> None:
    """Generate inside a KV budget and write a page that shows, step by step, which entries each head holds."""
    text, cache_options = source.read(), cache.for_compress()
    from millpond.hf.compress import compress
    from millpond.inspector import page
    from millpond.inspector.trace_recorder import record_trace

    loaded, tokenizer = model.load()
    coded = encode(tokenizer, text, chat)
    with notes(), compress(loaded, tokenizer=tokenizer, **cache_options) as kv_cache:
        kept = cache.kept()
        method = choose(kept["method"], kept["budget"], kept["codec"], evicting=bool(cache.option)).method
        setting = {"model": Path(model.model).name, "method": ":".join([method, *(cache.option or [])])}
        if kv_cache.budget is not None:
            setting["budget"] = str(kv_cache.budget)
        setting["prompt"] = f"{len(coded.ids):,} tokens"
        recorded = record_trace(loaded, tokenizer, kv_cache, coded, setting, max_new_tokens)
    write(out, page(recorded))
    if trace is not None:
        recorded.write(trace)
    screen = output()
    share = recorded.kv_bytes[-1] / recorded.full_kv_bytes[-1]
    screen.print(
        f"{recorded.n_prompt:,} tokens read, {len(recorded.tokens) - recorded.n_prompt:,} written; "
        f"KV {size(recorded.kv_bytes[-1])} held, full cache {size(recorded.full_kv_bytes[-1])} ({share:.0%})",
        soft_wrap=True,
        highlight=False,
    )
    screen.print(f"Open {escape(str(out))} in a browser.", soft_wrap=True, highlight=False)


def encode(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool | None) -> Encoded:
    """Return the prompt as tokens with texts, through the chat template if one is to be used.

    Raises:
        OptionError: a chat template is wanted and there is none.
    """
    from millpond.inspector.token_text import encode_pieces
    from millpond.models.untrusted.render import write_chat

    if not wants_template(tokenizer, chat):
        return encode_pieces(tokenizer, text)
    messages = [{"role": "user", "content": text}]
    return encode_pieces(tokenizer, write_chat(tokenizer, messages, add_generation_prompt=True), special_tokens=False)


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
