"""Storage codec of an engine: its bits, the transform of its model, and the settings that it goes with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from millpond.cache.tiered.coded_block import BlockCodec
from millpond.cache.types import RotaryEmbedding
from millpond.codec import Codec
from millpond.codec.calibration import Calibration
from millpond.codec.transform.page import TOKENS
from millpond.codec.transform.storage_codec import StorageCodec, parse_storage_codec
from millpond.codec.transform.transform_file import ModelTransform
from millpond.engine.settings import EngineSettings
from millpond.errors import OptionError
from millpond.hf.calibration.load import CalibrationSource, loaded, rotations_before_rope
from millpond.hf.model_support import supported, unwrapped
from millpond.hf.text_storage import TransformSource, transform_of
from millpond.policy.policy import Policy


@dataclass(frozen=True, slots=True)
class ModelCodec:
    """Storage codec with all that it needs of a model.

    Attributes:
        codec: The codec.
        transform: Transform of the model.
        rotations: Rotation of each layer's keys; None for one without.
    """

    codec: StorageCodec
    transform: ModelTransform
    rotations: tuple[RotaryEmbedding | None, ...]

    @classmethod
    def of(cls, model: Any, name: str, calibration: CalibrationSource | TransformSource) -> ModelCodec:
        """Return the codec of a name for a model whose weights are in memory.

        Raises:
            OptionError: no such codec, no transform file or one of fewer bits, or a calibration of another kind.
            CacheMismatchError: a file of another model.
            DataError: the file cannot be read.
            UnsupportedModelError: keys whose rotation cannot be undone.
        """
        if isinstance(calibration, Calibration):
            raise OptionError(
                f"storage_codec={name!r} needs a transform file, and calibration= is one of the kvquant codecs; make "
                "one with 'millpond calibrate --codec transform'"
            )
        transform, codec = transform_of(model, calibration), parse_storage_codec(name)
        transform.check_bits(codec.bits)
        rotations = rotations_before_rope(supported(unwrapped(model)))
        return cls(codec, transform, tuple(rotations))

    def blocks(self, slots: int, dtype: torch.dtype) -> BlockCodec:
        """Return the codec of blocks of so many tokens, for entries of a type."""
        return BlockCodec(self.transform, self.codec.bits, self.rotations, slots, dtype)


def format_calibration(config: EngineSettings) -> Calibration | None:
    """Return the calibration of number formats, as it is or from its file.

    None if the file belongs to a storage codec.

    Raises:
        OptionError: a transform, and no storage codec.
        DataError: the file cannot be read, or is not a calibration.
    """
    if config.storage_codec is not None:
        return None
    if isinstance(config.calibration, ModelTransform):
        raise OptionError(
            "calibration= is a transform, which a storage codec needs: give storage_codec='transform:1.5'"
        )
    return loaded(config.calibration)


def check_storage(config: EngineSettings, method: str, policy: Policy, codecs: list[Codec]) -> None:
    """Check that a storage codec goes with the other settings.

    Args:
        config: Settings with a storage codec.
        method: Method of requests that name none.
        policy: Its policy.
        codecs: Number formats of their entries.

    Raises:
        OptionError: no such codec; or a method, a number format, or pages that have no codes.
    """
    name = f"storage_codec={config.storage_codec!r}"
    parse_storage_codec(str(config.storage_codec))
    if config.page_slots % TOKENS:
        raise OptionError(
            f"page_slots={config.page_slots} with {name}, whose pages hold {TOKENS} tokens: give a multiple of {TOKENS}"
        )
    if config.overflow == "rolling":
        raise OptionError(
            f"{name} stores each token at its own position, and overflow='rolling' gives entries other ones; leave one "
            "of the two out"
        )
    if policy.merge is not None or policy.positions != "absolute":
        raise OptionError(
            f"{name} stores each token at its own position, and method {method!r} with these options "
            "merges entries or gives them other positions; use a method that drops entries, such as 'h2o' or 'snapkv', "
            "or leave the storage codec out"
        )
    for codec in codecs:
        if codec.calibrated:
            raise OptionError(
                f"calibration= names one file, and codec {codec.name!r} and {name} need one each; use a codec that "
                "needs none, such as 'int8'"
            )
