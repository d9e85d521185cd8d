"""One thread per process: the models are tiny, and several test processes share the machine.

Without a GPU the Triton kernels run in the interpreter of Triton, which must be chosen before its first import; parts
of torch, which the package brings in, import it. Examples of Hypothesis have no deadline: a busy machine is no bug.
"""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.helpers.cache_argument import use_new_names
from tests.helpers.random_heads import random_heads_where_none_are

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)
settings.register_profile("millpond", deadline=None)
settings.load_profile("millpond")
use_new_names()


@pytest.fixture(scope="session", autouse=True)
def _heads() -> Iterator[None]:
    with random_heads_where_none_are():
        yield
