"""The fixture itself: what every hand-worked case below rests on."""

import torch

from millpond.kernels import ops
from millpond.kernels.decode_rules import Reduce
from tests.helpers.kernels.args import prefill_args
from tests.helpers.papers.fixture import COLUMN_SUMS, LOGITS, ROWS, N


def test_rows_and_column_sums() -> None:
    q, k = LOGITS[None], torch.eye(N, dtype=torch.float64)[None]
    out, _, sums = ops.prefill(prefill_args(q, k, k, torch.arange(N, dtype=torch.int32), scale=1.0, colsum=Reduce.MEAN))
    for i, row in enumerate(ROWS):
        assert torch.allclose(out[0, i, : i + 1], torch.tensor(row, dtype=torch.float64), atol=1e-6)
    assert sums is not None
    assert torch.allclose(sums[0].double(), torch.tensor(COLUMN_SUMS, dtype=torch.float64), atol=2e-6)
    assert abs(float(sums.sum()) - N) < 1e-6
