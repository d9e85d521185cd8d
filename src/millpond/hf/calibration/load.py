"""Loading of calibrations: found for a model, verified against it, and applied to a codec."""

from __future__ import annotations

import hashlib
import os

from transformers import PreTrainedModel

from millpond.cache.pages.rope_tables import RopeTables
from millpond.codec import Codec, CodecSpec, Format, LayerCodecs, codecs_of, resolve
from millpond.codec.calibration import Calibration, load_calibration
from millpond.errors import CacheMismatchError, OptionError, UnsupportedModelError
from millpond.hf.model_profile import ModelProfile
from millpond.hf.signals.rotary import ModelRotation, layer_rotations

#: A calibration, or its file.
CalibrationSource = Calibration | str | os.PathLike[str] | None
#: Numbers of each parameter that the mark of a model reads.
LOOKED_AT = 16


def needs_calibration(codec: CodecSpec) -> bool:
    """Whether a codec, by name, needs a calibration."""
    return any(one.calibrated for one in codecs_of(resolve(codec)))


def loaded(given: CalibrationSource) -> Calibration | None:
    """Return a calibration as it is, or from its file.

    Raises:
        DataError: the file cannot be read, or is none.
    """
    return given if given is None or isinstance(given, Calibration) else load_calibration(given)


def calibrated(
    stored: LayerCodecs | Format, given: CalibrationSource, model: PreTrainedModel, n_layers: int
) -> LayerCodecs | Format:
    """What is stored, with the calibration that its codecs need.

    Args:
        n_layers: Of the model.

    Raises:
        OptionError: a codec needs a calibration and none is given, or none takes one; layers that the model lacks.
        CacheMismatchError: the calibration is of another model. DataError: it cannot be read.
    """
    if isinstance(stored, LayerCodecs):
        stored.check_layers(n_layers)
    needing = [one for one in codecs_of(stored) if one.calibrated]
    if not needing:
        if given is not None:
            raise OptionError("calibration: only kvquant2, kvquant3 and kvquant4 take one; leave it out")
        return stored
    known = loaded(given)
    if known is None:
        raise OptionError(
            f"codec {needing[0].name!r} needs a calibration of this model: make one with 'millpond calibrate', and "
            "give its file as calibration"
        )
    if known.model != model_mark(model) or len(known.layers) != n_layers:
        raise CacheMismatchError(
            f"this calibration was made for another model ({known.name}) than this {type(model).__name__}, for other "
            "weights, or for the same ones in other numbers of 16 bits: calibrate this one with 'millpond calibrate'"
        )

    def applied(one: Format) -> Format:
        return known.applied(one) if isinstance(one, Codec) and one.calibrated else one

    return stored.map(applied) if isinstance(stored, LayerCodecs) else applied(stored)


def ropes_of(stored: Format, profile: ModelProfile) -> RopeTables | None:
    """Return how the layers turn keys that are stored before RoPE; None where none are.

    Raises:
        UnsupportedModelError: its rotation cannot be undone.
    """
    if not isinstance(stored, Codec) or not stored.pre_rope:
        return None
    return RopeTables(rotations_before_rope(profile))


def rotations_before_rope(profile: ModelProfile) -> list[ModelRotation | None]:
    """Return how the layers turn their keys.

    Raises:
        UnsupportedModelError: it cannot be undone.
    """
    try:
        return list(layer_rotations(profile))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{error}, so its keys cannot be stored before RoPE; use codec='kivi4' or 'int4', which store them after it"
        ) from None


def model_mark(model: PreTrainedModel) -> str:
    """Identity of a model, whatever wider dtype it was loaded in: names, shapes and some numbers."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        if not parameter.is_meta:
            digest.update(parameter.detach().flatten()[:LOOKED_AT].bfloat16().float().cpu().numpy().tobytes())
    return digest.hexdigest()
