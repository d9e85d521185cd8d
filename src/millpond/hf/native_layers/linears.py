"""Linear layers on a CPU, limited by memory bandwidth alone."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor, nn

from millpond.hf.native_layers.forward_override import ForwardOverride
from millpond.kernels import native
from millpond.kernels.backends import NATIVE_DTYPES
from millpond.kernels.linear import linear
from millpond.models.lean.watch import own_forward

#: Smaller weights stay with torch: there the call costs more than the reading (measured on the bundled model).
LEAST_BYTES = 2**19

#: Models whose weights come to less stay in pages of the usual size.
LEAST_ADVISED = 2**25

#: Layers whose weights lie in huge pages, as far as the system gave them.
_advised: weakref.WeakSet[nn.Linear] = weakref.WeakSet()


def forward(self: nn.Linear, input: Tensor) -> Tensor:
    """Stands in for torch.nn.Linear.forward, as long as the module has that of its class."""
    kind = type(self)
    if kind.forward is not _TORCHS:
        return kind.forward(self, input)
    return linear(input, self.weight, self.bias)


_TORCHS = nn.Linear.forward
STAND_IN = ForwardOverride(forward)


def use_native_linears(model: nn.Module) -> Callable[[], None]:
    """Let the model's linear layers on the CPU multiply with `kernels.linear`; what torch does best stays with torch.

    Weights are read when they are needed; those of larger models move to huge pages once, where the system has them.
    A module of a subclass, or with a forward of its own, is not replaced.

    Returns:
        What undoes it, once no other caller needs it.
    """
    ours = [module for module in model.modules() if type(module) is nn.Linear and _fits(module)]
    new = [module for module in ours if module not in _advised]
    if sum(module.weight.nbytes for module in new) >= LEAST_ADVISED:
        native.use_huge_pages(module.weight for module in new)
        _advised.update(new)
    return STAND_IN.begin(ours)


def _fits(module: nn.Linear) -> bool:
    """Whether the layer is of a kind that `kernels.linear` reads fast, and has torch's forward or already ours."""
    weight = module.weight
    return (
        own_forward(module) is None and weight.is_cpu and weight.dtype in NATIVE_DTYPES and weight.nbytes >= LEAST_BYTES
    )
