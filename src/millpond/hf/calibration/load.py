"""Loading of calibrations: verified against the model, and applied to a codec."""

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
MARKED_NUMBERS = 16


def needs_calibration(codec: CodecSpec) -> bool:
    """Whether a codec, by name, needs a calibration."""
    return any(spec.calibrated for spec in codecs_of(resolve(codec)))


def loaded(source: CalibrationSource) -> Calibration | None:
    """Return a calibration as it is, or from its file.

    Raises:
        DataError: the file cannot be read, or is not a calibration.
    """
    return source if source is None or isinstance(source, Calibration) else load_calibration(source)


def calibrated(
    stored: LayerCodecs | Format, source: CalibrationSource, model: PreTrainedModel, n_layers: int
) -> LayerCodecs | Format:
    """Return the storage formats with the calibration that their codecs need.

    Args:
        stored: Formats of the layers.
        source: A calibration or its file; None for none.
        model: Model of the cache.
        n_layers: Attention layers of the model.

    Raises:
        OptionError: a codec needs a calibration and none is given, or none takes one; layers that the model lacks.
        CacheMismatchError: the calibration is of another model.
        DataError: it cannot be read.
    """
    if isinstance(stored, LayerCodecs):
        stored.check_layers(n_layers)
    calibrated_codecs = [storage for storage in codecs_of(stored) if storage.calibrated]
    if not calibrated_codecs:
        if source is not None:
            raise OptionError("calibration: only kvquant2, kvquant3 and kvquant4 take one; leave it out")
        return stored
    calibration = loaded(source)
    if calibration is None:
        raise OptionError(
            f"codec {calibrated_codecs[0].name!r} needs a calibration of this model: make one with 'millpond calibrate'"
            ", and give its file as calibration"
        )
    if calibration.model != model_mark(model) or len(calibration.layers) != n_layers:
        raise CacheMismatchError(
            f"this calibration was made for another model ({calibration.name}) than this {type(model).__name__}, for "
            "other weights, or for the same ones in other numbers of 16 bits: calibrate this one with "
            "'millpond calibrate'"
        )

    def applied(storage: Format) -> Format:
        return calibration.applied(storage) if isinstance(storage, Codec) and storage.calibrated else storage

    return stored.map(applied) if isinstance(stored, LayerCodecs) else applied(stored)


def ropes_of(stored: Format, profile: ModelProfile) -> RopeTables | None:
    """Return how the layers rotate keys that are stored before RoPE; None if none are.

    Raises:
        UnsupportedModelError: the rotation cannot be undone.
    """
    if not isinstance(stored, Codec) or not stored.pre_rope:
        return None
    return RopeTables(rotations_before_rope(profile))


def rotations_before_rope(profile: ModelProfile) -> list[ModelRotation | None]:
    """Return how the layers rotate their keys.

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
    """Return the identity of a model, in whatever wider dtype it was loaded.

    It covers names, shapes and some numbers.
    """
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        if not parameter.is_meta:
            digest.update(parameter.detach().flatten()[:MARKED_NUMBERS].bfloat16().float().cpu().numpy().tobytes())
    return digest.hexdigest()
