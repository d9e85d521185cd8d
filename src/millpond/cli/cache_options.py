"""Options of the KV cache: method, budget, number format, preset and calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from millpond.budget import DEFAULT
from millpond.cli.option_groups import OptionGroup
from millpond.cli.options import CalibrationFile, CodecName, optional, parse_options
from millpond.errors import OptionError
from millpond.presets import preset as preset_of

#: What a preset decides.
DECIDED = ("method", "budget", "codec")


@dataclass(frozen=True, kw_only=True)
class CacheChoice(OptionGroup):
    """How the KV cache of a command is kept."""

    method: Annotated[
        str | None,
        optional(
            help="What is kept: see 'millpond methods'. Default: every entry, in 8 bits (--preset light); with a "
            "budget or an option, h2o."
        ),
    ] = None
    budget: Annotated[
        str | None,
        optional(
            help="'20%' of the prompt, 512 tokens per KV head, '64MiB' in all, or 'auto' with --max-kl. "
            f"Default: {DEFAULT}; full takes none."
        ),
    ] = None
    option: Annotated[
        list[str] | None,
        optional("--option", "-o", metavar="NAME=VALUE", help="Option of the method: see 'millpond methods NAME'."),
    ] = None
    codec: CodecName = "auto"
    preset: Annotated[str | None, optional(help="light, balanced or tiny: method, budget and codec in one word.")] = (
        None
    )
    calibration: CalibrationFile = None
    max_kl: Annotated[
        float | None, optional(help="With --budget auto: what predictions may differ from the full cache's, in nats.")
    ] = None
    fit: Annotated[
        str | None, optional(help="With --budget auto: a file of 'millpond fit'. Default: where that command puts it.")
    ] = None

    @property
    def options(self) -> dict[str, str]:
        """Options of the method.

        Raises:
            OptionError: see `parse_options`.
        """
        return parse_options(self.option or [])

    def kept(self) -> dict[str, Any]:
        """Method, budget and codec: those of the preset, or as given where there is none.

        Raises:
            OptionError: no such preset, or one together with an option that it decides.
        """
        if self.preset is None:
            return {name: getattr(self, name) for name in DECIDED}
        for name in DECIDED:
            if name in self.given:
                raise OptionError(f"--preset {self.preset} decides the {name} too; leave out --{name} or --preset")
        if self.max_kl is not None or self.fit is not None:
            raise OptionError(
                f"--preset {self.preset} decides the budget too; leave out --max-kl and --fit, or --preset"
            )
        return {"budget": None, **preset_of(self.preset)}

    def for_compress(self) -> dict[str, Any]:
        """Arguments of `compress`.

        Raises:
            OptionError: see `kept` and `parse_options`.
        """
        bound = {"max_kl": self.max_kl, "fit": self.fit}
        kept = self.kept()
        if self.preset is not None:
            kept = {"preset": self.preset}
        return {**kept, **bound, "calibration": self.calibration, **self.options}

    def for_request(self) -> dict[str, Any]:
        """What the user chose, as an engine or a request takes it; nothing where their own defaults hold.

        Raises:
            OptionError: see `kept` and `parse_options`.
        """
        kept = self.kept()
        chosen = {name: value for name, value in kept.items() if name in self.given}
        if self.preset is not None:
            chosen = {"preset": self.preset}
        bound = {"max_kl": self.max_kl, "fit": self.fit}
        given = {**chosen, **bound, "options": self.options}
        return {name: value for name, value in given.items() if value is not None and value != {}}
