import os

# before vLLM is imported: one process, a small pool, no network, threads where the system puts them
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads wait for each other longer than the small model computes

import pytest
from vllm_helpers.models import tiny_llama


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Path of a small Llama: 3 layers, 4 query heads, 2 KV heads."""
    return tiny_llama(tmp_path_factory.mktemp("tiny"))
