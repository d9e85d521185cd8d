"""Commands that take the arguments of `vllm serve` besides their own."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from millpond_vllm.cli.vllm_arguments import split_arguments


class VllmCommand(TyperCommand):
    """A command that keeps its own options and leaves all others, in their order, in the context."""

    takes: tuple[str, ...] = ("MODEL",)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse our own options."""
        flags = {flag: not getattr(one, "is_flag", False) for one in self.get_params(ctx) for flag in one.opts}
        own, rest = split_arguments(args, flags)
        super().parse_args(ctx, own)
        ctx.args = rest
        return rest

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return what the line of usage shows."""
        return [*self.takes, *super().collect_usage_pieces(ctx), "[OPTIONS OF VLLM SERVE]"]


class TrialCommand(VllmCommand):
    """The same behind a log of traffic."""

    takes = ("LOG", "MODEL")
