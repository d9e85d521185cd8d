"""The command line: thin, with its options taken from the registry. Needs the extra `cli`."""

import sys

from millpond.cpu_limit import limit_openmp
from millpond.install_command import install_command


def main() -> None:
    """Run the command line, with as many threads as the process may use: see `limit_openmp`."""
    limit_openmp()
    try:
        from millpond.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"millpond's command line needs {error.name}; install it with: {install_command('cli')}")

    app(prog_name="millpond")
