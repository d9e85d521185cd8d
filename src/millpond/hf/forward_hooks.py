"""Hooks on the forward passes of the model that a cache was made for, so that no other model can use it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from millpond.errors import CacheMismatchError, OptionError
from millpond.hf.attention import begin_pass, break_off, end_pass
from millpond.models.cache_argument import CACHE_ARGUMENT, CACHE_ARGUMENTS, cache_among, check_one_cache, with_cache


class ForwardHooks:
    """Hooks on a model and its decoder.

    They refer to the cache only weakly, so that a forgotten cache can be collected.

    Args:
        cache: Cache to look for among the arguments.
        modules: Modules whose calls begin or belong to a pass: the model and the decoders inside it.

    Attributes:
        answer_begin: Columns from which on a running `generate` passes tokens that it made, none a pad; None where that
            is not known.
    """

    def __init__(self, cache: Any, modules: Sequence[nn.Module]) -> None:
        self._cache = weakref.ref(cache)
        self._model = type(modules[0]).__name__
        self.answer_begin: int | None = None
        self._running: list[nn.Module] = []
        self._thread = threading.current_thread()  # that of the running pass
        self._hooks = [module.register_forward_pre_hook(self._enter, with_kwargs=True) for module in modules]
        self._hooks += [
            module.register_forward_hook(self._leave, with_kwargs=True, always_call=True) for module in modules
        ]

    @property
    def running(self) -> bool:
        """Whether this thread is in a pass of the model that carries the cache."""
        return bool(self._running) and self._thread is threading.current_thread()

    def check_running(self) -> None:
        """Check that the caller is a pass of the model that the cache was made for.

        Raises:
            CacheMismatchError: the caller is not the model that the cache was made for.
        """
        if not self._hooks:
            raise CacheMismatchError("this cache is closed; make another one with compress()")
        if not self.running:
            raise CacheMismatchError(
                f"this cache was made for one {self._model} and met another model (or a part of it, called on its "
                "own); make a cache for each model with compress()"
            )

    def check_free(self) -> None:
        """Check that no other thread runs a pass with the cache.

        Raises:
            CacheMismatchError: another thread runs a pass with the cache.
        """
        if self._running and self._thread is not threading.current_thread() and self._thread.is_alive():
            raise CacheMismatchError(
                f"this cache is in a pass of the thread {self._thread.name!r}; a cache serves one generate() at a "
                "time: make one cache per thread with compress(), they may share a model"
            )

    def close(self) -> None:
        """Remove the hooks."""
        while self._hooks:
            self._hooks.pop().remove()

    def _carries(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        cache = self._cache()
        given = (*args, *(kwargs.get(name) for name in CACHE_ARGUMENTS))
        return cache is not None and any(one is cache for one in given)

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Begin the pass, or continue it, and pass the cache by the name that the model knows."""
        if not self._carries(args, kwargs):
            return None
        check_one_cache(kwargs)
        self.check_free()
        if self._thread is not threading.current_thread() or module in self._running:
            self._running.clear()  # a pass that was interrupted from outside
        if not self._running:
            self._thread = threading.current_thread()
            self._begin(module, args, kwargs)
            begin_pass()
        self._running.append(module)
        cache, named = cache_among(kwargs), [name for name in CACHE_ARGUMENTS if name in kwargs]
        return None if cache is None or named == [CACHE_ARGUMENT] else (args, with_cache(kwargs, cache))

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        output_attentions = kwargs.get("output_attentions")
        if getattr(module.config, "output_attentions", False) if output_attentions is None else output_attentions:
            raise OptionError(
                "output_attentions=True cannot be served: attention weights are never stored with a Millpond cache; "
                "cache.positions(layer) lists the kept positions"
            )
        if kwargs.get("use_cache") is False:
            raise OptionError(
                "use_cache=False with a cache: a pass that is given a Millpond cache writes to it; leave one of the "
                "two out"
            )
        keep = kwargs.get("logits_to_keep", 0)
        cache = self._cache()
        assert cache is not None, "a pass that carries the cache keeps it alive"
        ids = kwargs.get("input_ids", args[0] if args else None)
        tokens = ids if isinstance(ids, Tensor) else kwargs.get("inputs_embeds")
        cache.begin_pass(
            length=tokens.shape[1] if isinstance(tokens, Tensor) and tokens.ndim > 1 else 1,
            draft=keep - 1 if isinstance(keep, int) and keep > 0 else None,
            ids=ids if isinstance(ids, Tensor) and ids.ndim == 2 else None,
        )

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not self._carries(args, kwargs) or self._thread is not threading.current_thread():
            return  # another pass of this model, on another cache or in another thread
        if not self._running or self._running[-1] is not module:
            return
        self._running.pop()
        if output is None:  # torch calls this hook after an exception too, without an output
            break_off()
        elif not self._running:
            end_pass()
            cache = self._cache()
            assert cache is not None, "a pass that carries the cache keeps it alive"
            cache.end_pass()
