"""Draws in Triton against torch's: on the GPU if there is one, else in the interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

# skips this file where Triton is missing, before the kernels need it
from tests.helpers.kernels.triton_make import DEVICE, quick, seeds

# isort: split
from millpond.engine.sampling.token_choice import CANDIDATES, TokenChoice, choose
from millpond.kernels.gpu import draw as draws

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter: int64 wraps around


def choice_of(top_k: list[int], top_p: list[float], min_p: list[float], seed: int, temperature: float) -> TokenChoice:
    rows = len(top_k)
    return TokenChoice(
        torch.full((rows,), temperature),
        torch.tensor(top_k),
        torch.tensor(top_p, dtype=torch.float64),
        torch.tensor(min_p),
        torch.ones(rows, dtype=torch.float64),
        torch.randint(-(2**63), 2**63 - 1, (rows,), generator=torch.Generator().manual_seed(seed)),
    )


def in_triton(logits: Tensor, choice: TokenChoice) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILLPOND_KERNELS", "gpu")
        return choose(logits.to(DEVICE), choice).tolist()


def in_torch(logits: Tensor, choice: TokenChoice) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILLPOND_KERNELS", "reference")
        return choose(logits, choice).tolist()


@quick
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from([0, 0, 1, 2, 7, 40, 299, 300, 5000]),
            st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.9, 0.99999]),
            st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
        ),
        min_size=1,
        max_size=8,
    ),
    size=st.sampled_from([1, 2, 40, 300, draws.BLOCK + 3]),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 8.0]),
    seed=seeds,
)
def test_the_tokens_are_those_of_torch(
    rows: list[tuple[int, float, float]], size: int, temperature: float, seed: int
) -> None:
    top_k, top_p, min_p = (list(column) for column in zip(*rows, strict=True))
    logits = 3 * torch.randn(len(rows), size, generator=torch.Generator().manual_seed(seed))
    choice = choice_of(top_k, top_p, min_p, seed, temperature)
    assert in_triton(logits, choice) == in_torch(logits, choice)


def test_rows_that_keep_more_than_the_short_cut_reads() -> None:
    """Flat rows of which torch has to sort everything, and rows with ties at the limit."""
    size, n = 3 * CANDIDATES, 4
    logits = torch.cat([0.01 * torch.randn(n, size), torch.randint(0, 3, (n, size)).float()])
    choice = choice_of([0, 0, 400, CANDIDATES + 1] * 2, [0.9, 0.999, 0.7, 1.0] * 2, [0.0] * 8, 5, 1.0)
    assert in_triton(logits, choice) == in_torch(logits, choice)


def test_typical_rows_among_others() -> None:
    logits = 2 * torch.randn(6, 400)
    choice = choice_of([0, 30, 0, 5, 0, 0], [1.0, 0.9, 0.8, 1.0, 1.0, 0.5], [0.0, 0.0, 0.1, 0.0, 0.0, 0.0], 8, 1.0)
    choice.typical_p[[0, 1, 2]] = torch.tensor([0.3, 0.9, 0.5], dtype=torch.float64)
    assert in_triton(logits, choice) == in_torch(logits, choice)


def test_a_row_of_nan_gets_a_token_of_the_vocabulary() -> None:
    logits = torch.randn(3, 50)
    logits[1] = torch.nan
    choice = choice_of([0, 5, 0], [1.0, 0.9, 0.5], [0.0, 0.1, 0.0], 3, 1.0)
    drawn = in_triton(logits, choice)
    assert all(0 <= token < 50 for token in drawn)
    assert [drawn[0], drawn[2]] == [
        in_torch(logits[[0]], choice[torch.tensor([0])])[0],
        in_torch(logits[[2]], choice[torch.tensor([2])])[0],
    ]
