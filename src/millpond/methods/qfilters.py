"""Q-Filters: one direction per head along which keys draw attention (Godey et al., 2025, arXiv:2503.02812)."""

from typing import Annotated, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from millpond.errors import OptionError
from millpond.methods import method
from millpond.methods._options import Chunk, ChunkedPrefill, Recent
from millpond.option_files import FILE, read_file
from millpond.option_ranges import POSITIONS
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.query_filters import QueryFilter


@method("qfilters", paper="arXiv:2503.02812")
def qfilters(
    filters: Annotated[str, "a .safetensors file of (layers, KV heads, head size); empty: the prompt's own", FILE] = "",
    flip: Annotated[bool, "the file's filters point away from the queries, as those that the authors publish"] = False,
    recent: Recent = 0,
    sinks: Annotated[
        int, "first positions that always stay, and whose queries do not count; the paper has none", POSITIONS
    ] = 0,
    prefill: ChunkedPrefill = "once",
    chunk: Chunk = 256,
    decode: Annotated[Literal["grow", "evict"], "after the prompt: grow, or evict at each step"] = "grow",
) -> Policy:
    """Keep the entries whose keys lie in the direction of the queries, whatever the later question is.

    s_j = <k_j, f>. f is the first right singular vector of a head's queries, with the sign that gives them a positive
    mean, averaged over the query heads of a group: the mean logit of key j is proportional to it (Theorem 3.3). No
    attention is observed; queries and keys are compared after RoPE.

    Departs from the paper: it finds the filters once per model, from queries of calibration texts. Here they are the
    prompt's own, unless a file names others; `millpond.hf.offline.query_filters` writes such a file from any prompts.
    With decode="evict" filters of the prompt follow the queries; each step ends with a plan, and is slow.
    """
    return Policy(
        score=QueryFilter(_load(filters, flip)),
        protect=Protect(sinks=sinks, recent=recent),
        prefill=prefill,
        chunk=chunk,
        every_step=decode == "evict",
    )


def _load(path: str, flip: bool) -> torch.Tensor | None:
    if not path:
        if flip:
            raise OptionError("qfilters: flip turns the filters of a file round; name one with filters")
        return None
    try:
        tensors = load(read_file(path))
    except (OptionError, SafetensorError) as error:
        raise OptionError(f"qfilters: filters={path!r} cannot be read as a .safetensors file: {error}") from None
    shapes = [tuple(tensor.shape) for tensor in tensors.values()]
    if len(shapes) != 1 or len(shapes[0]) != 3:
        raise OptionError(
            f"qfilters: filters={path!r} must hold one tensor of (layers, KV heads, head size); it has {shapes}"
        )
    (found,) = tensors.values()
    return -found if flip else found
