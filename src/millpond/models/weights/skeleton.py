"""Skeleton of a transformers model: its modules without weights, and the places of these in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from millpond.errors import DataError, MillpondError, OptionError, UnsupportedModelError
from millpond.models.gguf.blocks import GGUFBlocks, blocks_of
from millpond.models.lean.fuse import fusable
from millpond.models.lean.layers import block_of
from millpond.models.untrusted.config import check_config
from millpond.models.untrusted.folder import check_model_folder
from millpond.models.weights.layout import TensorPlace, tensors_of_folder

#: What GPT-NeoX calls its head in files.
_OLD_HEAD = "embed_out.weight"


@dataclass(frozen=True)
class Skeleton:
    """Model whose parameters hold nothing.

    Attributes:
        folder: Folder of its files.
        model: Model with all parameters on "meta".
        layers: Its layers.
        dtype: Dtype of its weights, as they were saved or as requested.
        ends: Tensors outside the layers, by the name of the model's parameter.
        by_layer: Tensors of each layer, by name in the layer.
        tied: The head is the embedding.
    """

    folder: Path
    model: PreTrainedModel
    layers: tuple[nn.Module, ...]
    dtype: torch.dtype
    ends: dict[str, TensorPlace]
    by_layer: tuple[dict[str, TensorPlace], ...]
    tied: bool

    @cached_property
    def tokens_name(self) -> str:
        """Name of the parameter with the embeddings."""
        return self._name_of(self.model.get_input_embeddings())

    @cached_property
    def head_name(self) -> str:
        """Name of the parameter with the last matrix; that of the embeddings if tied."""
        untyped: Any = self.model
        return self.tokens_name if self.tied else self._name_of(untyped.get_output_embeddings())

    def _name_of(self, module: Any) -> str:
        """Return the name of the weight of a module."""
        weights = self.model.named_parameters(remove_duplicate=False)
        return next(name for name, weight in weights if weight is module.weight)

    @cached_property
    def blocks(self) -> dict[str, GGUFBlocks]:
        """Return matrices of the GGUF file that the folder was converted from, by tensor name.

        Raises:
            DataError: one of the files cannot be read.
        """
        tensors = {place.name: place for part in (self.ends, *self.by_layer) for place in part.values()}
        return blocks_of(self.folder, tensors, self.model.config)

    @classmethod
    def of(cls, folder: Path, dtype: torch.dtype | None = None) -> Skeleton:
        """Read configuration and headers; allocate no weight.

        Args:
            folder: Folder of the model.
            dtype: Dtype that the model computes in; None for the one in which all weights were saved.

        Raises:
            OptionError: no folder with a model in safetensors files.
            DataError: a damaged file, or one that does not
                fit the configuration. UnsupportedModelError: a family whose layers do not run natively.
        """
        check_model_folder(folder)
        try:
            check_config(PreTrainedConfig.get_config_dict(folder)[0], f"{folder}/config.json")
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except MillpondError:
            raise
        except Exception as error:  # whatever the classes of transformers raise of what a stranger wrote
            reason = " ".join(str(error).strip().splitlines()[:2])
            raise OptionError(f"{folder} is no folder with a model: {reason}") from error
        tensors = tensors_of_folder(folder)
        if getattr(config, "quantization_config", None) is not None:
            raise UnsupportedModelError(f"{folder} holds quantized weights, which are not read layer by layer yet")
        dtype = _dtype_of(folder, tensors) if dtype is None else dtype
        model = _on_meta(config, dtype)
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        prefix, layers = _layers_of(model)
        try:
            for layer in layers:
                block_of(layer, fusable)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(
                f"{type(model).__name__}: {error}; layers are read one by one only in models built as Llama, Mistral, "
                "Qwen2, Qwen3, OPT or GPT-NeoX. Load it without memory= and weights="
            ) from error
        return cls(folder, model, layers, dtype, *_sorted_out(model, folder, tensors, prefix, len(layers)))


def _dtype_of(folder: Path, tensors: dict[str, TensorPlace]) -> torch.dtype:
    """Return the one dtype of all weights.

    Raises:
        UnsupportedModelError: the weights are of several dtypes.
    """
    dtypes = {place.dtype for place in tensors.values() if place.dtype.is_floating_point}
    if len(dtypes) != 1:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "none"
        raise UnsupportedModelError(
            f"the weights in {folder} are of several dtypes, or none ({names}); save the model in one with "
            "save_pretrained, or name one with dtype= where weights= packs them in memory"
        )
    return dtypes.pop()


def _on_meta(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model of a configuration with all parameters on "meta".

    Raises:
        UnsupportedModelError: no causal language model, or one with buffers that cannot be made without its weights.
    """
    families: Any = AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model: PreTrainedModel = families.from_config(config, dtype=dtype, trust_remote_code=False)
    except ValueError as error:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} is no causal language model: {str(error).splitlines()[0]}"
        ) from error
    model.train(False)
    for name, module in list(model.named_modules()):
        if not module._buffers:
            continue
        if name.split(".")[-1] != "rotary_emb":
            raise UnsupportedModelError(
                f"{type(model).__name__}: {name or 'the model'} has buffers, which are not made without its "
                "weights; load it without memory= and weights="
            )
        parent = model.get_submodule(name.rpartition(".")[0])
        kind: Any = type(module)
        setattr(parent, name.rpartition(".")[2], kind(config=config).train(False))
    return model


