"""A few new tokens of each sequence, decoded one after another: see `OpSet.decode_rows`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from millpond.kernels.args import AttendOutput, DecodeArgs, DecodeOutput, DecodeRowsArgs, StepRegions
from millpond.kernels.decode_rules import KEEP_ALL, UNBOUNDED
from millpond.kernels.eager.packed_decode import decode


def one_by_one(args: DecodeRowsArgs, step: Callable[[DecodeArgs], DecodeOutput]) -> AttendOutput:
    """A decoding step for each column."""
    caps = torch.full_like(args.regions.lens, UNBOUNDED)
    recent = torch.zeros_like(caps)
    outs, sums = [], []
    for column in range(args.q.shape[2]):
        regions = StepRegions(args.regions, caps, recent, args.q_pos[:, column].contiguous(), KEEP_ALL, args.shape)
        q, k, v = (t[:, :, column] for t in (args.q, args.k_new, args.v_new))
        out, lse, _ = step(DecodeArgs(q, k, v, regions))
        outs.append(out)
        sums.append(lse)
    return AttendOutput(torch.stack(outs, 2), torch.stack(sums, 2))


def decode_rows(args: DecodeRowsArgs) -> AttendOutput:
    return one_by_one(args, decode)
