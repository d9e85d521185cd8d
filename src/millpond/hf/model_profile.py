"""Properties of a model that Millpond depends on, read once and passed down."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from millpond.errors import UnsupportedModelError

#: Kind of an attention layer that sees all positions.
FULL = "full_attention"
#: Kinds of layers with attention and a recurrent state side by side, and the kind of their attention.
BOTH = {"hybrid": FULL, "hybrid_sliding": "sliding_attention"}
#: Kinds of layers that hold a recurrent or convolution state and no entries, and of those that hold nothing.
STATE_ONLY, NEITHER = {"linear_attention", "conv"}, {"moe", "mlp"}
#: Families whose states begin at zero in a pass of several tokens, whatever came before it.
RESTARTING = {"jamba", "zamba"}
#: Families whose layers rotate only where they have a sliding window, in a model that has such layers.
ROTATE_IN_WINDOWS = {"cohere2", "exaone4", "afmoe"}
#: Names in model families of the last linear map of their attention.
PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj", "wo")
#: Names in configurations of the ids of tokens for pictures and films.
IMAGE_IDS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")


class LatentShape(NamedTuple):
    """Numbers that a layer of latents (MLA) stores of a token: the latent and a rotated part."""

    latent_dim: int
    rope_dim: int


class OutputProjection(NamedTuple):
    """Name and parent of the last linear map of an attention layer.

    It is looked up when it is used, since it may be replaced.
    """

    module: nn.Module
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class ModelProfile:
    """Properties of a model at the moment when `of` reads it.

    It is made for one call and passed down; nothing keeps it after the call. Configurations and modules change in
    place, and to see that they have not takes the same walk over the modules, so no reading is stored: one of a model
    of 30 layers takes 1 ms.

    Attributes:
        name: Name of the model's class.
        config: Configuration of its language side.
        outer_type: Model type of the whole.
        modules: Modules whose calls begin or belong to a pass: the model, and inside it the decoders of the language
            side, outermost first.
        decoders: Those of them that have the language side's configuration.
        depth: Layers of all kinds.
        n_layers: Layers with attention, whose entries a cache holds; 0 if the configuration names none. Attributes of
            each layer are of these, numbered from 0.
        attending: Numbers that these have in the model.
        shared: For the number of a layer without keys of its own, the number of the attending layer whose entries it
            reads; such a layer holds nothing and is not among the attending ones.
        state_layers: Numbers of the layers that hold recurrent or convolution states, in a hybrid; a layer may be both.
        restarts: Whether these begin at zero in each pass of several tokens, so that only the first pass may have
            several.
        n_heads: Query heads; 0 if none is named, or each layer has its own number.
        layer_types: Kind of each layer.
        windows: Positions that a query of each layer sees, its own among them; 0 for all.
        sliding: Whether the configuration names a window at all.
        latent: Numbers stored of a token in place of keys and values (MLA); None for keys and values.
        rotary: Module that computes cosines and sines for (x, position_ids).
        apply_rotary: Function by which its attention rotates queries and keys.
        unrotated: Layers that do not rotate, in a model where others do.
        position_limit: Tokens that the model has positions for; None if its configuration sets no limit.
        vocabulary: Number of tokens that it knows.
        begin_tokens: Ids that begin a text.
        end_tokens: Ids that end a text.
        image_ids: Ids of tokens for pictures and films.
        takes_images: Whether the language side is one part of several.
        arguments: Names of the parameters of its `forward`.
        output_projections: Output projection by layer.
    """

    name: str
    config: PreTrainedConfig
    outer_type: str
    modules: tuple[nn.Module, ...]
    decoders: tuple[PreTrainedModel, ...]
    depth: int
    n_layers: int
    attending: tuple[int, ...]
    shared: dict[int, int]
    state_layers: tuple[int, ...]
    restarts: bool
    n_heads: int
    layer_types: tuple[str, ...]
    windows: tuple[int, ...]
    sliding: bool
    latent: LatentShape | None
    rotary: nn.Module | None
    apply_rotary: Callable[..., Any] | None
    unrotated: frozenset[int]
    position_limit: int | None
    vocabulary: int
    begin_tokens: tuple[int, ...]
    end_tokens: frozenset[int]
    image_ids: frozenset[int]
    takes_images: bool
    arguments: frozenset[str]
    output_projections: dict[int, OutputProjection]

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelProfile:
        """Read a model, also one that Millpond does not run on."""
        config: PreTrainedConfig = model.config.get_text_config(decoder=True)
        all_modules = list(model.modules())
        decoders = tuple(m for m in all_modules if isinstance(m, PreTrainedModel) and m.config is config)
        modules: tuple[nn.Module, ...] = tuple(dict.fromkeys([model, *decoders]))
        depth = int(named(config, "num_hidden_layers") or 0)
        kinds = tuple(named(config, "layer_types") or [FULL] * depth)
        shared = _shared(config, kinds)
        attending = tuple(
            n for n, kind in enumerate(kinds[:depth]) if kind not in STATE_ONLY | NEITHER and n not in shared
        )
        nth = {number: n for n, number in enumerate(attending)}
        projections = _output_projections(modules[-1], kinds)
        return cls(
            name=type(model).__name__,
            config=config,
            outer_type=model.config.model_type,
            modules=modules,
            decoders=decoders,
            depth=depth,
            n_layers=len(attending),
            attending=attending,
            shared=shared,
            state_layers=tuple(n for n, kind in enumerate(kinds[:depth]) if kind in STATE_ONLY or kind in BOTH),
            restarts=config.model_type in RESTARTING,
            n_heads=int(named(config, "num_attention_heads") or 0),
            layer_types=tuple(BOTH.get(kinds[number], kinds[number]) for number in attending),
            windows=_windows(config, attending),
            sliding=bool(named(config, "sliding_window")),
            latent=_latent(config),
            rotary=_rotary(decoders),
            apply_rotary=_apply_rotary(all_modules),
            unrotated=frozenset(nth[number] for number in _unrotated(all_modules, config, kinds) if number in nth),
            position_limit=getattr(config, "max_position_embeddings", None),
            vocabulary=int(getattr(config, "vocab_size", None) or 0),
            begin_tokens=_ids(getattr(config, "bos_token_id", None)),
            end_tokens=frozenset(_end_tokens(getattr(model, "generation_config", None), config)),
            image_ids=frozenset(i for i in (getattr(model.config, n, None) for n in IMAGE_IDS) if isinstance(i, int)),
            takes_images=config is not model.config,
            arguments=frozenset(inspect.signature(model.forward).parameters),
            output_projections={nth[number]: projection for number, projection in projections.items() if number in nth},
        )


def named(config: PreTrainedConfig, field: str) -> Any:
    """Return a field of a configuration; None if it is missing, or each layer has its own."""
    try:
        return getattr(config, field, None)
    except RuntimeError:
        return None


def _shared(config: PreTrainedConfig, kinds: tuple[str, ...]) -> dict[int, int]:
    """Return which layers read the keys of the last layer of their kind that has some.

    Raises:
        UnsupportedModelError: some do, and this version of transformers does not say which.
    """
    if not named(config, "num_kv_shared_layers"):
        return {}
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is None:
        raise UnsupportedModelError(
            f"{config.num_kv_shared_layers} layers of this model read the keys of others, and transformers "
            f"{transformers.__version__} does not say which; upgrade it to 5.23 or newer"
        )
    owners: dict[str, int] = {}
    shared: dict[int, int] = {}
    for number, (kind, mode) in enumerate(zip(kinds, modes, strict=True)):
        if mode == "reuse":
            shared[number] = owners[kind]
        else:
            owners[kind] = number
    return shared


def _windows(config: PreTrainedConfig, attending: tuple[int, ...]) -> tuple[int, ...]:
    window = int(named(config, "sliding_window") or 0)
    kinds = named(config, "layer_types")
    if kinds is None:
        return (window if getattr(config, "use_sliding_window", True) else 0,) * len(attending)
    return tuple(0 if BOTH.get(kinds[n], kinds[n]) == FULL else window for n in attending)


def _latent(config: PreTrainedConfig) -> LatentShape | None:
    if named(config, "kv_lora_rank") is None:
        return None
    return LatentShape(int(config.kv_lora_rank), int(config.qk_rope_head_dim))


def _rotary(decoders: Sequence[nn.Module]) -> nn.Module | None:
    for decoder in decoders:
        for name, module in decoder.named_modules():
            if name.split(".")[-1] == "rotary_emb":
                rotary: nn.Module = module
                return rotary
    return None


def _apply_rotary(modules: Sequence[nn.Module]) -> Callable[..., Any] | None:
    for module in modules:
        if type(module).__name__.endswith("Attention"):
            apply_rotary: Callable[..., Any] | None = getattr(
                sys.modules[type(module).__module__], "apply_rotary_pos_emb", None
            )
            if apply_rotary is not None:
                return apply_rotary
    return None


def _unrotated(modules: Sequence[nn.Module], config: PreTrainedConfig, types: tuple[str, ...]) -> frozenset[int]:
    windowed = config.model_type in ROTATE_IN_WINDOWS and named(config, "sliding_window")
    return frozenset(
        index
        for module in modules
        if (index := _layer(module)) is not None
        if not getattr(module, "use_rope", True) or (windowed and types[index : index + 1] == (FULL,))
    )


def _layer(module: nn.Module) -> int | None:
    """Return the number that the modules of an attention layer have."""
    # getattr looks for it in parameters and modules too, and takes 20 times as long
    index = vars(module).get("layer_idx")
    return index if isinstance(index, int) else None


def _output_projections(decoder: nn.Module, kinds: tuple[str, ...]) -> dict[int, OutputProjection]:
    projections: dict[int, OutputProjection] = {}
    for module in decoder.modules():
        index = _layer(module)
        if index is None or (kinds[index : index + 1] and kinds[index] in BOTH and not _attends(module)):
            continue
        name = next((name for name in PROJECTIONS if isinstance(getattr(module, name, None), nn.Module)), None)
        if name is not None:
            projections[index] = OutputProjection(module, name)
    return projections


def _attends(module: nn.Module) -> bool:
    """Whether a module of a layer that has attention and a state is its attention."""
    return "Attention" in type(module).__name__


def _end_tokens(*configs: Any) -> tuple[int, ...]:
    end_tokens = (getattr(config, "eos_token_id", None) for config in configs)
    return _ids(next((ids for ids in end_tokens if ids is not None), None))


def _ids(ids: Any) -> tuple[int, ...]:
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (ids,)


def entry_dims(profile: ModelProfile) -> list[tuple[int, int]] | None:
    """Return the channels of a key and of a value in the layers by the configuration.

    None if it does not name them, or for latents.
    """
    config = profile.config
    hidden = named(config, "hidden_size")
    key = named(config, "head_dim") or (hidden // profile.n_heads if hidden and profile.n_heads else None)
    if not isinstance(key, int) or profile.latent is not None:
        return None
    value = named(config, "v_head_dim") or key
    return [(key, int(value))]
