"""Networks that others released: read as they are, refused where they are torn, of another model, or code."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from millpond.errors import CacheMismatchError, DataError
from millpond.policy.trained.file import hidden_networks_of, save_heads
from millpond.policy.trained.gelu_score import GeluScore
from millpond.policy.trained.hidden_networks import HiddenNetworks
from millpond.policy.trained.imported import imported
from millpond.policy.trained.linear_score import LinearScore
from millpond.policy.trained.sink_gate import SinkGate

#: Two layers of a model: hidden states of 12 numbers, 2 KV heads.
SHAPES = [(12, 2), (12, 2)]


def module(middle: int | None) -> nn.Module:
    """The network of one layer."""
    if middle is None:
        return nn.Linear(12, 2)
    return nn.Sequential(nn.Linear(12, middle), nn.GELU(), nn.Linear(middle, 2))


def folder(path: Path, middle: int | None = None, **changes: Any) -> Path:
    """A folder in the form of kvpress 0.5.5; `changes` to its configuration."""
    torch.manual_seed(0)
    layers = nn.ModuleList([module(middle)] * 2)
    path.mkdir()
    tensors = {f"layers.{name}": part.detach().clone() for name, part in layers.state_dict().items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = {"model_type": "kvzap", "input_dim": 12, "hidden_dim": middle, "output_dim": 2, "n_modules": 2}
    (path / "config.json").write_text(json.dumps(config | changes))
    return path


@pytest.mark.parametrize("middle", [None, 3])
def test_a_folder_scores_as_its_modules_do(middle: int | None, tmp_path: Path) -> None:
    layers = imported(folder(tmp_path / "kvzap", middle), SHAPES)
    torch.manual_seed(0)
    own = module(middle)
    x = torch.randn(5, 12)
    assert [type(layer) for layer in layers] == [LinearScore if middle is None else GeluScore] * 2
    assert torch.allclose(layers[1].raw(x), own(x), atol=1e-6)
    save_heads(HiddenNetworks(layers, "mark", "name"), tmp_path / "own.safetensors")
    read = hidden_networks_of((tmp_path / "own.safetensors").read_bytes(), "own")
    assert torch.allclose(read.scores(0, x[None], 2)[0].T, own(x), atol=2e-2)


@pytest.mark.parametrize(
    ("changes", "error", "told"),
    [
        ({"model_type": "llama"}, DataError, "model_type is not 'kvzap'"),
        ({"input_dim": 0}, DataError, "a size of it is 0"),
        ({"output_dim": True}, DataError, "a size of it is True"),
        ({"input_dim": 1 << 40}, CacheMismatchError, "take those of this model"),
        ({"n_modules": 3}, CacheMismatchError, "3 networks"),
        ({"hidden_dim": 1 << 40}, DataError, "do not make 2 networks"),
    ],
)
def test_a_configuration_that_does_not_fit(changes: Any, error: type[Exception], told: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=told):
        imported(folder(tmp_path / "kvzap", **changes), SHAPES)


def test_shapes_are_checked_before_numbers_are_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"layers\.0\.0\.weight is \[3, 12\], not \[4, 12\]"):
        imported(folder(tmp_path / "kvzap", 3, hidden_dim=4), SHAPES)


def test_torn_and_not_finite(tmp_path: Path) -> None:
    file = folder(tmp_path / "kvzap") / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-8])
    with pytest.raises(DataError, match="copy it again"):
        imported(file.parent, SHAPES)
    file.write_bytes(content[:-4] + b"\x00\x00\xc0\x7f")
    with pytest.raises(DataError, match="not finite"):
        imported(file.parent, SHAPES)
    (file.parent / "config.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match="no configuration"):
        imported(file.parent, SHAPES)


def states() -> list[dict[str, Tensor]]:
    """Two gates as the authors store them: group 3, 4 sinks, d = 5."""
    torch.manual_seed(1)
    sizes = {
        "q_proj.weight": (2 * 3 * 5, 12),
        "q_proj.bias": (2 * 3 * 5,),
        "k_proj.weight": (2 * 5, 12),
        "q_norm.weight": (5,),
        "k_norm.weight": (5,),
        "k_base": (2, 1, 4, 5),
        "b": (2, 1, 3),
    }
    return [{name: torch.randn(*size) for name, size in sizes.items()} for _ in range(2)]


def authors(state: dict[str, Tensor], h: Tensor) -> Tensor:
    """(KV heads, n): the gate as the paper has it, of a state dict, in batched products."""

    def norm(x: Tensor, factors: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * factors

    q = norm((h @ state["q_proj.weight"].T + state["q_proj.bias"]).view(-1, 2, 3, 5), state["q_norm.weight"])
    k = norm((h @ state["k_proj.weight"].T).view(-1, 2, 1, 5), state["k_norm.weight"])
    z = (q * k).sum(-1) / 5**0.5 + state["b"][:, 0]
    base = torch.einsum("nhgd,hsd->nhgs", q, state["k_base"][:, 0]) / 5**0.5
    return (1 / (1 + (base - z[..., None]).exp().sum(-1))).mean(-1).T


@pytest.mark.parametrize("wrapped", [True, False])
def test_gates_score_as_their_state_dicts_say(wrapped: bool, tmp_path: Path) -> None:
    file, own = tmp_path / "gates.pt", states()
    torch.save({"module": own, "loss": [0.5, 0.4]} if wrapped else own, file)
    layers, h = imported(file, SHAPES), torch.randn(7, 12)
    for layer, state in zip(layers, own, strict=True):
        assert isinstance(layer, SinkGate)
        assert torch.allclose(layer.raw(h).T, authors(state, h), atol=1e-6)


class Evil:
    """What a pickle of code looks like."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return Path.touch, (Path("evil"),)  # type: ignore[return-value]


def test_no_code_of_a_file_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"module": states(), "more": Evil()}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Evil()))
    (tmp_path / "c.pt").write_bytes(b"nothing")
    for name in "abc":
        with pytest.raises(DataError, match="cannot be read as weights alone"):
            imported(tmp_path / f"{name}.pt", SHAPES)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        (lambda s: s.pop(), CacheMismatchError, "1 gates"),
        (lambda s: s[0].pop("b"), DataError, "gate 0 has the parts"),
        (lambda s: s[1].update({"k_proj.weight": torch.zeros(10, 13)}), CacheMismatchError, "k_proj.weight of gate 1"),
        (lambda s: s[1].update({"k_base": torch.zeros(2, 4, 5)}), CacheMismatchError, "k_base of gate 1"),
        (lambda s: s[0].update({"q_proj.bias": torch.zeros(29)}), CacheMismatchError, "q_proj.bias of gate 0"),
        (lambda s: s[0]["b"].fill_(torch.nan), DataError, "not finite"),
        (lambda s: s[0].update({"b": torch.tensor(1.0)}), DataError, "gate 0 has a part"),
        (lambda s: s[0].update({"k_base": torch.tensor(1.0)}), DataError, "gate 0 has a part"),
        (lambda s: s[1].update({"q_norm.weight": torch.zeros(0)}), DataError, "gate 1 has a part"),
        (lambda s: s.append("x"), DataError, "no list of state dicts"),
    ],
)
def test_gates_that_do_not_fit(change: Any, error: type[Exception], told: str, tmp_path: Path) -> None:
    own: list[Any] = states()
    change(own)
    torch.save({"module": own}, tmp_path / "gates.pt")
    with pytest.raises(error, match=told):
        imported(tmp_path / "gates.pt", SHAPES)
