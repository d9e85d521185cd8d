"""Arguments and results of the ops, grouped by file; the one place for shapes, dtypes and units."""

from millpond.kernels.args.after_step import HeadRuleArgs, MergeArgs
from millpond.kernels.args.attend import AttendArgs, AttendOutput
from millpond.kernels.args.decode import DecodeArgs, DecodeOutput
from millpond.kernels.args.decode_rows import DecodeRowsArgs
from millpond.kernels.args.entries import EntryRows, PaddedEntries
from millpond.kernels.args.prefill import PrefillArgs, PrefillOutput, WindowSignalArgs
from millpond.kernels.args.regions import PageRegions, StepRegions
from millpond.kernels.args.shape import AttentionShape

__all__ = [
    "AttendArgs",
    "AttendOutput",
    "AttentionShape",
    "DecodeArgs",
    "DecodeOutput",
    "DecodeRowsArgs",
    "EntryRows",
    "HeadRuleArgs",
    "MergeArgs",
    "PaddedEntries",
    "PageRegions",
    "PrefillArgs",
    "PrefillOutput",
    "StepRegions",
    "WindowSignalArgs",
]
