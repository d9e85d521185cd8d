"""Options of the chunk store of an engine that the command line opens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.cli.options import ChunkDtype, OptionGroup
from millpond.cli.setting_options import option_of
from millpond.engine.settings import EngineSettings
from millpond.errors import OptionError

if TYPE_CHECKING:
    from millpond.cache.chunks.store import ChunkStore


@dataclass(frozen=True, kw_only=True)
class ChunkChoice(OptionGroup):
    """Store of the chunks that prompts hold."""

    chunk_store: Annotated[Path | None, option_of(EngineSettings, "chunk_store")] = None
    chunk_memory: Annotated[str, typer.Option(help="Chunks in memory, at most.")] = "1GiB"
    chunk_disk: Annotated[str, typer.Option(help="Chunks in the folder, at most.")] = "20GiB"
    chunk_dtype: ChunkDtype = "auto"
    chunk_rule: Annotated[str, typer.Option(metavar="RULE", help="Eviction rule of chunks, as of --prefix-cache.")] = (
        "lru"
    )
    chunk_alpha: Annotated[
        float, typer.Option(help="Factor on the share of chunks that is computed again: `millpond chunks tune-alpha`.")
    ] = 0.17
    chunk_variants: Annotated[int, typer.Option(help="Variants of a chunk, each for another context, at most.")] = 4
    chunk_keep_above: Annotated[
        float, typer.Option(help="CFO of a chunk above which its computed part is kept as a further variant; 1: never.")
    ] = 0.05
    chunk_focus: Annotated[
        int,
        typer.Option(
            help="Layers for which the question must attend to the same chunks; then deeper layers compute no tokens "
            "of others. 0: they compute all."
        ),
    ] = 0
    chunk_coverage: Annotated[
        float, typer.Option(help="Share of the question's attention to chunks that those of --chunk-focus must have.")
    ] = 0.5
    chunk_load_timeout: Annotated[
        float,
        typer.Option(help="Seconds without data from the disk after which waiting requests compute their chunks."),
    ] = 10.0

    def store(self) -> ChunkStore | None:
        """Return the chunk store of the options; None without a folder.

        Raises:
            OptionError: a value out of range, or options of a store without its folder.
        """
        if self.chunk_store is None:
            if given := self.given:
                raise OptionError(f"--{min(given).replace('_', '-')} needs --chunk-store")
            return None
        from millpond.cache.chunks.store import ChunkStore

        return ChunkStore(
            self.chunk_store,
            memory=self.chunk_memory,
            disk=self.chunk_disk,
            variants=self.chunk_variants,
            keep_above=self.chunk_keep_above,
            alpha=self.chunk_alpha,
            focus=self.chunk_focus,
            coverage=self.chunk_coverage,
            dtype=self.chunk_dtype,
            rule=self.chunk_rule,
            load_timeout_s=self.chunk_load_timeout,
        )
