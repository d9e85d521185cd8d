"""The command line: thin, with its options taken from the registry."""


def main() -> None:
    """Run the command line."""
    from millpond.cli.app import app

    app(prog_name="millpond")
