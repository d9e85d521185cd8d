"""One forward pass over the tokens of many sequences, each of which attends to its own cache.

The tokens lie one after another in one row, so every linear layer reads its weights once for all of them. At each
attention the row is cut into segments: the next tokens of a group of decoding sequences, which one call serves, or
tokens of one prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millpond.errors import OptionError, UnsupportedModelError, unknown
from millpond.hf.adapter import acting
from millpond.hf.attention import begin_pass, check_window, end_pass, switch_attention
from millpond.hf.attention_inputs import AttentionInputs
from millpond.hf.grad_mode import no_autograd
from millpond.hf.model_profile import ModelProfile
from millpond.hf.model_support import supported, unwrapped
from millpond.hf.native_layers.decoder_layers import use_lean_layers
from millpond.hf.native_layers.linears import use_native_linears
from millpond.hf.shared_keys import readers_of
from millpond.hf.signals.rotary import CHANGING
from millpond.kernels.quantized_weight import FORMATS
from millpond.models.cache_argument import cache_argument
from millpond.models.lean.decode_graph import DecodeGraph
from millpond.models.lean.decoder import GivenRows
from millpond.models.weights.streamed import StreamedLayers
from millpond.runner.image_encoder import ImageEncoder, check_images
from millpond.runner.native_forward import NativeForward
from millpond.runner.packed_cache import (
    FunctionAttention,
    LayerAttend,
    PackedPass,
    Segment,
    SegmentedAttention,
    Served,
    ShapeWatch,
    adapted_rows,
)
from millpond.runner.runner_choice import Runner, check_own_layers
from millpond.runner.state_mixers import CarriedStates, StateShape, find_mixers, use_segments


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Numbers that one layer stores of a token.

    Attributes:
        n_kv_heads: KV heads.
        key_dim: Numbers of a key in each KV head.
        value_dim: Numbers of a value in each KV head.
        window: Positions that a query sees, its own among them; 0 for all.
        index: Index of the layer.
        n_heads: Query heads; 0 where they are not known.
    """

    n_kv_heads: int
    key_dim: int
    value_dim: int
    window: int
    index: int = 0
    n_heads: int = 0

    @property
    def n_queries(self) -> int:
        """Queries of a token: as many as KV heads where that is not known."""
        return self.n_heads or self.n_kv_heads