def _layers_of(model: Any) -> tuple[str, tuple[nn.Module, ...]]:
    """Return the name of the list of layers, and the layers.

    Raises:
        UnsupportedModelError: they are elsewhere.
    """
    base = model.base_model
    base = getattr(base, "decoder", base)
    layers = getattr(base, "layers", None)
    name = next((name for name, module in model.named_modules() if module is layers), None)
    if not isinstance(layers, nn.ModuleList) or name is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no list of layers where Llama, Mistral, Qwen2, Qwen3, OPT and GPT-NeoX have "
            "it, so they cannot be read one by one; load it without memory= and weights="
        )
    return name + ".", tuple(layers)


def _sorted_out(
    model: PreTrainedModel, folder: Path, tensors: dict[str, TensorPlace], prefix: str, n_layers: int
) -> tuple[dict[str, TensorPlace], tuple[dict[str, TensorPlace], ...], bool]:
    """Return tensors outside the layers, those of each layer, and whether the head is tied.

    Raises:
        DataError: a tensor is missing, or has another shape than the configuration says.
    """
    untyped: Any = model
    head = untyped.get_output_embeddings()
    head_name = next((name for name, module in model.named_modules() if module is head), "")
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    ends: dict[str, TensorPlace] = {}
    by_layer: tuple[dict[str, TensorPlace], ...] = tuple({} for _ in range(n_layers))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if tied and name == f"{head_name}.weight":
            continue
        spellings = [name, name.removeprefix(model.base_model_prefix + ".")]
        if name == f"{head_name}.weight":
            spellings.append(_OLD_HEAD)
        place = next((tensors[spelling] for spelling in spellings if spelling in tensors), None)
        if place is None:
            raise DataError(f"{folder} has no tensor {name!r}, which its configuration calls for")
        if place.shape != tuple(parameter.shape):
            raise DataError(
                f"{name!r} in {place.path} has shape {list(place.shape)}, and the configuration says "
                f"{list(parameter.shape)}"
            )
        if name.startswith(prefix):
            index, _, inside = name.removeprefix(prefix).partition(".")
            by_layer[int(index)][inside] = place
        else:
            ends[name] = place
    return ends, by_layer, tied


@contextmanager
def with_parameters(module: nn.Module, parameters: dict[str, nn.Parameter]) -> Iterator[None]:
    """Put other parameters into a module, by name; its own come back at the end."""
    holders: list[tuple[dict[str, Any], str]] = []
    for name in parameters:
        owner, _, field = name.rpartition(".")
        holders.append((module.get_submodule(owner)._parameters, field))
    before = [module_parameters[field] for module_parameters, field in holders]
    for (module_parameters, field), parameter in zip(holders, parameters.values(), strict=True):
        module_parameters[field] = parameter
    try:
        yield
    finally:
        for (module_parameters, field), parameter in zip(holders, before, strict=True):
            module_parameters[field] = parameter
