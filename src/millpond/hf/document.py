"""Reuse of a compressed text: its cache as a file, with states of a hybrid, and caches that continue it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millpond.budget import Budget
from millpond.cache.coded.kept_tensors import KeptDecoder
from millpond.cache.coded.text import unit_of
from millpond.cache.serialization import from_tensors, to_tensors
from millpond.cache.state.span_marks import shares_of_tensors
from millpond.cache.state.spans import spans_of_tensor
from millpond.cache.types import RotaryEmbedding
from millpond.codec.presets import before_means
from millpond.codec.transform.storage_codec import parse_storage_codec
from millpond.errors import CacheMismatchError, DataError, OptionError
from millpond.hf.cache import MillpondCache
from millpond.hf.calibration.load import rotations_before_rope
from millpond.hf.compress import compress
from millpond.hf.model_support import supported, unwrapped
from millpond.hf.prompt_parts import part_size
from millpond.hf.state_layers import States
from millpond.hf.stored_text import StoredText
from millpond.hf.text_storage import CODED, KEPT, TextStorage, TransformSource, transform_of
from millpond.models.cache_argument import cache_argument

#: Prefix of the names; a layer's entries have its number there.
PREFIX = "state"
_KINDS = {"conv": "conv_states", "recurrent": "recurrent_states"}


def state_tensors(states: States) -> dict[str, Tensor]:
    """Return all states, on the host, as `state.<layer>.<kind>.<number>`."""
    return {
        f"{PREFIX}.{number}.{kind}.{i}": state.cpu().contiguous()
        for number, layer in states.layers.items()
        for kind, attribute in _KINDS.items()
        for i, state in getattr(layer, attribute).items()
        if state is not None
    }


def restore_states(states: States, stored: dict[str, Tensor], device: torch.device) -> None:
    """Fill the empty states of one sequence with the tensors of `state_tensors`.

    Raises:
        DataError: a layer's states are missing, or not those of one sequence; nothing was changed.
    """
    for number in states.layers:
        tensors = [tensor for name, tensor in stored.items() if name.startswith(f"{PREFIX}.{number}.")]
        if not tensors:
            raise DataError(f"layer {number}: the file lacks its states; save the text again")
        if any(tensor.ndim < 2 or len(tensor) != 1 for tensor in tensors):
            raise DataError(f"layer {number}: the file's states are not those of one text; save the text again")
    for number, layer in states.layers.items():
        for i in range(layer.number_of_states):
            conv, recurrent = (stored.get(f"{PREFIX}.{number}.{kind}.{i}") for kind in _KINDS)
            if conv is not None:
                layer.lazy_initialization(conv_states=conv.to(device), state_idx=i)
                layer.conv_states[i].copy_(conv)
                layer.has_previous_state[i] = True
            if recurrent is not None:
                layer.lazy_initialization(recurrent_states=recurrent.to(device), state_idx=i)
                layer.recurrent_states[i].copy_(recurrent)


#: First bytes of a file, so that another file is refused at once.
FORMAT = "millpond-document-3"
#: Files from before pages held means of keys, which are read as formats of that time.
BEFORE_MEANS = "millpond-document-2"
#: Numbers of each parameter that distinguish models.
MARKED_NUMBERS = 64


def save_document(
    cache: MillpondCache,
    ids: Tensor,
    path: str | os.PathLike[str],
    *,
    note: str = "",
    storage: TextStorage | None = None,
) -> int:
    """Write the cache of one text to a safetensors file, for `restore_document`.

    Args:
        cache: Cache from `compress` with the name of a method, after it has read the text, and nothing else.
        ids: Ids of the whole text, (1, n), evicted tokens included.
        path: Path of the file.
        note: Any words, such as the name of the model; `document_note` returns them.
        storage: Codec of the stored entries, made before the cache read the text; None to store what is held.

    Returns:
        Bytes of the file.

    Raises:
        CacheMismatchError: the cache holds several texts, pads, or not these tokens' number.
        OptionError: a policy of one's own, a method whose memory a file does not hold, or entries that `storage` does
            not code.
        DataError: the file cannot be written.
    """
    settings = cache.settings
    if settings is None:
        raise OptionError("a Policy of one's own has no name to restore it by: register it as a method, and name that")
    if cache.policy.needs.entropies is not None:
        raise OptionError(f"method {settings['method']!r} remembers predictions, which a file does not hold")
    if cache.states.in_pass:
        raise CacheMismatchError("a forward pass was interrupted; call reset() and read the text again")
    tracker = cache.tracker
    if tracker.n_seq != 1 or ids.shape[0] != 1:
        raise CacheMismatchError(f"a document is one text; the cache holds {tracker.n_seq}, the ids {ids.shape[0]}")
    if not tracker.columns == int(tracker.seen[0]) == ids.shape[1]:
        raise CacheMismatchError(
            f"the cache has read {int(tracker.seen[0])} tokens in {tracker.columns} columns, and {ids.shape[1]} ids "
            "are given: pass the ids of the whole text, without pads"
        )
    for layer_cache in cache.layer_caches:
        if layer_cache.pending:
            layer_cache.run_plans()
    codes = None if storage is None else storage.encoded(cache, unit_of(ids))
    if codes is not None:
        tensors = codes.tensors
    else:
        tensors = {
            f"{layer_cache.index}.{name}": t
            for layer_cache in cache.layer_caches
            for name, t in to_tensors(layer_cache).items()
        }
    tensors |= state_tensors(cache.states)
    tensors["ids"] = ids.cpu().int()
    if tracker.marks.kept.of(0):
        tensors["kept"] = torch.tensor(tracker.marks.kept.of(0), dtype=torch.int32)
    if tracker.marks.shares:
        tensors["fair.spans"] = torch.tensor(
            [span_share[:2] for span_share in tracker.marks.shares.of(0)], dtype=torch.int32
        )
        tensors["fair.shares"] = torch.tensor(
            [span_share[2] for span_share in tracker.marks.shares.of(0)], dtype=torch.float64
        )
    if tracker.marks.dropped:
        tensors["dropped"] = torch.tensor(tracker.marks.dropped.of(0), dtype=torch.int32)
    model = cache.model()
    if model is None:
        raise CacheMismatchError("the model of this cache is gone: save while it is still there")
    try:
        settings_text = json.dumps(settings)
    except TypeError as error:
        raise OptionError(f"options {settings['options']} cannot be written down ({error}): give texts") from None
    facts = {"format": FORMAT, "settings": settings_text, "model": fingerprint(model), "note": note}
    if codes is not None:
        facts |= codes.facts
    facts["checksum"] = checksum(facts, tensors)
    try:
        save_file(tensors, path, facts)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{os.fspath(path)!r} cannot be written: {error}") from error
    return Path(path).stat().st_size


def restore_document(
    model: PreTrainedModel,
    path: str | os.PathLike[str],
    *,
    memory_limit: str | int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    calibration: TransformSource = None,
) -> tuple[MillpondCache, Tensor]:
    """Return a cache after the text of a file, and the text's ids (1, n).

    Pass both on: `model.generate(torch.cat([ids, question], 1), cache=cache)`. The cache is one of its own; for another
    question restore again, or remove the answer with `crop` if the method allows it.

    Args:
        model: Model that read the text.
        path: Path of the file.
        memory_limit: See `compress`.
        tokenizer: See `compress`.
        calibration: For a text that was stored with a storage codec, the model's transform or its file; None for the
            file that comes with millpond-models.

    Raises:
        CacheMismatchError: another model read it, or another transform file stored it.
        OptionError: it was stored with a storage codec, and there is no transform file of this model.
        DataError: no such file, or it is broken.
        PoolFullError: there is no room.
    """
    facts, tensors = _read(path)
    if facts.get("checksum") != checksum(facts, tensors):
        raise DataError(f"{os.fspath(path)!r} is not as it was written (its checksum differs): read the text again")
    if facts["model"] != fingerprint(model):
        raise CacheMismatchError(
            f"{os.fspath(path)!r} was made with another model than this {type(model).__name__}, or with other weights: "
            "load that one, or read the text again"
        )
    stored_text = None
    if facts["format"] in (CODED, KEPT):
        stored_text = _stored_text(model, facts, tensors, calibration)
    elif calibration is not None:
        raise OptionError(f"calibration: {os.fspath(path)!r} was stored without a storage codec; leave it out")
    settings: dict[str, Any] = json.loads(facts["settings"])
    options, codec, budget = (settings.pop(name) for name in ("options", "codec", "budget"))
    if facts["format"] == BEFORE_MEANS:
        codec = before_means(codec) if isinstance(codec, str) else [before_means(name) for name in codec]
    cache = compress(
        model,
        budget=None if budget is None else Budget(*budget),
        codec=tuple(codec) if isinstance(codec, list) else codec,
        memory_limit=memory_limit,
        tokenizer=tokenizer,
        **settings,
        **options,
    )
    ids = tensors.pop("ids").long().to(model.device)
    n_tokens = ids.shape[-1]
    try:
        if "kept" in tensors:
            cache.protect(tensors.pop("kept").tolist())
        if "fair.spans" in tensors and "fair.shares" in tensors:
            fair = shares_of_tensors(tensors.pop("fair.spans"), tensors.pop("fair.shares"))
            cache.tracker.marks.shares.expect(fair)
        for nth, layer_cache in enumerate(cache.layer_caches):
            prefix = f"{layer_cache.index}."
            part = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            if stored_text is not None:
                part = stored_text.layer(nth, part)
            from_tensors(layer_cache, part, n_tokens, model.device)
        dropped = spans_of_tensor(tensors.pop("dropped"), n_tokens) if "dropped" in tensors else ()
        restore_states(cache.states, tensors, model.device)
        cache.restore_position(ids)
        if dropped:
            cache.tracker.marks.dropped.add(dropped, 0)
            cache.draft_rollback.truncatable = False
    except BaseException:
        cache.close()
        raise
    return cache, ids


def _stored_text(
    model: PreTrainedModel, facts: Mapping[str, str], tensors: Mapping[str, Tensor], calibration: TransformSource
) -> StoredText | KeptDecoder:
    """Return what decodes the layers of a coded text.

    Raises:
        OptionError: no transform is given.
        CacheMismatchError: it is of another model, or not the one that the text was stored with.
        DataError: it cannot be read, or the file names no codec.
    """
    transform = transform_of(model, calibration)
    by_head = facts.get("heads")
    heads = transform.digest_of_heads() if by_head is not None else None
    if transform.digest() != facts.get("transform") or heads != by_head:
        raise CacheMismatchError(
            "this transform file is not the one that the text was stored with: give that one, or read the text again"
        )
    rotations: list[RotaryEmbedding | None] = [*rotations_before_rope(supported(unwrapped(model)))]
    ids = tensors["ids"]
    text = (ids.shape[-1], unit_of(ids), model.dtype, model.device)
    if facts["format"] == CODED:
        return StoredText(transform, rotations, *text)
    try:
        bits = parse_storage_codec(facts.get("storage", "")).bits
    except OptionError as error:
        raise DataError(f"the text was stored in a codec that there is not ({error}); read it again") from None
    return KeptDecoder(transform, bits, rotations, *text)


def document_note(path: str | os.PathLike[str]) -> str:
    """Return the words that were saved with a document.

    Raises:
        DataError: no such file, or it is no document.
    """
    return _read(path, tensors=False)[0].get("note", "")


def checksum(facts: dict[str, str], tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 of a document's other facts and of each tensor with its name, in hex."""
    names = ["format", "settings", "model", "note"]
    names += {CODED: ["storage", "transform"], KEPT: ["storage", "transform", "heads"]}.get(facts.get("format", ""), [])
    return digest_of({name: facts.get(name) for name in names}, tensors)


