"""Settings with a name: method, budget and codec together, chosen from what was measured (docs/how-to/codecs.md)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from millpond.budget import DEFAULT
from millpond.errors import OptionError, unknown

PRESETS: dict[str, dict[str, str]] = {
    "light": {"method": "full", "codec": "int8"},
    "balanced": {"method": "full", "codec": "rotated4"},
    "tiny": {"method": "ada", "budget": str(DEFAULT), "codec": "rotated4"},
}
#: What holds where nothing is named: it evicts nothing.
DEFAULT_PRESET = "light"
#: The method of a budget that comes without one.
BUDGET_METHOD = "h2o"
#: The number format that stands for none in particular.
AUTO = "auto"


class Choice(NamedTuple):
    """Method, budget and number format, after defaults and presets.

    Attributes:
        usual: Whether nothing was named, so that this is the default: a model that cannot store its format takes plain
            numbers.
    """

    method: Any
    budget: Any
    codec: Any
    usual: bool = False

    def on(self, dims: Iterable[tuple[int, int]] | None) -> Choice:
        """Return the choice for a model whose layers store (key_dim, value_dim) channels.

        None stands for latents, or unknown channels.
        """
        return self._replace(codec=AUTO) if self.usual and not _storable(self.codec, dims) else self


def _storable(codec: str, dims: Iterable[tuple[int, int]] | None) -> bool:
    """Whether a format has groups for this many channels."""
    from millpond.codec import codecs_of, resolve  # loads torch, which help texts do without

    try:
        for codec_format in codecs_of(resolve(codec)):
            for key_dim, value_dim in dims or ():
                codec_format.check_dims(key_dim, value_dim)
    except OptionError:
        return False
    return dims is not None


def preset(name: str) -> dict[str, str]:
    """Return the method, budget and codec of a preset, for `compress` and `LLM`.

    Args:
        name: `light` (every entry in 8 bits), `balanced` (every entry in 4 bits), or `tiny` (the default budget, which
            is a fifth of a long prompt, shared among the heads as they need it, in 4 bits; chosen on a real model, see
            docs/explanation/real-recall.md).

    Raises:
        OptionError: there is none of that name.

    Example:
        >>> preset("tiny")
        {'method': 'ada', 'budget': '20%, at least 512', 'codec': 'rotated4'}
    """
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return dict(PRESETS[name])


def choose(method: Any, budget: Any, codec: Any, name: str | None = None, evicting: bool = False) -> Choice:
    """Return the method, budget and codec that follow from what a user gave.

    Args:
        method: Name of a method; None if none was given.
        budget: Budget; None if none was given.
        codec: Number format; None or "auto" if none was given.
        name: Name of a preset, or None.
        evicting: Whether something else asks for a method that evicts: options, or texts that go on.

    Raises:
        OptionError: no such preset, or one together with what it decides.

    Example:
        >>> choose(None, None, None)
        Choice(method='full', budget=None, codec='int8', usual=True)
        >>> choose(None, "20%", None)
        Choice(method='h2o', budget='20%', codec='auto', usual=False)
    """
    user_options = {"method": method, "budget": budget, "codec": None if codec == AUTO else codec}
    if name is not None:
        settings = preset(name)
        for option, value in user_options.items():
            if value is not None:
                raise OptionError(f"preset {name!r} decides the {option} too; leave out {option}= or preset=")
        return Choice(settings["method"], settings.get("budget"), settings["codec"])
    evicting = evicting or budget is not None
    if method is None and not evicting and user_options["codec"] is None:
        settings = PRESETS[DEFAULT_PRESET]
        return Choice(settings["method"], settings.get("budget"), settings["codec"], usual=True)
    if method is None:
        method = BUDGET_METHOD if evicting else PRESETS[DEFAULT_PRESET]["method"]
    return Choice(method, budget, AUTO if codec is None else codec)
