"""Conversion of GGUF files to folders of safetensors, each once; files with parts that would be lost are refused."""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from millpond.codec import DTYPES
from millpond.errors import DataError, OptionError
from millpond.models.cache_folder import cache_folder, make_room
from millpond.models.downloads import progress, remove_left, tell, workplace
from millpond.models.gguf.converted import NOTE, FileIdentity, note_source, own_dtype, read_note
from millpond.models.gguf.header import GGUFHeader, read_header
from millpond.models.gguf.quick_reader import quick_reading
from millpond.models.gguf.rope import RopeTensors, rotated, take_rope
from millpond.models.gguf.tokenizer import TOKENIZER_VERSION, check_tokenizer, gguf_tokenizer
from millpond.models.untrusted.config import check_config
from millpond.optional import require

#: Keys of a file, and the names that configurations have for the same number.
_SAME = {
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon"),
}
#: Those of them that say how large a model is; 0 counts.
_SIZES = {
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "attention.shared_kv_layers": "num_kv_shared_layers",
}
#: Tensors that models of transformers compute themselves.
_COMPUTED = ("rope.freqs", "attn_rot_embd")


def unread_metadata(header: GGUFHeader, config: PreTrainedConfig) -> list[str]:
    """Return phrases for numbers that the configuration lacks or has otherwise.

    Empty if it has all of them.

    Args:
        header: Header of the file.
        config: Configuration by transformers from the metadata, with what `take_rope` added.
    """
    return [*_numbers(header, config), *_rope(header, config)]


def _numbers(header: GGUFHeader, config: PreTrainedConfig) -> list[str]:
    differences = []
    for key, names in _SAME.items():
        value = header.metadata.get(f"{header.architecture}.{key}")
        config_numbers = [getattr(config, name) for name in names if hasattr(config, name)]
        if (
            isinstance(value, (int, float))
            and value
            and config_numbers
            and not any(_close(value, ours) for ours in config_numbers)
        ):
            differences.append(f"{key} = {value:.6g} (it takes {config_numbers[0]})")
    for key, name in _SIZES.items():
        value = header.metadata.get(f"{header.architecture}.{key}")
        if isinstance(value, int) and hasattr(config, name) and getattr(config, name) != value:
            differences.append(f"{key} = {value} (it takes {getattr(config, name)})")
    return differences


def _rope(header: GGUFHeader, config: PreTrainedConfig) -> list[str]:
    """Return phrases for base and scaling of the rotary positions that differ."""
    rope_parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [value for value in rope_parameters.values() if isinstance(value, dict)] or [rope_parameters]
    base = header.metadata.get(f"{header.architecture}.rope.freq_base")
    scaling = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    count = header.metadata.get(f"{header.architecture}.rope.dimension_count")
    bases = [kind["rope_theta"] for kind in kinds if "rope_theta" in kind]
    differences = []
    if isinstance(base, (int, float)) and bases and not any(_close(base, ours) for ours in bases):
        differences.append(f"rope.freq_base = {base:.6g} (it takes {bases[0]:.6g})")
    if isinstance(count, int) and count and "rope_theta" in rope_parameters and count != rotated(config):
        differences.append(f"rope.dimension_count = {count} (it rotates {rotated(config)} numbers of each head)")
    if scaling != "none" and all(kind.get("rope_type", "default") == "default" for kind in kinds):
        factor = header.metadata.get(f"{header.architecture}.rope.scaling.factor", 0)
        if factor != 1:
            differences.append(f"rope.scaling.type = {scaling} (it takes positions that are not scaled)")
    return differences


def unread_tensors(header: GGUFHeader, config: PreTrainedConfig, model: nn.Module, rope: RopeTensors) -> list[str]:
    """Return one phrase for tensors without a place in a model, or nothing.

    Of architectures that transformers maps by rules of their own, only loading tells (`unplaced`).

    Args:
        header: Header of the file.
        config: Configuration of the model.
        model: Model of that configuration; its tensors may be on meta.
        rope: Tensors that `take_rope` read or refused.
    """
    legacy: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    with suppress(ImportError, AttributeError):  # older versions have one list only
        if header.architecture in import_module("transformers.integrations.gguf").GGUF_CONFIG_ARCHS:
            return []
    try:
        kind = legacy.TENSOR_PROCESSORS.get(header.architecture, legacy.TensorProcessor)
        places = {*legacy.get_gguf_hf_weights_map(model, kind(config=config.to_dict())), "output.weight"}
    except (AttributeError, NotImplementedError):  # another version, or one that says so when it loads
        return []
    places |= {*rope.names}
    names = [
        tensor.name
        for tensor in header.tensors
        if tensor.name not in places
        and tensor.name.removesuffix(".weight") not in places
        and not any(part in tensor.name for part in _COMPUTED)
    ]
    return unplaced(names)


