"""Prefill in blocks of torch operations against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.kernels import blockwise, reference
from millpond.kernels.decode_rules import Reduce
from tests.helpers.examples import examples
from tests.helpers.kernels.args import prefill_args
from tests.helpers.kernels.prompts import Prompt, prompts

PROMPTS = prompts([torch.float32, torch.float64, torch.bfloat16])


@given(prompt=PROMPTS, colsum=st.sampled_from([None, *Reduce]))
@settings(max_examples=examples(80))
def test_prefill_equals_reference(prompt: Prompt, colsum: Reduce | None) -> None:
    prompt.check(prompt.run(reference, colsum), prompt.run(blockwise, colsum))


@pytest.mark.parametrize("how", list(Reduce))
def test_column_sums_conserve_mass(how: Reduce) -> None:
    q, k = torch.randn(4, 200, 8), torch.randn(2, 200, 8)
    _, _, sums = blockwise.prefill(prefill_args(q, k, k, torch.arange(200, dtype=torch.int32), scale=0.3, colsum=how))
    assert sums is not None
    total = sums.sum(1)
    if how is not Reduce.MAX:
        expected = 200.0 * (2 if how is Reduce.SUM else 1)
        torch.testing.assert_close(total, torch.full_like(total, expected), rtol=1e-4, atol=0)
    else:
        assert (total >= 200).all()