def digest_of(facts: Mapping[str, str | None], tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of texts and of tensors of any shapes, each with its name, in hex."""
    digest = hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def fingerprint(model: PreTrainedModel) -> str:
    """Return the fingerprint of a model: its class, and some numbers of each parameter."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        if not parameter.is_meta:
            digest.update(parameter.detach().flatten()[:MARKED_NUMBERS].double().cpu().numpy().tobytes())
    return digest.hexdigest()


def _read(path: str | os.PathLike[str], *, tensors: bool = True) -> tuple[dict[str, str], dict[str, Tensor]]:
    name = os.fspath(path)
    try:
        with safe_open(name, "pt") as file:
            facts = file.metadata() or {}
            if facts.get("format") not in (FORMAT, BEFORE_MEANS, CODED, KEPT):
                raise DataError(f"{name!r} is no document of this Millpond: its format is {facts.get('format')!r}")
            return facts, {key: file.get_tensor(key) for key in file.keys() if tensors}  # noqa: SIM118 (no dictionary)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{name!r} cannot be read: {error}") from error


@torch.no_grad()
def read_document(model: PreTrainedModel, cache: MillpondCache, ids: Tensor, chunk: int | None = None) -> None:
    """Let the model read ids (1, n) into the cache, in chunks that each end with a plan.

    Args:
        model: Model of the cache.
        cache: Cache to fill.
        ids: Ids of the text.
        chunk: Tokens of a chunk; None to read a long text as `generate` does, in parts with one plan at their end if
            that is best.
    """
    n_tokens = ids.shape[1]
    parts = None if chunk else part_size(model, cache.parts, n_tokens)
    step = chunk or parts or n_tokens
    with nullcontext() if parts is None else cache.parts.reading(cache.tracker.columns + n_tokens):
        for begin in range(0, n_tokens, step):
            model(ids[:, begin : begin + step], **cache_argument(cache), logits_to_keep=1)
