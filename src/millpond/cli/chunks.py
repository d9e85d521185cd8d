"""`millpond chunks`: fill, list, check and empty a folder of stored chunks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from millpond.cli.console import output, size, working
from millpond.cli.options import ChunkDtype, DtypeName, ModelName, Threads, TrustRemoteCode
from millpond.errors import DataError, OptionError

if TYPE_CHECKING:
    from millpond.cache.chunks.files import StoredFile

Folder = Annotated[Path, typer.Argument(help="Folder of the chunk store.", show_default=False)]

app = typer.Typer(no_args_is_help=True, help="Fill, list, check and empty a folder of stored chunks.")


@app.command("add")
def add(
    folder: Folder,
    files: Annotated[list[Path], typer.Argument(help="Text files; each is a chunk.", show_default=False)],
    model: ModelName = "pond-text",
    paragraphs: Annotated[bool, typer.Option("--paragraphs", help="Each paragraph of a file is a chunk.")] = False,
    alone: Annotated[
        bool, typer.Option("--alone", help="Compute each chunk by itself, not after the one before it.")
    ] = False,
    disk: Annotated[str, typer.Option(help="Chunks in the folder, at most.")] = "20GiB",
    chunk_dtype: ChunkDtype = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Compute the keys and values of texts for prompts that will hold them."""
    texts = [text for file in files for text in _texts(file, paragraphs)]
    if not texts:
        raise DataError("the files hold no text")
    from millpond.cache.chunks.store import ChunkStore
    from millpond.engine.llm import LLM

    store = ChunkStore(folder, memory="256MiB", disk=disk, dtype=chunk_dtype)
    requested_dtype = None if dtype == "auto" else dtype
    with LLM(
        model,
        method="full",
        chunk_store=store,
        dtype=requested_dtype,
        threads=threads,
        trust_remote_code=trust_remote_code,
    ) as llm:
        with working(f"reading {len(texts)} chunks"):
            llm.store_chunks(texts, alone=alone)
        stats = store.stats()
    if stats.write_failures:
        raise DataError(f"{stats.write_failures} of {len(texts)} chunks could not be written to {str(folder)!r}")
    output().print(
        f"{len(texts)} chunks, {stats.stored} of them new; {escape(str(folder))} holds {size(stats.disk_bytes)}",
        soft_wrap=True,
        highlight=False,
    )


@app.command("tune-alpha")
def tune_alpha(
    files: Annotated[list[Path], typer.Argument(help="Text files; each is a chunk.", show_default=False)],
    model: ModelName = "pond-text",
    kl: Annotated[float, typer.Option("--kl", help="KL divergence from plain prompts, in nats, at most.")] = 0.05,
    paragraphs: Annotated[bool, typer.Option("--paragraphs", help="Each paragraph of a file is a chunk.")] = False,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to measure.")] = 12,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of each.")] = 4,
    question: Annotated[int, typer.Option(min=1, help="Tokens of each question, at most.")] = 32,
    chunk_dtype: ChunkDtype = "auto",
    dtype: DtypeName = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draw of chunks.")] = 0,
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Find the least alpha with which prompts of stored texts answer as plain prompts do, within a KL divergence."""
    texts = [text for file in files for text in _texts(file, paragraphs)]
    from millpond.cache.chunks.store import ChunkStore
    from millpond.engine.llm import LLM

    requested_dtype = None if dtype == "auto" else dtype
    with (
        LLM(
            model,
            method="full",
            chunk_store=ChunkStore(None, memory="16GiB", dtype=chunk_dtype, keep_above=1),
            dtype=requested_dtype,
            threads=threads,
            trust_remote_code=trust_remote_code,
        ) as llm,
        working(f"reading prompts of {len(texts)} chunks"),
    ):
        fit = llm.tune_alpha(texts, kl, prompts=prompts, chunks=chunks, question=question, seed=seed)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("alpha", "KL, nats", "of chunks computed"):
        table.add_column(name, justify="right", no_wrap=True)
    for trial in fit.trials:
        table.add_row(f"{trial.alpha:.3g}", f"{max(trial.kl, 0.0):.4f}", f"{trial.share:.1%}")
    output().print(table)
    output().print(
        f"alpha {fit.best.alpha:.3g}: ChunkStore(alpha={fit.best.alpha:.3g}) or --chunk-alpha {fit.best.alpha:.3g}",
        highlight=False,
    )


@app.command("ls")
def ls(folder: Folder) -> None:
    """List the variants of each chunk: tokens, bytes, how many parts stood before it, and its CCI."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("chunk", "tokens", "bytes", "after", "CCI", "exact"):
        table.add_column(name, justify="left" if name == "chunk" else "right", no_wrap=True)
    files = _listed(folder)
    for file in files:
        facts = file.facts
        if facts is None:
            table.add_row(file.path.parent.name[:16], "bad", size(file.size), "", "", "")
        else:
            table.add_row(
                facts.chunk[:16],
                str(facts.n_tokens),
                size(file.size),
                f"{len(facts.before)} parts",
                f"{facts.impact:.2f}",
                "yes" if facts.exact else "no",
            )
    output().print(table)
    output().print(f"{len(files)} files, {size(sum(file.size for file in files))}", highlight=False)


@app.command("check")
def check(folder: Folder) -> None:
    """Read every file and name those that are cut, changed or of another model; exits with 1 if there are any."""
    files = _listed(folder, verify=True)
    bad = [file for file in files if file.facts is None]
    for file in bad:
        output().print(f"[red]{escape(str(file.path))}[/]: {escape(file.why)}", soft_wrap=True, highlight=False)
    output().print(f"{len(files)} files, {len(bad)} bad", highlight=False)
    if bad:
        raise typer.Exit(1)


@app.command("rm")
def rm(
    folder: Folder,
    chunks: Annotated[
        list[str] | None, typer.Argument(help="Beginnings of chunks' keys, as `ls` shows them.", show_default=False)
    ] = None,
    bad: Annotated[bool, typer.Option("--bad", help="Remove the files that `check` names.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Remove all, and let the folder be of any model.")] = False,
) -> None:
    """Remove stored chunks; a server that runs computes them when a prompt holds them."""
    if sum(map(bool, (chunks, bad, everything))) != 1:
        raise OptionError("give either keys of chunks, --bad or --all")
    files = _listed(folder, verify=bad)
    if bad:
        files = [file for file in files if file.facts is None]
    elif chunks:
        for key in chunks:
            if not any(file.path.parent.name.startswith(key) for file in files):
                raise OptionError(f"no chunk begins with {key!r}; see millpond chunks ls {folder}")
        files = [file for file in files if file.path.parent.name.startswith(tuple(chunks))]
    for file in files:
        file.path.unlink(missing_ok=True)
    if everything:
        (folder / "store.json").unlink(missing_ok=True)
    output().print(f"{len(files)} files removed, {size(sum(file.size for file in files))}", highlight=False)


def _listed(folder: Path, *, verify: bool = False) -> list[StoredFile]:
    from millpond.cache.chunks.files import list_files

    return list_files(folder, verify=verify)


def _texts(file: Path, paragraphs: bool) -> list[str]:
    """Return the chunks of a file.

    Raises:
        DataError: it cannot be read, or is no text.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{str(file)!r} cannot be read: {error}") from error
    parts = [part.strip() for part in text.split("\n\n")] if paragraphs else [text]
    return [part for part in parts if part.strip()]
