"""`generate` inside a cache's `with` block: checks that a prompt continues the text, and drafts after it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel

from millpond.errors import CacheMismatchError, OptionError
from millpond.hf.prompt_parts import check_uncut, part_of_generate
from millpond.models.cache_argument import cache_among, check_one_cache, with_cache

if TYPE_CHECKING:
    from millpond.hf.protocol import LayerCaches


def begin_behind_prompt(generator: Any) -> Any:
    """Return the candidate generator, whose first draft is made but dropped.

    Its state needs that draft. A generator that needs the result of the model's first pass stays as it is.
    """
    if getattr(generator, "requires_model_outputs", False):
        return generator
    make_candidates = generator.get_candidates

    def prompt_alone(input_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        make_candidates(input_ids, *args, **kwargs)
        del generator.get_candidates
        return input_ids, None

    generator.get_candidates = prompt_alone
    return generator


class UnusedCacheWarning(UserWarning):
    """Warning: a cache was closed and no pass of the model ever used it."""


@dataclass(slots=True)
class _Switched:
    """Model whose `generate` is replaced.

    Attributes:
        before: Its own `generate`, if the module had one; else None.
        users: Number of caches that need the replacement.
        caches: These caches.
        blocks: Thread and cache of each open `with` block, the innermost last.
        running: Threads inside `generate`.
    """

    before: Callable[..., Any] | None
    users: int = 0
    caches: weakref.WeakSet[LayerCaches] = field(default_factory=weakref.WeakSet)
    blocks: list[tuple[int, weakref.ref[LayerCaches]]] = field(default_factory=list)  # thread, cache; innermost last
    running: set[int] = field(default_factory=set)  # threads inside `generate`


_switched: weakref.WeakKeyDictionary[PreTrainedModel, _Switched] = weakref.WeakKeyDictionary()
_lock = threading.RLock()
_DRAFTS = "_get_candidate_generator"


def generate(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Replace the model's own `generate`.

    Its name must be this, so that a pickled model is loaded with its own.

    Raises:
        OptionError: no cache or another kind is requested, where one of ours is used; two different caches are passed;
            or a prompt is to be cut, and the method takes it uncut.
        CacheMismatchError: the cache that is passed has read another text than the prompt begins with.
    """
    switched, thread = _switched.get(self), threading.get_ident()
    own_generate: Callable[..., Any] = MethodType(type(self).generate, self)  # type: ignore[attr-defined]
    if switched is None or thread in switched.running:  # a copy of the model, or a draft by the model itself
        return own_generate(*args, **kwargs)
    own_generate = switched.before or own_generate
    check_one_cache(kwargs)
    passed = cache_among(kwargs)
    cache = passed if passed is not None else _innermost(switched, thread)
    if cache not in switched.caches:
        return own_generate(*args, **kwargs)
    config = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    config = getattr(self, "generation_config", None) if config is None else config
    _check_used(config, kwargs)
    cache.passes.check_free()
    ids = kwargs.get("input_ids", args[0] if args else kwargs.get("inputs"))
    if passed is not None:
        check_goes_on(cache, ids, kwargs)
    elif cache.filled_inside or not _goes_on(cache, ids, kwargs):
        cache.reset()
        cache.filled_inside = True
    kwargs = with_cache(kwargs, cache)
    check_uncut(cache.parts.policy, cache.tracker.columns, ids, config, kwargs)
    parts = part_of_generate(self, cache.parts, cache.tracker.columns, ids, config, kwargs)
    if parts is not None:
        kwargs["prefill_chunk_size"] = parts.size
    switched.running.add(thread)
    cache.passes.answer_begin = _prompt_end(ids, kwargs)
    try:
        with nullcontext() if parts is None else cache.parts.reading(parts.end):
            return own_generate(*args, **kwargs)
    finally:
        switched.running.discard(thread)
        cache.passes.answer_begin = None


def _prompt_end(ids: Any, kwargs: dict[str, Any]) -> int | None:
    """Return the columns of the prompt of `generate`.

    After them transformers extends its mask by ones. None for embeddings, or where the caller's own function does it.
    """
    mask = kwargs.get("attention_mask")
    otherwise = kwargs.get("inputs_embeds") is not None or kwargs.get("custom_generate") is not None
    if otherwise or not isinstance(ids, Tensor) or ids.ndim != 2 or (mask is not None and not isinstance(mask, Tensor)):
        return None
    return int(max(ids.shape[1], 0 if mask is None else mask.shape[-1]))


