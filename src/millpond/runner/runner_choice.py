"""Runner: which layers run a model, and settings that need our own."""

from __future__ import annotations

from typing import Literal

from millpond.errors import OptionError

#: Who passes rows through the weights: ours, the model's modules, or ours wherever it gives what the modules give.
Runner = Literal["auto", "lean", "modules"]


def check_own_layers(runner: Runner, native_layers: bool, **needing: object) -> None:
    """Check that settings that need Millpond's own layers have them.

    Args:
        runner: See `PackedModel`.
        native_layers: See `PackedModel`.
        **needing: Settings that need our own layers; None or False: they are off.

    Raises:
        OptionError: one of them is on, and the model's own modules should run.
    """
    if native_layers and runner != "modules":
        return
    for name, value in needing.items():
        if value not in (None, False):
            raise OptionError(
                f"{name}={value!r} runs in our own layers, which runner='modules' and native_layers=False leave out; "
                "leave one of the two out"
            )
