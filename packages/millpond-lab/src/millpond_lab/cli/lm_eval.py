"""`millpond lm-eval`: EleutherAI's command line, with `millpond` among its models."""

from __future__ import annotations

import sys
from typing import Any

import typer

from millpond.optional import require

#: Of lm-eval's own; everything else is an evaluation.
OTHER_COMMANDS = {"ls", "validate", "-h", "--help"}


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness with Millpond as the model; all arguments are lm-eval's.

    For example: millpond lm-eval --model_args pretrained=pond-recall,method=h2o,budget=20% --tasks lambada_openai
    """
    require("lm_eval", "lm-eval", "millpond lm-eval")
    import torch
    from lm_eval.__main__ import cli_evaluate

    import millpond_lab.evals.adapters.lm_eval  # noqa: F401  # registers the model

    before = sys.argv
    sys.argv = ["millpond lm-eval", *with_device(with_model(context.args), torch.cuda.is_available())]
    try:
        run: Any = cli_evaluate
        run()
    finally:
        sys.argv = before


def with_model(arguments: list[str]) -> list[str]:
    """The arguments, naming the model `millpond` where an evaluation names none.

    Example:
        >>> with_model(["--tasks", "piqa"])
        ['--model', 'millpond', '--tasks', 'piqa']
    """
    named = any(a in ("--model", "-M", "--config", "-C") or a.startswith(("--model=", "--config=")) for a in arguments)
    if not arguments or arguments[0] in OTHER_COMMANDS or named:
        return arguments
    head = arguments[:1] if arguments[0] == "run" else []
    return [*head, "--model", "millpond", *arguments[len(head) :]]


def with_device(arguments: list[str], has_cuda: bool) -> list[str]:
    """The arguments, naming the CPU where an evaluation names no device and lm-eval's own, CUDA, is not there.

    Example:
        >>> with_device(["--tasks", "piqa"], has_cuda=False)
        ['--tasks', 'piqa', '--device', 'cpu']
    """
    named = any(a in ("--device", "--config", "-C") or a.startswith(("--device=", "--config=")) for a in arguments)
    if has_cuda or named or not arguments or arguments[0] in OTHER_COMMANDS:
        return arguments
    return [*arguments, "--device", "cpu"]