class PackedModel:
    """A transformers decoder that runs packed passes, until it is closed.

    Args:
        model: The decoder.
        runner: "lean": without the model's modules, whose weights are fused (`NativeForward`); "modules": through them;
            "auto": lean where that gives what the modules give. Passes with hooks go through the modules.
        native_layers: See `compress`; False leaves layers to transformers and torch, so nothing runs lean.
        streamed: The layers of `model` where their weights are read while it runs; it is closed with this.
        weights: "int8" or "int4": the model's matrices become codes, and the model itself cannot run any more; those
            of `streamed` are in codes already.
        deterministic: A row has the same bits, whatever else is in its pass; then it runs lean or not at all.

    Attributes:
        context_length: Most tokens of one sequence; None where the model sets no limit.
        row_bytes: Bytes that one row of a pass takes at most besides weights and KV.
        layers: Shape of what each layer with attention stores.
        readers: Their numbers in the model -> those of the layers that read their keys and store nothing.
        states: Shape of what the other layers hold of a sequence, in a hybrid.
        end_tokens: Ids that end a text, as the model's configuration has them.
        weight_bytes: Bytes of the weights in memory, with the slots of `streamed`.
        runner: The runner that is used, "lean" or "modules".
        deterministic: Whether rows have the same bits in every pass.
        images: Makes embeddings of images; None: the model takes text alone.

    Raises:
        UnsupportedModelError: the model cannot run on packed rows, or not lean; the message says why.
        OptionError: no such runner or format of weights, or runner="lean" or weights with native_layers=False.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        runner: Runner = "auto",
        native_layers: bool = True,
        streamed: StreamedLayers | None = None,
        weights: str | None = None,
        deterministic: bool = False,
    ) -> None:
        check_format(weights)
        check_own_layers(runner, native_layers, weights=weights, deterministic=deterministic)
        if runner not in get_args(Runner):
            raise unknown("runner", runner, get_args(Runner))
        if not native_layers and runner == "lean":
            raise OptionError(
                "native_layers=False leaves layers to transformers and torch, and runner='lean' runs none of them; "
                "leave one of the two out"
            )
        if streamed is not None and (runner == "modules" or not native_layers):
            raise OptionError(
                "weights that are read layer by layer run without the model's modules; leave runner='modules' and "
                "native_layers=False out, or load the model without memory="
            )
        model = unwrapped(model)
        profile = supported(model)
        _check_packable(profile)
        check_images(profile, weights)
        self._streamed = streamed
        self.deterministic = deterministic
        self.model = model
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.context_length = _context_length(profile)
        self.end_tokens = profile.end_tokens
        self.vocabulary = profile.vocabulary
        self.row_bytes = _row_bytes(profile, self.dtype)
        self._picks_rows = "logits_to_keep" in profile.arguments
        self.readers = {number: readers_of(profile, number) for number in profile.attending}
        self._depth = max(profile.depth, profile.n_layers)
        self.states: StateShape | None = None
        self._undo: list[Callable[[], None]] = []
        if streamed is not None:
            self._undo.append(streamed.close)
            runner = "lean"
        try:
            if profile.state_layers:
                self._use_states(profile)
            self._undo.append(switch_attention(profile.config))
            natively = native_layers and streamed is None and weights is None
            if natively:
                self._undo.append(use_native_linears(model))
            bits = None if weights is None or streamed is not None else FORMATS[weights]
            tried = ShapeWatch()
            self._lean = self._make_lean(tried, runner if native_layers else "modules", bits)
            self.layers = _layers_of(profile, self._probe() if self._lean is None else tried)
            self.weight_bytes = self._count_weights()
            if natively and self._lean is None:
                self._undo.append(use_lean_layers(model))
            self.images = ImageEncoder(model, profile) if profile.takes_images else None
        except BaseException:
            self.close()
            raise

    @property
    def runner(self) -> Runner:
        return "modules" if self._lean is None else "lean"

    @property
    def decode_graph(self) -> DecodeGraph | None:
        """Recorded decoding steps; None: steps of this model are launched."""
        return None if self._lean is None else self._lean.graph

    def limit_context(self, most: int | None) -> None:
        """Let texts be shorter than the model's own context; None: as long.

        Raises:
            OptionError: more than the model's context.
        """
        if most is None:
            return
        if self.context_length is not None and most > self.context_length:
            raise OptionError(
                f"max_model_len={most} is more than the {self.context_length} tokens of the model's context; lower it, "
                "or take overflow='rolling' for texts that go on"
            )
        self.context_length = most

    def close(self) -> None:
        """Give the model its own attention back."""
        while self._undo:
            self._undo.pop()()

    @no_autograd
    def forward(
        self, ids: Tensor, positions: Tensor, segments: Sequence[Segment], rows: Tensor, given: GivenRows | None = None
    ) -> Tensor:
        """Run tokens of several texts through the model.

        Args:
            ids: Ids of the tokens, (T,).
            positions: Positions of the tokens in their own texts, (T,).
            segments: Segments that cut all T rows.
            rows: (n,) int64, ascending: rows whose next token is needed.
            given: Rows whose embeddings are given, such as those of images; None: all are looked up by their ids.

        Returns:
            (n, vocabulary): the logits of these rows.

        Raises:
            UnsupportedModelError: deterministic, and the modules may not be bypassed any more.
        """
        split, adapted = SegmentedAttention(segments), adapted_rows(segments)
        if adapted:
            with acting(ModelProfile.of(self.model), adapted):
                return self._run(ids, positions, split, rows, given)
        if self._lean is not None and self._lean.ready():
            return self._lean.forward(ids, positions, split, rows, given)
        if self.deterministic:
            raise UnsupportedModelError(
                "deterministic=True bypasses the model's modules, and they have hooks now or train; remove the hooks, "
                "or call model.eval()"
            )
        return self._run(ids, positions, split, rows, given)

    def check_adapters(self) -> None:
        """Check that a pass can go through the model's modules, where adapters act.

        Raises:
            OptionError: the model runs without them alone: its weights are codes or read layer by layer, or rows have
                the same bits in every pass.
        """
        if self.deterministic or self._streamed is not None or (self._lean is not None and self._lean.code_bytes):
            raise OptionError(
                "the file of gates holds an adapter (--lora), which acts in the model's modules, and weights=, memory= "
                "and deterministic=True run without them; leave them out, or take gates without an adapter"
            )

    def check_second_layer(self) -> None:
        """Check that the keys of the second layer can be computed.

        Raises:
            OptionError: `keys_of_second_layer` needs two layers, and the weights without the model's modules.
        """
        if self._lean is None or len(self.layers) < 2:
            raise OptionError(
                'pick="deviation" compares keys of the second layer, which takes a model of two layers or more that '
                'runs without its modules; give another pick, such as "attention"'
            )

    @no_autograd
    def keys_of_second_layer(self, ids: Tensor) -> Tensor:
        """Return the second layer's keys (n_kv_heads, n, key_dim) after RoPE, for ids (n,).

        Check with `check_second_layer` first.
        """
        assert self._lean is not None, "checked before"
        return self._lean.keys_of_second_layer(ids)

    def _run(
        self, ids: Tensor, positions: Tensor, served: Served, rows: Tensor, given: GivenRows | None = None
    ) -> Tensor:
        """Run `forward` through the modules."""
        begin_pass()
        if isinstance(served, SegmentedAttention):
            served.clear_shared()
        reads_hidden = isinstance(served, SegmentedAttention) and served.reads_hidden
        inputs = AttentionInputs(ModelProfile.of(self.model)) if reads_hidden else None
        cache = PackedPass(served, self.readers, self._depth, inputs)
        options: dict[str, Any] = {"logits_to_keep": rows} if self._picks_rows and len(rows) != len(ids) else {}
        tokens = {"input_ids": ids[None]} if given is None else {"inputs_embeds": self._embedded(ids, given)[None]}
        streamed = nullcontext() if self._streamed is None else self._streamed.in_modules()
        with streamed, nullcontext() if inputs is None else closing(inputs):
            out = self.model(**tokens, position_ids=positions[None], **cache_argument(cache), use_cache=True, **options)
        end_pass()
        if isinstance(served, SegmentedAttention):
            served.clear_shared()
        logits: Tensor = out.logits[0]
        return logits if len(logits) == len(rows) else logits[rows]

    def _embedded(self, ids: Tensor, given: GivenRows) -> Tensor:
        """Return the embeddings (T, width) of tokens, with those that are given."""
        x: Tensor = self.model.get_input_embeddings()(ids)
        return x.index_copy(0, given.rows, given.vectors.to(x.dtype))

    def _count_weights(self) -> int:
        if self._streamed is not None:
            return self._streamed.nbytes
        plain = {id(weight): weight.nbytes for weight in self.model.parameters()}
        return sum(plain.values()) + (0 if self._lean is None else self._lean.code_bytes)

    @no_autograd
    def _use_states(self, profile: ModelProfile) -> None:
        """Let the modules with states run segment by segment."""
        mixers, self.states = find_mixers(self.model, profile)
        self._undo.append(use_segments(mixers))

    @no_autograd
    def _make_lean(self, watch: ShapeWatch, runner: Runner, bits: int | None) -> NativeForward | None:
        """Return the pass without the model's modules; None where they have to run.

        Args:
            watch: Learns what the layers do with the tokens of the trial.
            runner: See `PackedModel`.
            bits: Width of the codes that the matrices become; None: they stay.

        Raises:
            UnsupportedModelError: the model cannot run lean, and runner="lean" or its weights should be quantized.
        """
        if runner == "modules":
            return None

        def run(ids: Tensor, positions: Tensor, attend: LayerAttend) -> Tensor:
            rows = torch.arange(len(ids), device=ids.device)
            return self._run(ids, positions, FunctionAttention(watch.watching(attend)), rows)

        try:
            return NativeForward(self.model, watch.shapes, run, self._streamed, bits, self.deterministic)
        except UnsupportedModelError as error:
            if self.deterministic:
                message = f"deterministic=True needs a model that runs without its modules: {error}"
                raise UnsupportedModelError(message) from error
            if bits is not None or self._streamed is not None:
                named = "memory= and weights= need" if bits is None else "weights= needs"
                raise UnsupportedModelError(f"{named} a model that runs without its modules: {error}") from error
            if runner == "auto":
                return None
            raise UnsupportedModelError(f"{error}; runner='modules' runs it") from error

    @no_autograd
    def _probe(self) -> ShapeWatch:
        """Record the attention of a model that does not run lean, with one token that is not kept."""
        states = None if self.states is None else CarriedStates(self.states)
        watch = ShapeWatch([Segment([], 0, 1, False, states)])
        token = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._run(token, token, watch, token)
        return watch


def check_format(weights: str | None) -> None:
    """Check the format of weights.

    Raises:
        OptionError: no such format of weights.
    """
    if weights is not None and weights not in FORMATS:
        raise unknown("format of weights", weights, FORMATS)


def _layers_of(profile: ModelProfile, watch: ShapeWatch) -> list[LayerShape]:
    missing = [index for index in range(profile.n_layers) if index not in watch.key_shapes]
    if missing:
        raise UnsupportedModelError(f"layer {missing[0]} of {profile.name} hands no keys and values to its cache")
    for index, window in enumerate(profile.windows):
        check_window(profile.name, window, watch.shapes[index].window)
    return [
        LayerShape(*watch.key_shapes[index], profile.windows[index], index, profile.n_heads)
        for index in range(profile.n_layers)
    ]


def _check_packable(profile: ModelProfile) -> None:
    name = profile.name
    if profile.latent is not None:
        raise UnsupportedModelError(
            f"{name} caches latents (MLA) and expands the kept ones of a whole batch in each pass, which packed "
            "rows of many texts do not allow; use compress(model, ...).generate"
        )
    if "position_ids" not in profile.arguments:
        raise UnsupportedModelError(
            f"{name} takes no position_ids, so tokens of several texts cannot run in one row; use "
            "compress(model, ...).generate"
        )


def _context_length(profile: ModelProfile) -> int | None:
    """Return the most tokens of a text, None for no limit.

    Where rotary frequencies change with the length of a pass, it is the length up to which they do not.
    """
    limit, config = profile.position_limit, profile.config
    kinds = getattr(profile.rotary, "rope_type", "default")
    changing = set(kinds.values() if isinstance(kinds, dict) else [kinds]) & set(CHANGING)
    if not changing:
        return limit
    parameters = getattr(config, "rope_parameters", None) or {}
    original = parameters.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    limits = [int(n) for n in (original, limit) if n]
    if not limits:
        raise UnsupportedModelError(
            f"{profile.name} changes its rotary frequencies with the length of a pass "
            f"({', '.join(sorted(changing))}) and does not say from where on"
        )
    return min(limits)


def _row_bytes(profile: ModelProfile, dtype: torch.dtype) -> int:
    """Return the most bytes of a row of a pass besides weights and KV.

    They are its hidden states and logits.
    """
    width = int(profile.config.hidden_size)
    inner = getattr(profile.config, "intermediate_size", None) or 4 * width
    inner = max(width, *inner) if isinstance(inner, Sequence) else max(width, int(inner))  # one per layer, or of all
    return dtype.itemsize * (3 * width + 3 * inner) + 4 * inner + profile.vocabulary * (dtype.itemsize + 4)


def check_tokens(ids: Sequence[int], vocabulary: int) -> None:
    """Check the token ids of a prompt.

    Raises:
        OptionError: no tokens, or an id that the model does not have.
    """
    if not len(ids):
        raise OptionError("the prompt is empty; give at least one token")
    for token in ids:
        if not 0 <= token < vocabulary:
            raise OptionError(f"token id {token} is not one of the model's {vocabulary} (0 to {vocabulary - 1})")
