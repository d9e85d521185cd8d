"""`python -m millpond` is the same as `millpond`."""

from millpond.cli import main

main()
