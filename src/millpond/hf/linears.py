"""use_native_linears: while a model decodes on a CPU, read its weights at the speed of memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType

from torch import Tensor, nn

from millpond.kernels import native, ops

#: Smaller weights stay with torch: there the call costs more than the reading (measured on the bundled model).
LEAST_BYTES = 2**19

#: Models whose weights come to less stay in pages of the usual size.
LEAST_ADVISED = 2**25

#: Layers whose weights lie in huge pages, as far as the system gave them.
_advised: weakref.WeakSet[nn.Linear] = weakref.WeakSet()
#: Layers that are switched, and by how many callers.
_switched: weakref.WeakKeyDictionary[nn.Linear, int] = weakref.WeakKeyDictionary()


def forward(self: nn.Linear, input: Tensor) -> Tensor:
    """Stands in for torch.nn.Linear.forward. Of that name, so that a pickled model comes back with torch's own."""
    return ops.linear(input, self.weight, self.bias)


def use_native_linears(model: nn.Module) -> Callable[[], None]:
    """Let the model's linear layers on the CPU multiply few rows (decoding) with `ops.linear`; torch does the rest.

    Only `forward` is replaced: hooks go on, weights are read when they are needed, the state dict stays. A module of
    a subclass, or with a forward of its own, is left alone.

    Returns:
        What undoes it, once no other caller needs it.
    """
    ours = [module for module in model.modules() if type(module) is nn.Linear and _fits(module)]
    for module in ours:
        _switched[module] = _switched.get(module, 0) + 1
        module.forward = MethodType(forward, module)  # type: ignore[method-assign]
    layers = [weakref.ref(module) for module in ours]
    new = [module for module in ours if module not in _advised]
    if sum(module.weight.nbytes for module in new) >= LEAST_ADVISED:
        native.use_huge_pages(module.weight for module in new)
        _advised.update(new)

    def undo() -> None:
        for module in filter(None, (layer() for layer in layers)):
            users = _switched.pop(module, 0)
            if users > 1:
                _switched[module] = users - 1
            elif is_ours(module):
                del module.forward
        layers.clear()

    return undo


def is_ours(module: nn.Module) -> bool:
    """Whether the layer is switched."""
    return getattr(module.__dict__.get("forward"), "__func__", None) is forward


def _fits(module: nn.Linear) -> bool:
    """Whether the layer is of a kind that `ops.linear` reads fast, and has torch's forward or already ours."""
    stock = "forward" not in module.__dict__ or is_ours(module)
    weight = module.weight
    return stock and weight.is_cpu and weight.dtype in ops.NATIVE_DTYPES and weight.nbytes >= LEAST_BYTES
