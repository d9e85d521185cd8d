"""Sums beside blocks in Triton against the reference: on the GPU if there is one, else in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

# skips this file where Triton is missing, before the kernels need it
from tests.helpers.kernels.triton_make import DEVICE, DTYPES, quick, seeds

# isort: split
from millpond.kernels import gpu, reference
from millpond.kernels.decode_rules import Reduce
from tests.helpers.kernels.blocks import block_sums_args


@quick
@given(
    kind=st.sampled_from(("plain", "turned", "pairs", "backwards")),
    lens=st.lists(st.sampled_from([0, 1, 31, 32, 33, 100]), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (2, 3), (1, 7)]),
    dim=st.sampled_from([16, 40, 80]),
    block=st.sampled_from([16, 48]),
    dtype=st.sampled_from(DTYPES),
    reduce=st.sampled_from(Reduce),
    softcap=st.sampled_from([0.0, 2.0]),
    sinks=st.booleans(),
    seed=seeds,
)
def test_equals_the_reference(kind: str, lens: list[int], **options: Any) -> None:
    args = block_sums_args(kind, lens, decay=0.9, device=str(DEVICE), **options)
    found, wanted = args.sums.clone(), args.sums.clone()
    gpu.block_sums(replace(args, sums=found))
    reference.block_sums(replace(args, sums=wanted))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
