"""KV cache eviction inside an unmodified vLLM, by the methods of Millpond."""

from __future__ import annotations

from typing import Any, Literal

from millpond_vllm.event_times import CHUNK

__all__ = ["engine_args"]


def engine_args(
    method: str = "snapkv",
    budget: str | int | float | None = "20%",
    *,
    recent: int | None = None,
    prefill: Literal["auto", "once", "chunks"] = "auto",
    chunk: int = CHUNK,
    force: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Return the arguments with which `vllm.LLM` evicts.

    Args:
        method: Name of the method; `millpond-vllm check MODEL` lists those that act on blocks.
        budget: Entries per KV head: "20%" of each prompt or 512 tokens; None keeps everything.
        recent: Newest tokens that never compete; None for what the method protects.
        prefill: "once" evicts at a prompt's end, "chunks" also inside it, "auto" inside it where it is longer than the
            pool of blocks.
        chunk: Tokens between two events inside a prompt.
        force: Run on a version of vLLM that was not tested.
        **options: Options of the method.

    Raises:
        OptionError: an unknown method or option, or a method that cannot act on blocks.
        BudgetError: a budget that cannot be parsed.

    Example:
        >>> sorted(engine_args("h2o", 1024))
        ['additional_config', 'logits_processors', 'scheduler_cls', 'worker_cls']
    """
    given: dict[str, Any] = {"method": method, "budget": budget, "prefill": prefill, "chunk": chunk}
    if recent is not None:
        given["recent"] = recent
    if force:
        given["force"] = True
    if options:
        given["options"] = options
    from millpond_vllm.platform_classes import engine_arguments  # vLLM loads this package where it is not asked for

    return engine_arguments(given)