def unplaced(names: list[str]) -> list[str]:
    """Return a phrase about tensors that have no place in a model; none of no names."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"the tensors {', '.join(names[:3])}{more}"] if names else []


def _close(value: float, ours: object) -> bool:
    return isinstance(ours, (int, float)) and math.isclose(value, ours, rel_tol=1e-5)


#: transformers types these too loosely for a checker.
_AUTO: Any = AutoModelForCausalLM
_UNDER_WAY = ".converting-"
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
#: What transformers makes otherwise than the model is, and no check of sizes and names finds.
_WRONG = {"gpt-oss": "its experts, whose gates and biases have names of their own, nor the scaling of its positions"}
_BYTES = {"f32": 4, "bf16": 2, "f16": 2}
#: One at a time in a process: while transformers loads a model, functions of torch are replaced for all threads.
_CONVERTING = threading.Lock()


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that a path names, or None.

    It is the path itself, or the only GGUF file of a folder without a config.json.

    Raises:
        OptionError: a folder with several, none of them chosen.
    """
    if path.suffix.lower() == ".gguf":
        return path if path.is_file() else None
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == ".gguf" and file.is_file())
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise OptionError(f"{path} holds {len(files)} GGUF files ({names}); name one of them, as {files[0]}")
    return files[0] if files else None


def converted_folder(path: Path, dtype: str | None = "auto") -> Path:
    """Return the folder with config, weights and tokenizer of a GGUF file.

    The file is converted now if it was not before.

    Args:
        path: GGUF file.
        dtype: "auto" (the file's own float type, and bf16 for quantized matrices), "f32", "bf16" or "f16"; None for any
            that was made before, else "auto".

    Raises:
        DataError: the file is damaged, or says things of itself that do not go together.
        OptionError: its architecture is not one that transformers reads, it is a part of a split file, a package is
            missing, or there is no room.
    """
    before = converted_before(path, dtype)
    if before is not None:
        return before
    for library in ("gguf", "accelerate"):
        require(library, "gguf", "a GGUF file")
    identity = FileIdentity.of(path)
    header = read_header(path)
    _check_whole(path, header)
    with progress(f"Reading {path.name}"):
        digest = _digest(path)
    folder = cache_folder() / "gguf" / f"{path.stem[:64]}-{digest[:16]}"
    dtypes = [name for name in DTYPES if dtype is None and (folder / name / NOTE).exists()]
    stored = dtypes[0] if dtypes else header.dtype if dtype in (None, "auto") else str(dtype)
    with _CONVERTING:
        if not (folder / stored / NOTE).exists():
            _convert(path, header, stored, digest, folder / stored)
        elif header.has_tokenizer and read_note(folder / stored / NOTE).get("tokenizer") != TOKENIZER_VERSION:
            _renew_tokenizer(path, folder / stored)
    note_source(folder / stored, path, identity, header.dtype)
    return folder / stored


def converted_before(path: Path, dtype: str | None) -> Path | None:
    """Return the folder that an unchanged file was converted to, by times, size and inode.

    The file is not read: for one of 500 MB its header and checksum take a second.

    Args:
        path: GGUF file.
        dtype: As for `converted_folder`.
    """
    for folder in sorted((cache_folder() / "gguf").glob(f"{escape(path.stem[:64])}-*/*")):
        current = folder.name in DTYPES and read_note(folder / NOTE).get("tokenizer") == TOKENIZER_VERSION
        stored_dtype = own_dtype(folder, path) if current else None
        if stored_dtype is not None and folder.name == {None: folder.name, "auto": stored_dtype}.get(dtype, dtype):
            return folder
    return None