def _get_candidate_generator(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Replace the model's method of this name: in `generate`, drafts begin after the prompt."""
    switched = _switched.get(self)
    generator = type(self)._get_candidate_generator(self, *args, **kwargs)  # type: ignore[attr-defined]
    return (
        begin_behind_prompt(generator)
        if switched is not None and threading.get_ident() in switched.running
        else generator
    )


def use_generate(model: PreTrainedModel, cache: LayerCaches) -> Callable[[], None]:
    """Let `generate` of the model read this cache.

    Returns:
        Function that undoes it, once no other cache needs it.
    """
    if not hasattr(model, "generate"):
        return lambda: None
    with _lock:
        switched = _switched.get(model)
        if switched is None:
            switched = _switched[model] = _Switched(model.__dict__.get("generate"))
            model.generate = MethodType(generate, model)  # type: ignore[assignment]
            if hasattr(type(model), _DRAFTS):
                model.__dict__[_DRAFTS] = MethodType(_get_candidate_generator, model)
        switched.users += 1
        switched.caches.add(cache)
    reference = weakref.ref(model)

    def undo() -> None:
        model = reference()
        with _lock:
            switched = None if model is None else _switched.get(model)
            if model is None or switched is None:
                return
            switched.users -= 1
            if switched.users:
                return
            del _switched[model]
            model.__dict__.pop(_DRAFTS, None)
            if getattr(model.__dict__.get("generate"), "__func__", None) is generate:
                del model.generate
                if switched.before is not None:
                    model.generate = switched.before  # type: ignore[assignment]

    return undo


def enter(model: PreTrainedModel, cache: LayerCaches) -> None:
    """Begin a `with` block of the cache in this thread: `generate` uses it if it gets none."""
    with _lock:
        if model in _switched:
            _switched[model].blocks.append((threading.get_ident(), weakref.ref(cache)))


def leave(model: PreTrainedModel, cache: LayerCaches) -> None:
    """End the block."""
    with _lock:
        if model in _switched:
            blocks = _switched[model].blocks
            blocks[:] = [block for block in blocks if block[1]() not in (None, cache)]


def check_goes_on(cache: LayerCaches, ids: Any, kwargs: dict[str, Any]) -> None:
    """Check that a prompt continues the text that the cache has read.

    Raises:
        CacheMismatchError: the prompt `ids` (S, n) is not the text that the cache has read, and more.
    """
    columns, mask = cache.tracker.columns, kwargs.get("attention_mask")
    if not columns or not isinstance(ids, Tensor) or ids.ndim != 2 or kwargs.get("inputs_embeds") is not None:
        return
    if isinstance(mask, Tensor) and mask.shape[1] > ids.shape[1]:
        return  # only new tokens, by the mask
    way_out = (
        "; for an unrelated prompt call cache.reset() first, make a cache for each prompt, or leave the cache out "
        "inside the cache's `with` block. To go on, pass the whole text so far and what follows, or only what "
        "follows with an attention_mask over all of it"
    )
    if len(ids) == cache.tracker.n_seq:
        difference = cache.text.differs(ids, cache.tracker.mask()[:, : ids.shape[1]])
        if difference is not None:
            raise CacheMismatchError(
                f"this cache has read another text: token {difference[1]} of sequence {difference[0]} is "
                f"{int(cache.text.ids[difference])} there and {int(ids[difference])} in this prompt{way_out}"
            )
    if ids.shape[1] <= columns:
        raise CacheMismatchError(
            f"this cache has read {columns} tokens, and the prompt has {ids.shape[1]}, so nothing of it is new{way_out}"
        )


def _goes_on(cache: LayerCaches, ids: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the prompt continues the text that the cache has read outside `generate`."""
    if not isinstance(ids, Tensor) or len(ids) != cache.tracker.n_seq:
        return False
    try:
        check_goes_on(cache, ids, kwargs)
    except CacheMismatchError:
        return False
    return True


def _innermost(switched: _Switched, thread: int) -> Any:
    """Return the cache of the innermost open block of this thread, or None."""
    with _lock:
        return next((cache() for owner, cache in reversed(switched.blocks) if owner == thread), None)


def _check_used(config: Any, kwargs: dict[str, Any]) -> None:
    """Check that `generate` is called with a cache of ours.

    Raises:
        OptionError: `generate` is called with no cache, or with one of another kind.
    """
    if kwargs.get("use_cache", getattr(config, "use_cache", None)) is False:
        raise OptionError(
            "use_cache=False leaves the Millpond cache unused and reads the whole text at each token; leave it out, "
            "pass use_cache=True where the model's settings say otherwise, or leave the `with` block"
        )
    kind = kwargs.get("cache_implementation", getattr(config, "cache_implementation", None))
    if kind is not None:
        raise OptionError(
            f"cache_implementation={kind!r} selects a cache of transformers where a Millpond cache is used; leave it "
            "out, or compress with attach=False"
        )
