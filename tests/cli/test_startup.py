"""What needs no model loads no torch: help, errors in options, and the list of models are there at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numpy", "scipy", "matplotlib", "fastapi")
CODE = f"""
import sys
from millpond.cli.app import app
try:
    app(sys.argv[1:], standalone_mode=False)
except BaseException as error:
    print(type(error).__name__)
print("heavy:", sorted(set(sys.modules) & set({HEAVY!r})))
"""


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("--help", "memory budget"),
        ("generate --help", "--budget"),
        ("serve --help", "--kv-memory"),
        ("bench engines --help", "Usage"),
        ("generate --nope", "NoSuchOption"),
        ("models", "smollm2-135m"),
    ],
)
def test_no_torch_is_loaded(command: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, *command.split()],
        capture_output=True,
        text=True,
        check=True,
        env={"COLUMNS": "200", "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
    )
    assert said in done.stdout
    assert done.stdout.splitlines()[-1] == "heavy: []"
