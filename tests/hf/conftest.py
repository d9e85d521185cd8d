import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """The models are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
