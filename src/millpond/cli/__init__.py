"""The command line: thin, with its options taken from the registry. Needs the extra `cli`.

Imports: bench, budget, cache, codec, engine, errors, evals, hf, markdown, methods, models, optional, presets, registry,
server, train.
"""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from millpond.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"millpond's command line needs {error.name}; install it with: pip install 'millpond[cli]'")

    app(prog_name="millpond")