def _check_whole(path: Path, header: GGUFHeader) -> None:
    """Refuse a part of a split file, and an architecture that transformers does not read."""
    part = _PART.search(path.name)
    if part or header.metadata.get("split.count", 1) not in (0, 1):
        raise OptionError(
            f"{path.name} is a part of a GGUF file that was split; join the parts with llama.cpp's "
            "'llama-gguf-split --merge' and name the result"
        )
    supported = supported_architectures()
    if header.architecture not in supported:
        raise OptionError(
            f"{path.name} is of the architecture {header.architecture or '(none named)'!r}, which transformers "
            f"{transformers.__version__} does not read from GGUF; it reads {', '.join(supported)}. Use the model's "
            "safetensors instead, or a newer transformers"
        )
    if header.architecture in _WRONG:
        _refuse_unread(path, [_WRONG[header.architecture]])
    check_tokenizer(path, header)
    blocks = header.metadata.get(f"{header.architecture}.block_count", 0)
    if not isinstance(blocks, int) or blocks > len(header.tensors):
        _contradicts(path, f"it names {blocks} layers and holds {len(header.tensors)} tensors")


def supported_architectures() -> list[str]:
    """Return the architectures of which transformers makes decoders, sorted.

    They have llama.cpp's names.
    """
    architectures = import_module("transformers.modeling_gguf_pytorch_utils").GGUF_SUPPORTED_ARCHITECTURES
    # among them are encoders, and types of which the installed version has no model
    names = {name for name in architectures if name.replace("-", "_") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    with suppress(ImportError, AttributeError):  # older versions have one list only
        names |= {*import_module("transformers.integrations.gguf").GGUF_CONFIG_ARCHS}
    # transformers writes some with underscores that llama.cpp writes with hyphens, or in one word
    spelled = {form for name in names for form in (name, name.replace("_", "-"), name.replace("_moe", "moe"))}
    return sorted(spelled - {"general", "tokenizer"})


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert(path: Path, header: GGUFHeader, dtype: str, digest: str, target: Path) -> None:
    action, needed = f"converting {path.name} to {dtype}", header.size * _BYTES[dtype]
    free = make_room(target.parent, needed + 2**26, action)
    tell(
        f"{action}, once: {needed / 1e6:,.0f} MB in {target.parent}, of {free / 1e6:,.0f} MB that are free there; "
        "'millpond models list' says what was converted"
    )
    for folder in target.parent.parent.iterdir():
        remove_left(folder, _UNDER_WAY)
    try:
        with workplace(target.parent, _UNDER_WAY) as scratch:
            _write(path, header, dtype, digest, scratch)
            try:
                scratch.rename(target)
            except OSError:
                if not (target / NOTE).exists():  # else another process was faster
                    raise
    except OSError as error:
        raise OptionError(
            f"{path.name} could not be converted in {target.parent}: {error}; set MILLPOND_CACHE to a folder that can "
            "be written, or remove that one"
        ) from error


def _write(path: Path, header: GGUFHeader, dtype: str, digest: str, folder: Path) -> None:
    described = {name: value for name, value in header.metadata.items() if not name.startswith("tokenizer.")}
    check_config(described, path.name)
    if header.has_tokenizer:
        gguf_tokenizer(path).save_pretrained(folder)
    with _quiet() as read, quick_reading():
        config = _config(path)
        _check_described(path, header, config, take_rope(path, header, config))
        n_tensors = len(header.tensors)
        with progress(
            f"converting {path.name} to {dtype}, reading {header.size / 1e6:,.0f} million numbers",
            lambda: f"{len(read)} of {n_tensors} tensors" if read else "",
        ):
            model = _load(path, dtype, config)
    with progress(f"converting {path.name} to {dtype}, writing safetensors", lambda: _written(folder)), _quiet():
        model.save_pretrained(folder)
    note = {
        "file": path.name,
        "sha256": digest,
        "dtype": dtype,
        "architecture": header.architecture,
        "tokenizer": TOKENIZER_VERSION,
    }
    (folder / NOTE).write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
    folder.chmod(0o755)


def _config(path: Path) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            str(path.parent), gguf_file=path.name, trust_remote_code=False
        )
    except Exception as error:  # transformers raises whatever a damaged value leads to
        _contradicts(path, f"transformers cannot make a configuration of its metadata ({_first_line(error)})")
    return config


