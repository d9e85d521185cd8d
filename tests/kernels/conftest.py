"""Without a GPU the Triton kernels run in the interpreter of Triton, which must be chosen before its first import."""

from __future__ import annotations

import os
import sys

import torch

if "triton" not in sys.modules and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
