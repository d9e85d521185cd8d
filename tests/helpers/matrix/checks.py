"""The checks of the matrix by name, for test files that run methods through it in settings of their own."""

from __future__ import annotations

from collections.abc import Callable

from tests.matrix import test_invariance as matrix

CHECKS: dict[str, Callable[..., None]] = {
    "batch": matrix.test_batch_and_padding,
    "ratio": matrix.test_ratio_is_of_each_sequence_alone,
    "peak": matrix.test_chunks_with_eviction_keep_the_peak_low,
    "reset": matrix.test_a_second_prompt_equals_a_fresh_cache,
    "sizes": matrix.test_sizes_at_every_step,
    "bytes": matrix.test_bytes_are_real_and_freed,
    "everything": matrix.test_budget_of_everything_equals_full,
    "first token": matrix.test_first_token_is_exact,
    "pages": lambda method: matrix.test_page_size(method, 4),
    "chunks": lambda method: matrix.test_chunks_without_eviction_between_them(method, 7),
    "second turn": lambda method: matrix.test_second_turn(method, "gqa"),
    "second turn, mha": lambda method: matrix.test_second_turn(method, "mha"),
    "turn of one": lambda method: matrix.test_a_turn_of_one_token_beside_a_longer_one(method, False),
}
