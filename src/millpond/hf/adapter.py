"""Low-rank adapters in a model's passes: found by the attention layers' projections, and added to their outputs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from millpond.errors import CacheMismatchError, UnsupportedModelError
from millpond.hf.model_profile import ModelProfile
from millpond.policy.trained.adapter import Adapter, LowRank

#: Rows that an adapter acts on, by slices of the tokens of a pass.
Rows = Sequence[slice]
#: All rows of a pass.
ALL: Rows = (slice(None),)


def projections_of(profile: ModelProfile) -> list[dict[str, nn.Linear]]:
    """Return the linear maps of each attention layer, by name; none where it has others.

    They are those that make queries, keys and values, and the output projection.
    """
    found = [profile.output_projections.get(layer) for layer in range(profile.n_layers)]
    return [
        {}
        if output is None
        else {name: module for name, module in output.module.named_children() if isinstance(module, nn.Linear)}
        for output in found
    ]


def check_adapter(profile: ModelProfile, adapter: Adapter) -> None:
    """Check that the projections of an adapter are those of a model.

    Raises:
        CacheMismatchError: the model has other projections, or of other shapes.
    """
    own = [{name: _sizes(linear) for name, linear in layer.items()} for layer in projections_of(profile)]
    given = [{name: (one.a.shape[1], len(one.b)) for name, one in layer.items()} for layer in adapter.layers]
    if len(own) != len(given):
        raise CacheMismatchError(
            f"the adapter beside these gates is of {len(given)} layers, and {profile.name} has {len(own)} attention "
            "layers: train the gates of this model with 'millpond train gate'"
        )
    for index, (layer, expected) in enumerate(zip(given, own, strict=True)):
        wrong = [name for name, sizes in layer.items() if expected.get(name) != sizes]
        if wrong:
            raise CacheMismatchError(
                f"the adapter beside these gates adds {layer[wrong[0]]} numbers to {wrong[0]} of layer {index}, which "
                f"{profile.name} has as {expected.get(wrong[0])}: train the gates of this model with 'millpond train "
                "gate'"
            )


def _sizes(linear: nn.Linear) -> tuple[int, int]:
    return linear.in_features, linear.out_features


class _Acting:
    """Hooks of an adapter on the projections of a model.

    Args:
        profile: Profile of the model.
        adapter: What is added.
        rows: Tells the rows of the running pass of this thread; None: the adapter has no part in it.
    """

    def __init__(self, profile: ModelProfile, adapter: Adapter, rows: Callable[[], Rows | None]) -> None:
        self._rows, self._name = rows, profile.name
        self._acted = threading.local()
        layers = zip(projections_of(profile), adapter.layers, strict=True)
        self._hooks = [
            own[name].register_forward_hook(self._adding(one)) for own, layer in layers for name, one in layer.items()
        ]
        self._expected = len(self._hooks)
        self._hooks += [
            profile.modules[-1].register_forward_pre_hook(self._begin),
            profile.modules[-1].register_forward_hook(self._end, prepend=True),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        while self._hooks:
            self._hooks.pop().remove()

    def _adding(self, one: LowRank) -> Callable[..., Tensor | None]:
        """Return the hook of one projection."""
        placed: dict[tuple[torch.device, torch.dtype], LowRank] = {}

        def add(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
            rows = self._rows()
            if rows is None:
                return None
            self._acted.count = getattr(self._acted, "count", 0) + 1
            x: Tensor = args[0]
            added = one
            if not one.a.requires_grad:  # else it is being trained, in float32
                place = x.device, x.dtype
                if place not in placed:
                    placed[place] = one.map(lambda part: part.to(*place))
                added = placed[place]
            if rows is ALL:
                return output + added(x).to(output.dtype)
            for part in rows:
                output[..., part, :] += added(x[..., part, :]).to(output.dtype)
            return output

        return add

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._acted.count = 0

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._rows() is not None and self._acted.count < self._expected:
            raise UnsupportedModelError(
                f"{self._name} passed {self._acted.count} of its {self._expected} projections that the adapter beside "
                "these gates adds to: the model, or what it was compiled to, bypasses its modules; take gates without "
                "an adapter ('millpond train gate' without --lora), or the model as it was loaded"
            )


def use_adapter(profile: ModelProfile, adapter: Adapter, rows: Callable[[], Rows | None]) -> Callable[[], None]:
    """Let an adapter act in passes of a model; it was checked by `check_adapter`.

    The weights of the model do not change.

    Args:
        profile: Profile of the model.
        adapter: What is added.
        rows: Tells the rows of the running pass that it acts on; None: it has no part in it.

    Returns:
        Function that undoes it.
    """
    return _Acting(profile, adapter, rows).close


@contextmanager
def acting(profile: ModelProfile, parts: Sequence[tuple[Adapter, Rows]]) -> Iterator[None]:
    """Let adapters act on rows of all passes inside the block."""
    undo = [use_adapter(profile, adapter, lambda rows=rows: rows) for adapter, rows in parts]  # type: ignore[misc]
    try:
        yield
    finally:
        while undo:
            undo.pop()()
