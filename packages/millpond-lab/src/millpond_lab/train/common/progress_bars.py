"""Suppression of the progress bars of transformers during a training with its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def no_bars() -> Iterator[None]:
    """No bars inside; the user's own setting comes back."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
