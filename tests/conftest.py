"""One thread per process: the models are tiny, and several test processes share the machine.

Without a GPU the Triton kernels run in the interpreter of Triton, which must be chosen before its first import; parts
of torch, which the package brings in, import it.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)
