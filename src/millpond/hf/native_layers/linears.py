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
MIN_BYTES = 2**19

#: Models with fewer bytes of weights stay in pages of the usual size.
MIN_ADVISED = 2**25

#: Layers whose weights are in huge pages, if the system has given some.
_advised: weakref.WeakSet[nn.Linear] = weakref.WeakSet()


def forward(self: nn.Linear, input: Tensor) -> Tensor:
    """Replace torch.nn.Linear.forward, as long as the module has that of its class."""
    module_type = type(self)
    if module_type.forward is not _TORCH_FORWARD:
        return module_type.forward(self, input)
    return linear(input, self.weight, self.bias)


_TORCH_FORWARD = nn.Linear.forward
STAND_IN = ForwardOverride(forward)


def use_native_linears(model: nn.Module) -> Callable[[], None]:
    """Let the model's linear layers on the CPU multiply with `kernels.linear`.

    Those that torch computes best stay with torch. Weights are read when they are needed; those of larger models move
    to huge pages once, if the system has them. A module of a subclass, or with a forward of its own, is not replaced.

    Returns:
        Function that undoes it, once no other caller needs it.
    """
    replaced = [module for module in model.modules() if type(module) is nn.Linear and _fits(module)]
    new = [module for module in replaced if module not in _advised]
    if sum(module.weight.nbytes for module in new) >= MIN_ADVISED:
        native.use_huge_pages(module.weight for module in new)
        _advised.update(new)
    return STAND_IN.begin(replaced)


def _fits(module: nn.Linear) -> bool:
    """Whether `kernels.linear` reads the layer fast and its forward is torch's or ours."""
    weight = module.weight
    return (
        own_forward(module) is None and weight.is_cpu and weight.dtype in NATIVE_DTYPES and weight.nbytes >= MIN_BYTES
    )