def _check_described(path: Path, header: GGUFHeader, config: PreTrainedConfig, rope: RopeTensors) -> None:
    """Refuse metadata that describe more parameters than the tensors hold, or fewer.

    The model is made on meta.
    """
    _refuse_unread(path, [*rope.refused, *unread_metadata(header, config)])
    try:
        with torch.device("meta"):
            model = _AUTO.from_config(config, trust_remote_code=False)
        needed = sum(p.numel() for p in model.parameters())
    except Exception as error:
        raise OptionError(
            f"{path.name}: transformers builds no decoder of it ({_first_line(error)}); use another model, one that "
            "continues texts"
        ) from error
    if needed > header.size:
        _contradicts(path, f"its metadata describe {needed:,} parameters, and its tensors hold {header.size:,}")
    _refuse_unread(path, unread_tensors(header, config, model, rope))


def _refuse_unread(path: Path, missed: list[str]) -> None:
    if missed:
        raise OptionError(
            f"{path.name}: transformers {transformers.__version__} does not read {'; nor '.join(missed)}, so the model "
            "would answer wrongly; use the model's safetensors instead"
        )


def _load(path: Path, dtype: str, config: PreTrainedConfig) -> PreTrainedModel:
    """Return the model without its marks of quantization, which cannot be saved.

    Tensors are shared.
    """
    try:
        source, info = _AUTO.from_pretrained(
            str(path.parent),
            config=config,
            gguf_file=path.name,
            dtype=DTYPES[dtype],
            output_loading_info=True,
            trust_remote_code=False,
            **_dequantized(),
        )
    except NotImplementedError as error:
        raise OptionError(
            f"{path.name}: transformers has no place for its tensors ({_first_line(error)}); use the model's "
            "safetensors instead"
        ) from error
    except Exception as error:
        _contradicts(path, f"transformers cannot load its tensors ({_first_line(error)})")
    if info["missing_keys"]:
        _contradicts(path, f"there is no tensor for {', '.join(sorted(info['missing_keys'])[:3])}")
    _refuse_unread(path, unplaced(sorted(info["unexpected_keys"])))
    config = source.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model: PreTrainedModel = _AUTO.from_config(config, dtype=DTYPES[dtype], trust_remote_code=False)
    model.load_state_dict(source.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = source.generation_config
    return model


def _dequantized() -> dict[str, Any]:
    """Return the argument by which transformers dequantizes; older versions always do."""
    kind = getattr(transformers, "GgufConfig", None)
    return {} if kind is None else {"quantization_config": kind(dequantize=True)}


def _renew_tokenizer(path: Path, folder: Path) -> None:
    """Replace the tokenizer of a folder that an earlier version converted; weights stay."""
    note = read_note(folder / NOTE) | {"tokenizer": TOKENIZER_VERSION}
    try:
        with workplace(folder.parent, _UNDER_WAY) as scratch:
            gguf_tokenizer(path).save_pretrained(scratch)
            (scratch / NOTE).write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
            for file in sorted(scratch.iterdir(), key=lambda file: file.name == NOTE):  # the note is the last
                file.replace(folder / file.name)
    except OSError as error:
        raise OptionError(
            f"{folder} was converted by an earlier version, which cut some texts wrongly, and its tokenizer cannot be "
            f"replaced ({error}); remove the folder, or make it one that can be written"
        ) from error


def _written(folder: Path) -> str:
    """Return bytes of the files of a folder, in words; a file may vanish meanwhile."""
    try:
        return f"{sum(file.stat().st_size for file in folder.iterdir()) / 1e6:,.0f} MB"
    except OSError:
        return ""


def _contradicts(path: Path, why: str) -> NoReturn:
    raise DataError(f"{path.name} is damaged or no complete model: {why}; fetch it again, or use another file")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0][:300]


@contextmanager
def _quiet() -> Iterator[list[None]]:
    """Silence bars and warnings of transformers; its settings come back.

    Yields:
        A list that grows by an entry with each tensor that it reads one after the other.
    """
    legacy: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    tools: Any = transformers.utils.logging
    bars_enabled, level, bar = tools.is_progress_bar_enabled(), tools.get_verbosity(), legacy.tqdm
    tools.disable_progress_bar()
    tools.set_verbosity_error()
    read: list[None] = []

    def counted(tensors: Iterable[Any], **_: Any) -> Iterator[Any]:
        for tensor in tensors:
            read.append(None)
            yield tensor

    legacy.tqdm = counted
    try:
        yield read
    finally:
        legacy.tqdm = bar
        tools.set_verbosity(level)
        if bars_enabled:
            tools.enable_progress_bar()
