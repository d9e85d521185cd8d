"""Trial of a decoder against the modules that it was read from, on a few tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from millpond.errors import UnsupportedModelError
from millpond.kernels import ops
from millpond.kernels.args import AttentionShape, PrefillArgs
from millpond.kernels.decoder_ops import TOLERANCE, choose
from millpond.models.lean.decoder import Decoder

#: Where the tokens of a trial stand in their text.
PLACES = (0, 1, 5)


def try_out(
    decoder: Decoder,
    layers: Sequence[nn.Module],
    name: str,
    run: Callable[[Tensor, Tensor], Tensor],
    shapes: Callable[[], Sequence[AttentionShape]],
    device: torch.device,
    places: Sequence[int] = PLACES,
) -> None:
    """Give every part what the modules gave theirs, a few tokens, and compare the outputs.

    Layers that are built alike run the same kernels, so the first of them is tried out as of many rows, too.

    Args:
        decoder: Decoder to try out.
        layers: Modules of its layers.
        name: Name of the model, for the error.
        run: A pass of the modules, run(ids (N,), positions (N,)) -> logits (N, vocabulary), in this thread.
        shapes: Returns what the attention of each layer does, after `run`.
        device: Device of the weights.
        places: Positions of the tokens, ascending.

    Raises:
        UnsupportedModelError: a part computes something else.
    """
    positions = torch.tensor(places, device=device)
    ids = torch.arange(1, 1 + len(places), device=device) * (len(decoder.tokens) - 1) // len(places)
    seen: list[tuple[Tensor, Tensor]] = []
    hooks = [layer.register_forward_hook(_noting(seen), with_kwargs=True) for layer in layers]
    try:
        logits = run(ids, positions)
    finally:
        for hook in hooks:
            hook.remove()
    by_layer = shapes()

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_all(index, q, k, v, by_layer[index], places).reshape(len(q), -1)

    first, last = seen[0][0], seen[-1][1]
    _compare(f"the embeddings of {name}", decoder.embed(ids, positions), first, first)
    rotary = decoder.angles(first, positions)
    builds: set[tuple[Any, ...]] = set()
    for block, (before, behind) in zip(decoder.blocks, seen, strict=True):
        for few in (True,) if block.build in builds else (True, False):
            actual = block.forward(before.clone(), rotary, attend, choose(before, few))
            _compare(f"layer {block.index} of {name}", actual, behind, behind - before)
        builds.add(block.build)
    _compare(f"the head of {name}", decoder.logits(last), logits, logits)


def attend_all(
    index: int, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape, places: Sequence[int] = PLACES
) -> Tensor:
    """Return attention (N, Hq, value_dim) of a trial's tokens over themselves, in any layer.

    q: (N, Hq, D), k and v: (N, H, D).
    """
    positions = torch.tensor(places, dtype=torch.int32, device=q.device)
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    return ops.prefill(PrefillArgs(q, k, v, positions, shape)).out.transpose(0, 1)


def _compare(part: str, actual: Tensor, expected: Tensor, size: Tensor) -> None:
    rounding = 2 * torch.finfo(actual.dtype).eps * expected.abs()  # of the sums that are stored
    if actual.shape != expected.shape or not bool(
        ((actual - expected).abs() - rounding <= TOLERANCE[actual.dtype] * size.abs().max()).all()
    ):
        raise UnsupportedModelError(f"{part} computes something else than its family does")


def _noting(seen: list[tuple[Tensor, Tensor]]) -> Callable[..., None]:
    """Return a hook that records the input and the output of a layer, (N, width) each.

    It does so in passes of this thread.
    """
    thread = threading.get_ident()

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if threading.get_ident() != thread:
            return
        before = args[0] if args else kwargs["hidden_states"]
        behind = output[0] if isinstance(output, tuple) else output
        seen.append((before[0], behind[0]))

    return note
