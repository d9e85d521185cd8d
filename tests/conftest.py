"""One thread per process: the models are tiny, and several test processes share the machine."""

import torch

torch.set_num_threads(1)
