"""Waiting times of prompts of one length in closed form: the queue M/D/1, alone and with two devices.

Source: DistServe, arXiv:2401.09670, section 3.1. The simulation is held to these.
"""

from __future__ import annotations

from millpond.errors import OptionError


def mean_ttft(rate: float, seconds: float) -> float:
    """Mean seconds from arrival to the first token at one worker.

    Args:
        rate: prompts per second, arriving independently. seconds: that a prompt takes alone.

    Raises:
        OptionError: prompts arrive faster than they are read.

    >>> round(mean_ttft(5.0, 0.1), 4)
    0.15
    """
    _stable(rate, 1 / seconds)
    return seconds + rate * seconds**2 / (2 * (1 - rate * seconds))


def mean_ttft_pipelined(rate: float, seconds: float) -> float:
    """The same for two devices that hold half of the layers each: the next prompt enters after half of the time.

    Raises:
        OptionError: as `mean_ttft`.
    """
    _stable(rate, 2 / seconds)
    return seconds + rate * seconds**2 / (4 * (2 - rate * seconds))


def mean_ttft_split_tensors(rate: float, seconds: float, speedup: float) -> float:
    """The same for two devices that share each layer, and are together `speedup` times as fast as one.

    Raises:
        OptionError: as `mean_ttft`, or a speed-up that two devices cannot have.
    """
    if not 1 <= speedup <= 2:
        raise OptionError(f"speedup={speedup}: two devices are 1 to 2 times as fast as one")
    return mean_ttft(rate, seconds / speedup)


def _stable(rate: float, most: float) -> None:
    if not 0 < rate < most:
        raise OptionError(f"rate={rate:g}: must be above 0 and below {most:g} per second, or the queue grows for ever")
