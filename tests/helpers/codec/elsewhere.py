"""A second device made of the CPU: its tensors hold numbers, and say that they lie elsewhere.

What a GPU refuses is refused here: an operation on tensors of both places, a host's view of the memory (`numpy`).
So is what a GPU would do in silence: an index on the host. Numbers without axes may meet tensors of any place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

#: How a tensor says where it lies; torch knows this device on every machine, and has no memory there.
ELSEWHERE = torch.device("meta")
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class Far(Tensor):
    """A tensor elsewhere. near: its numbers."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> Far:
        far: Far = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            near.shape,
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            device=ELSEWHERE,
        )
        far.near = near
        return far

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Far({self.near})"

    def data_ptr(self) -> int:
        """Only an address: who follows it on the host is not noticed."""
        return self.near.data_ptr()

    def tolist(self) -> Any:
        """As of a tensor on a GPU, which is copied for it."""
        return self.near.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Refused.

        Raises:
            TypeError: always.
        """
        raise TypeError("a tensor elsewhere has no numpy array; call .cpu() first")

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, args, kwargs or {})


class Machine(TorchDispatchMode):
    """While entered, tensors are made where the caller says."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, args, kwargs or {})


def _run(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
    far = any(isinstance(t, Far) for t in tensors)
    if far and op not in _COPIES:
        near = [tuple(t.shape) for t in tensors if not isinstance(t, Far) and t.ndim]
        assert not near, f"{op} of tensors elsewhere and of such on the host, of shapes {near}"
    wanted = kwargs.get("device")
    if wanted is not None:
        far = torch.device(wanted) == ELSEWHERE
        kwargs = {**kwargs, "device": torch.device("cpu")}
    out = op(*tree_map(_near, args), **tree_map(_near, kwargs))
    if op._schema.is_mutable and op._schema.name.endswith("_"):  # in place
        return args[0]
    return tree_map(lambda t: Far(t) if far and isinstance(t, Tensor) else t, out)


def _near(x: Any) -> Any:
    return x.near if isinstance(x, Far) else x


def to_far(x: Tensor) -> Tensor:
    """The tensor, elsewhere."""
    return Far(x.clone())


@contextmanager
def elsewhere() -> Iterator[None]:
    """Tensors are made where the caller says, and `.to(ELSEWHERE)` moves them."""
    with torch.inference_mode(False), torch.no_grad(), Machine():
        yield
