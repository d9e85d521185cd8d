"""A small vision-language model that describes pictures of nine coloured shapes, and its training.

A picture is a grid of three rows and three columns; a cell is three patches wide and high, so that neighbouring tokens
of the image are alike. The description names every cell, row by row; a question asks about one cell. Model: a CLIP
tower of our own in front of a Llama, in transformers' LLaVA, trained from nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy

from millpond.errors import OptionError
from millpond_lab.train.common.network_run import RunSettings, save_state

COLOURS = {
    "red": (200, 40, 40),
    "green": (40, 160, 50),
    "blue": (50, 70, 210),
    "yellow": (220, 200, 50),
    "purple": (150, 60, 170),
    "white": (240, 240, 240),
}
SHAPES = ("circle", "bar", "triangle", "cross")
#: The cells, row by row.
PLACES = ("top-left", "top", "top-right", "left", "middle", "right", "bottom-left", "bottom", "bottom-right")
SIDE, PATCHES, PIXELS = 3, 3, 8
#: Cells of a picture, tokens of its image, and its width and height in pixels.
CELLS, IMAGE_TOKENS, WIDTH = SIDE**2, (SIDE * PATCHES) ** 2, SIDE * PATCHES * PIXELS
MARKS = ("<pad>", "<bos>", "<image>", "<eos>")
WORDS = (*MARKS, "describe", "?", ":", ",", *PLACES, *COLOURS, *SHAPES)
ID = {word: i for i, word in enumerate(WORDS)}
IMAGE = ID["<image>"]
Task = Literal["description", "question"]


class Grid(NamedTuple):
    """A picture (WIDTH, WIDTH, 3) of values 0 to 1, and the words of each cell, row by row."""

    pixels: npt.NDArray[np.float32]
    cells: tuple[tuple[str, str], ...]


# ---------------------------------------------------------------------- pictures and texts


def draw_grid(rng: np.random.Generator) -> Grid:
    """A picture of random shapes, each a little off the middle of its cell, with noise."""
    cell = PATCHES * PIXELS
    pixels = np.full((WIDTH, WIDTH, 3), 90.0)
    names = []
    for place in range(CELLS):
        colour, shape = list(COLOURS)[rng.integers(len(COLOURS))], SHAPES[rng.integers(len(SHAPES))]
        row, column = divmod(place, SIDE)
        mask = shape_mask(shape, cell, rng.integers(-1, 2, 2), float(rng.uniform(9.0, 11.0)))
        pixels[row * cell : (row + 1) * cell, column * cell : (column + 1) * cell][mask] = COLOURS[colour]
        names.append((colour, shape))
    pixels += rng.normal(0, 8, pixels.shape)
    return Grid((np.clip(pixels, 0, 255) / 255).astype(np.float32), tuple(names))


def shape_mask(shape: str, side: int, shift: Sequence[int], radius: float) -> npt.NDArray[np.bool_]:
    """Which pixels (side, side) of a cell a shape covers."""
    down, right = np.mgrid[:side, :side] - (side - 1) / 2 - np.reshape(shift, (2, 1, 1))
    if shape == "circle":
        covered = down**2 + right**2 <= radius**2
    elif shape == "bar":
        covered = (abs(down) <= 0.35 * radius) & (abs(right) <= radius)
    elif shape == "triangle":
        covered = (abs(right) <= (down + radius) / 2) & (down <= radius)
    else:
        covered = (np.minimum(abs(down), abs(right)) <= 0.3 * radius) & (np.maximum(abs(down), abs(right)) <= radius)
    found: npt.NDArray[np.bool_] = covered
    return found


def description(grid: Grid) -> list[str]:
    """What is to be said of the whole picture: "top-left red circle , top blue cross , ...".

    Every description has the same length.
    """
    said = [word for place, named in zip(PLACES, grid.cells, strict=True) for word in (place, *named, ",")]
    return [*said[:-1], "<eos>"]


class Batch(NamedTuple):
    """Prompts (B, T) and right answers (B, A) as ids, and pictures (B, 3, WIDTH, WIDTH) around 0."""

    prompt: Tensor
    answer: Tensor
    pixels: Tensor


def batch_of(grids: Sequence[Grid], task: Task, places: Sequence[int] = ()) -> Batch:
    """Of pictures, and for questions the cell that each is asked about."""
    begin = ["<bos>", *["<image>"] * IMAGE_TOKENS]
    if task == "description":
        prompts, answers = [[*begin, "describe", ":"]] * len(grids), [description(grid) for grid in grids]
    else:
        prompts = [[*begin, PLACES[place], "?"] for place in places]
        answers = [[*grid.cells[place], "<eos>"] for grid, place in zip(grids, places, strict=True)]
    pixels = torch.from_numpy(np.stack([grid.pixels for grid in grids])).permute(0, 3, 1, 2).contiguous()
    return Batch(_ids(prompts), _ids(answers), (pixels - 0.5) / 0.25)


def _ids(texts: Sequence[Sequence[str]]) -> Tensor:
    return torch.tensor([[ID[word] for word in text] for text in texts])


# ---------------------------------------------------------------------- the model


@dataclass(frozen=True)
class Recipe(RunSettings):
    """Sizes of the model and of its training. batch: pictures of a step."""

    steps: int = 600
    lr: float = 1.5e-3
    batch: int = 16
    width: int = 192
    layers: int = 3
    tower_width: int = 96
    tower_layers: int = 2
    checkpoint_steps: int = 50

    def rate(self, step: int) -> float:
        """It rises, and falls to zero along a cosine."""
        rise = max(1, round(self.warmup * self.steps))
        if step < rise:
            return (step + 1) / rise
        return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, self.steps - rise)))


def build_model(recipe: Recipe) -> Any:
    """A fresh float32 model on the CPU; equal recipes give equal weights."""
    heads = max(1, recipe.width // 32)
    tower = transformers.CLIPVisionConfig(
        hidden_size=recipe.tower_width,
        intermediate_size=2 * recipe.tower_width,
        num_hidden_layers=recipe.tower_layers,
        num_attention_heads=max(1, recipe.tower_width // 32),
        image_size=WIDTH,
        patch_size=PIXELS,
        projection_dim=recipe.tower_width,
    )
    language = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=recipe.width,
        intermediate_size=2 * recipe.width,
        num_hidden_layers=recipe.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=512,
        pad_token_id=ID["<pad>"],
        bos_token_id=ID["<bos>"],
        eos_token_id=ID["<eos>"],
    )
    config = transformers.LlavaConfig(
        vision_config=tower,
        text_config=language,
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        image_seq_length=IMAGE_TOKENS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return transformers.LlavaForConditionalGeneration._from_config(config, attn_implementation="sdpa").eval()


# ---------------------------------------------------------------------- training


def train_model(checkpoint: Path, recipe: Recipe, max_minutes: float | None = None) -> tuple[Any, int]:
    """The model, and how many steps it has made; goes on from `checkpoint` if there is one.

    Raises:
        OptionError: the checkpoint was begun with another recipe.
    """
    model = build_model(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=recipe.betas, weight_decay=0.01)
    step = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        if state["recipe"] != asdict(recipe):
            raise OptionError(f"{checkpoint} was begun with {state['recipe']}; give the same, or another file")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    begun = time.monotonic()
    seconds = 0.0
    while step < recipe.steps and (max_minutes is None or seconds < 60 * max_minutes):
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * recipe.rate(step)
        loss = training_loss(model, training_batches(recipe, step))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        seconds = time.monotonic() - begun
        if step % 10 == 0:
            print(f"step {step} of {recipe.steps}, loss {float(loss.detach()):.4f}, {seconds:.0f} s", flush=True)
        if step % recipe.checkpoint_steps == 0 or step == recipe.steps:
            state = {"recipe": asdict(recipe), "step": step, "model": model.state_dict()}
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            save_state(state | {"optimizer": optimizer.state_dict()}, checkpoint)
    return model, step


def training_batches(recipe: Recipe, step: int) -> list[Batch]:
    """What a step reads: descriptions of three quarters of its pictures, and questions about the rest."""
    rng = np.random.default_rng([recipe.seed, step, 0])
    grids = [draw_grid(rng) for _ in range(recipe.batch)]
    n = len(grids) // 4
    questions = batch_of(grids[:n], "question", rng.integers(0, CELLS, n).tolist()) if n else None
    return [batch_of(grids[n:], "description"), *([questions] if questions else [])]


def training_loss(model: Any, batches: Sequence[Batch]) -> Tensor:
    """Cross entropy of all tokens of the answers."""
    losses, tokens = [], 0
    for batch in batches:
        ids = torch.cat([batch.prompt, batch.answer], 1)
        n = batch.answer.shape[1]
        logits = model(input_ids=ids, pixel_values=batch.pixels, logits_to_keep=n + 1, use_cache=False).logits
        wrong = cross_entropy(logits[:, :-1].flatten(0, 1), batch.answer.flatten(), reduction="sum")
        losses.append(wrong)
        tokens += batch.answer.numel()
    return torch.stack(losses).sum() / tokens


def held_out(n: int, seed: int) -> list[Grid]:
    """Pictures that no step of a training reads: their stream has a number of its own."""
    rng = np.random.default_rng([seed, 0, 1])
    return [draw_grid(rng) for _ in range(n)]
