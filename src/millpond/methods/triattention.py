"""TriAttention: logits that a head's mean query would give at future distances (Mao et al., 2026, arXiv:2604.04921)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from millpond.errors import DataError, OptionError
from millpond.kernels.decode_rules import Evict, Signal
from millpond.methods import method
from millpond.methods._options import PlannedDecode, PromptStays
from millpond.option_files import FILE, read_file
from millpond.option_ranges import POSITIONS, SOME_POSITIONS
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import Queries
from millpond.policy.scores.query_centres import Bands, QueryCentres, centres_of
from millpond.policy.scores.query_moments import QueryMoments, Rotate, mean_rotation, moments_of
from millpond.policy.view import View

#: Distances from the newest token at which a key's logit counts.
OFFSETS = tuple(2**power for power in range(17))


@dataclass(frozen=True, slots=True, eq=False)
class FutureLogits:
    """s_j = max_h z_h(S_hj), z in standard deviations over what competes.

    S_hj = mean over offsets d of (R_{t+d} E q_h) . k_j + c sum_f (E |q_f| - |E q_f|) |k_f| over the bands f of RoPE, t
    the newest position, k_j the stored key, and c the scaling of the rotation.

    Attributes:
        centres: Centres of the model; None: those of the queries so far, with sqrt(E |q_f|^2) for E |q_f|.
        offsets: Distances d.
    """

    centres: QueryCentres | None = None
    offsets: tuple[int, ...] = OFFSETS
    queries: Queries = "unrotated"
    window: int = 0
    signal: Signal = Signal.NONE
    evict: Evict | None = None

    def score(self, view: View, seed: int) -> Tensor:
        """Return (H, N) float32.

        Raises:
            CacheMismatchError: the centres are of another model.
        """
        moments_view, moments = moments_of(view)
        keys, rotate = view.keys, moments_view.rotate
        bands = Bands.of(rotate, keys.shape[-1], keys.device)
        if self.centres is None:
            mean, magnitude = _of_text(moments, bands)
        else:
            mean, magnitude = self.centres.of(view.layer, len(moments.mean), keys.shape[-1])
        mean, magnitude = mean.to(keys.device, torch.float64), magnitude.to(keys.device, torch.float64)
        logits = future_logits(mean, magnitude, keys, bands, rotate, [view.seen - 1 + d for d in self.offsets])
        free = view.free[:, None]
        count = free.sum(-1, keepdim=True).clamp(min=1)
        deviation = logits - logits.masked_fill(~free, 0).sum(-1, keepdim=True) / count
        spread = (deviation.masked_fill(~free, 0).square().sum(-1, keepdim=True) / count).sqrt()
        return (deviation / spread.clamp(min=1e-12)).amax(1).float()


def _of_text(moments: QueryMoments, bands: Bands) -> tuple[Tensor, Tensor]:
    """Return the mean query of each head and its length in each band, (Hq, D).

    A length is the root of the mean square.
    """
    squares = moments.outer.diagonal(dim1=1, dim2=2) / max(moments.count, 1)
    return moments.mean, bands.magnitudes(squares.clamp(min=0).sqrt())


def future_logits(
    mean: Tensor, magnitude: Tensor, keys: Tensor, bands: Bands, rotate: Rotate | None, positions: list[int]
) -> Tensor:
    """Return S (H, group, N), see `FutureLogits`.

    Args:
        mean: (Hq, D) float64, E q before RoPE.
        magnitude: (Hq, D) float64, E |q_f| of each channel's band.
        keys: (H, N, D) as stored, after RoPE.
        bands: Bands of the rotation.
        rotate: Rotation of the layer; None if it has none.
        positions: Positions of the queries to come.
    """
    n_heads, dim = len(keys), keys.shape[-1]
    turn = torch.stack([mean_rotation(rotate, dim, position, 1, keys.device) for position in positions]).mean(0)
    centre = (mean @ turn.T).to(keys.dtype).view(n_heads, -1, dim)
    rest = (magnitude - bands.magnitudes(mean)).clamp(min=0) * bands.share * bands.scale
    by_norm = rest.to(keys.dtype).view(n_heads, -1, dim) @ bands.magnitudes(keys).transpose(1, 2)
    return centre @ keys.transpose(1, 2) + by_norm


@method("triattention", paper="arXiv:2604.04921")
def triattention(
    centres: Annotated[
        str, "a file of 'millpond calibrate --codec triattention' for this model; empty: those of the text", FILE
    ] = "",
    every: Annotated[
        int, "while decoding: entries that gather beyond the budget before the next plan", SOME_POSITIONS
    ] = 128,
    prompt: PromptStays = True,
    recent: Annotated[int, "newest entries that stay; the paper has none", POSITIONS] = 0,
    sinks: Annotated[int, "first positions that stay where the prompt does not", POSITIONS] = 4,
    decode: PlannedDecode = "evict",
) -> Policy:
    """Keep the keys to which a head's mean query would attend from later positions.

    Queries before RoPE gather round a centre, so a key's logit depends on the distance alone: S_j is the mean over
    distances 1, 2, 4 ... 65,536 of the centre's logit, plus, per band of RoPE, (E |q_f| - |E q_f|) |k_f| for what the
    centre does not explain. Of each query head S is normalised over what competes, and the largest of a group counts.
    No attention is observed. While decoding `every` entries gather first; the prompt stays.

    Departs from the official code: each layer and head chooses for itself (its `per_layer_per_head`; by default it
    takes the mean over all layers, so that a head keeps the same positions in every layer). The newest tokens are never
    dropped for a long prompt; one that does not fit competes, but for the sinks. Queries are those that the layer uses,
    after the norms that some models have. Distances are averaged only (there also the maximum), ties go to the newest
    (there to noise). Without a file centres are those of the text so far, and sqrt(E |q_f|^2) stands for E |q_f|.
    """
    return Policy(
        score=FutureLogits(_load(centres)),
        protect=Protect(sinks=sinks, recent=recent, prompt=prompt),
        every_step=decode == "evict",
        plan_every=every if decode == "evict" else 1,
    )


def _load(path: str) -> QueryCentres | None:
    if not path:
        return None
    try:
        return centres_of(read_file(path), str(path))
    except (OptionError, DataError) as error:
        raise OptionError(f"triattention: centres={path!r}: {error}") from None
