"""A plan in sentences: how a block runs, how fast it is predicted to be, what bounds it, and what would be faster."""

from __future__ import annotations

from collections.abc import Iterator

from millpond.engine.offload.plan import DISK, Plan


def sentences(plan: Plan) -> Iterator[str]:
    """What a plan that was searched for comes to, one line each."""
    found = plan.prediction
    assert found is not None, "a plan that was searched for"
    disk = plan.share("weights", DISK)
    read = f", {disk:.0%} of the layers read in every sweep through {plan.slots} slots" if disk else ""
    ends = ", embeddings and head read from the disk" if plan.ends == DISK else ""
    yield (
        f"block: {plan.block} sequences, micro-batch {plan.micro_batch}, {plan.prompt_rows} prompt tokens a sweep, "
        f"schedule {plan.schedule}{read}{ends}"
    )
    yield (
        f"predicted: prefill {found.prefill_tokens_per_s:,.1f} tok/s (bound by {found.prefill_bound}), decode "
        f"{found.decode_tokens_per_s:,.1f} tok/s (bound by {found.decode_bound})"
    )
    yield f"           {found.tokens_per_s:,.1f} new tokens/s over a block of {found.seconds:,.1f} s"
    for name, rate in found.what_if.items():
        yield f"with {name}: {rate:,.1f} tok/s ({rate / found.tokens_per_s - 1:+.0%})"
