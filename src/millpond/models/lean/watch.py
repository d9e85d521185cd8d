"""Detection of modules that were replaced or changed since a native pass was prepared."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from inspect import unwrap
from itertools import chain
from operator import attrgetter, is_, itemgetter
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

_MARK = "computes_the_same"

_PARAMETERS, _MODULES, _TRAINING = itemgetter("_parameters"), itemgetter("_modules"), itemgetter("training")
_FORWARD = attrgetter("forward")
_HOOKS = itemgetter("_forward_hooks", "_forward_pre_hooks")
#: Hooks on all modules there are.
_GLOBAL_HOOKS = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
#: Attributes of modules that are no settings; the sizes of a linear layer follow from its weight.
_NO_SETTINGS = frozenset(vars(nn.Module())) | {"forward", "in_features", "out_features", "_is_hf_initialized"}


def mark_the_same(forward: Callable[..., Any]) -> None:
    """Mark a function, put on a module as its forward, as computing what its class does."""
    setattr(forward, _MARK, True)


def own_forward(module: nn.Module) -> Any:
    """Return the forward assigned to this one module, or None.

    None stands also for a forward that computes what the class does.
    """
    return _foreign(vars(module).get("forward"))


def _foreign(forward: Any) -> Any:
    return None if getattr(getattr(forward, "__func__", None), _MARK, False) else forward


def _nothing() -> None:
    """Stand in for a reference to a module."""


class Watch:
    """Modules that a pass does not call: identity, settings and weights.

    They are checked at every pass, quickly. Numbers written into a weight are not noticed: who reads it in place sees
    them.

    Args:
        modules: Modules that the pass does not call. Those of them whose settings count are `settings`; left out, all.
        around: Module that holds them and is called; it may be another one no more, nor hold others. It is held weakly.
        settings: Modules whose settings count; None for all.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        *,
        around: nn.Module | None = None,
        settings: Iterable[nn.Module] | None = None,
    ) -> None:
        self._modules = list(modules)
        self._dicts = [vars(m) for m in self._modules]
        self._hooks = [hooks for attributes in self._dicts for hooks in _HOOKS(attributes)]
        self._forwards = [attributes.get("forward") for attributes in self._dicts]
        self._foreign = [_foreign(forward) for forward in self._forwards]
        self._holders = [vars(m) for m in self._modules if m._parameters]
        self._parents = [vars(m) for m in self._modules if m._modules]
        self._around = _nothing if around is None else weakref.ref(around)
        self._inside: dict[str, Any] = {} if around is None else around._modules
        self._kinds = list({type(m) for m in self._modules})
        self._owners, self._names = _settings_of(self._modules if settings is None else settings, self._kinds)
        self._was = self._who()
        self._weights = [w for holder in self._holders for w in _PARAMETERS(holder).values() if w is not None]
        self._memory = self._where()

    def unchanged(self) -> bool:
        """Whether the modules have no hooks and are the same."""
        return self.quiet() and self.same()

    def quiet(self) -> bool:
        """Whether no module has a hook or trains."""
        return not (any(self._hooks) or any(_GLOBAL_HOOKS) or any(map(_TRAINING, self._dicts)))

    def same(self) -> bool:
        """Whether no module, forward, setting or weight was replaced, added, removed or moved."""
        now = self._who()
        return (
            len(now) == len(self._was)
            and all(map(is_, now, self._was))
            and self._where() == self._memory
            and self._forwards_are_the_same()
        )

    def _who(self) -> list[Any]:
        """Return all that is compared by identity."""
        parameters, modules = list(map(_PARAMETERS, self._holders)), list(map(_MODULES, self._parents))
        modules.append(self._inside)
        return [
            type(self._around()),
            *map(type, self._modules),
            *map(_FORWARD, self._kinds),
            *parameters,
            *modules,
            *chain.from_iterable(map(dict.values, parameters)),
            *chain.from_iterable(map(dict.values, modules)),
            *map(dict.get, self._owners, self._names),
        ]

    def _where(self) -> list[Any]:
        """Return the addresses of the weights, and how to read them."""
        return [read(weight) for read in _MEMORY for weight in self._weights]

    def _forwards_are_the_same(self) -> bool:
        now = [attributes.get("forward") for attributes in self._dicts]
        if now == self._forwards:
            return True
        if not all(map(is_, map(_foreign, now), self._foreign)):
            return False
        self._forwards = now
        return True


#: A weight of as many numbers in a row, of one dtype at one address, is the same weight.
_MEMORY: tuple[Callable[[Tensor], Any], ...] = (
    Tensor.data_ptr,
    Tensor.numel,
    Tensor.is_contiguous,
    attrgetter("dtype"),
)


def _settings_of(counted: Iterable[nn.Module], kinds: Iterable[type[nn.Module]]) -> tuple[list[Any], list[str]]:
    """Return owners and names of settings, and functions that forwards of `kinds` call."""
    owners: list[Any] = []
    names: list[str] = []
    for module in counted:
        own_names = [name for name in vars(module) if name not in _NO_SETTINGS]
        owners += [vars(module)] * len(own_names)
        names += own_names
    for kind in kinds:
        forward: Any = unwrap(kind.forward)
        called = [n for n in forward.__code__.co_names if isinstance(forward.__globals__.get(n), FunctionType)]
        owners += [forward.__globals__] * len(called)
        names += called
    return owners, names
