"""PyramidKV: larger budgets for the first layers, smaller for the last (Cai et al., 2024, arXiv:2406.02069)."""

from dataclasses import replace
from typing import Annotated

from millpond.methods import method
from millpond.methods._base import based_on
from millpond.option_ranges import Range
from millpond.policy.layer_allocation import Pyramid
from millpond.policy.policy import Policy


@method("pyramidkv", paper="arXiv:2406.02069")
def pyramidkv(
    score: Annotated[str, "the method that chooses inside each layer: snapkv, h2o/sinks=0, ..."] = "snapkv",
    beta: Annotated[float, "steepness: the last layer keeps 1/beta of the mean; 1 is flat", Range(1.0, 1e6)] = 20.0,
) -> Policy:
    """Give each layer its own budget, falling linearly from the first layer to the last.

    Of what is not protected (SnapKV's window), b entries on average, the last of L layers keeps b / beta, the first
    2 b - b / beta, and layer l is on the line between them: b_l = b_1 - (l - 1) (b_1 - b_L) / (L - 1). Where the first
    layer would keep more than there is, the line starts at the length of the prompt, and its end rises by as much.
    Inside a layer SnapKV chooses, or another method by `score`.

    Departs from the paper: SnapKV's window is 32 and its pool 21 wide here, where the official scripts run with 8 and 7
    (score=snapkv/window=8/kernel=7); what the window takes, no layer can give to another. The budgets add up to layers
    x budget exactly, by the largest remainder (the official code rounds the steps of the line down and holds up to 15 %
    more), and they follow the length of each prompt. The official code is flat SnapKV for prompts shorter than twice
    the budget; here they have the flatter pyramid.
    """
    return replace(based_on("pyramidkv", score), layers=Pyramid(beta))
