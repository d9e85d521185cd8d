"""The engine's two runners: through the modules or around them, the tokens are the same."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from millpond.engine.engine import Engine
from millpond.engine.llm import LLM
from millpond.engine.request import CacheOptions
from millpond.errors import OptionError
from millpond.runner.packed_model import PackedModel
from tests.helpers.engine.helpers import add, ask, finish, greedy, tokens
from tests.helpers.hf.families import family

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "opt", "gpt_neox"]
KEPT = {
    "full": CacheOptions(method="full"),
    "h2o": CacheOptions(method="h2o", budget="30%"),
    "snapkv": CacheOptions(method="snapkv", budget="30%"),
    "ada": CacheOptions(method="ada", budget="30%"),
    "int4": CacheOptions(method="full", codec="int4"),
}


@cache
def wide(name: str) -> Any:
    """A model whose heads have 16 channels, as codes want them."""
    options: dict[str, Any] = {"hidden_size": 64}
    options |= {"word_embed_proj_dim": 64} if name == "opt" else {"head_dim": 16} if name == "qwen3" else {}
    return family(name).make(**options)


def answers(runner: Any, name: str, step_tokens: int) -> dict[str, list[int]]:
    """Of several requests beside each other, each kept in another way."""
    engine = Engine(wide(name), method="full", max_step_tokens=step_tokens, page_slots=4, runner=runner)
    assert engine._model.runner == runner
    add(engine, *(ask(n, greedy(10), f"{kept} {n}", cache=cache) for kept, cache in KEPT.items() for n in (40, 57)))
    done = finish(engine)
    engine.close()
    return {key: tokens(output) for key, output in done.items()}


@pytest.mark.covering
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("step_tokens", [16, 500])
def test_tokens_are_those_of_the_modules(name: str, step_tokens: int) -> None:
    found = answers("lean", name, step_tokens)
    assert len(found) == 10
    assert found == answers("modules", name, step_tokens)


def test_passes_that_somebody_watches_go_through_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    model = family("llama").make()
    through: list[int] = []
    real = PackedModel._run

    def run(self: PackedModel, ids: Tensor, *rest: object) -> Tensor:
        through.append(len(ids))
        return real(self, ids, *rest)  # type: ignore[arg-type]

    engine = Engine(model, method="h2o", budget="30%", page_slots=4)
    monkeypatch.setattr(PackedModel, "_run", run)
    add(engine, ask(40, greedy(12)))
    for _ in range(5):
        engine.step()
    assert not through
    seen: list[torch.Size] = []
    hook = model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    engine.step()
    engine.step()
    hook.remove()
    done = finish(engine)
    engine.close()
    assert through == [1, 1]
    assert seen == [(1, 1, 32)] * 2
    plain = Engine(model, method="h2o", budget="30%", page_slots=4, runner="modules")
    add(plain, ask(40, greedy(12)))
    assert tokens(finish(plain)["40"]) == tokens(done["40"])
    plain.close()


def test_layers_are_left_to_torch_where_that_is_asked() -> None:
    model = family("llama").make()
    answers = []
    settings: list[tuple[Any, bool]] = [("auto", True), ("modules", True), ("auto", False)]
    for runner, native_layers in settings:
        with LLM(model, method="h2o", budget="30%", runner=runner, native_layers=native_layers) as llm:
            assert llm.engine._model.runner == ("lean" if (runner, native_layers) == ("auto", True) else "modules")
            if llm.engine._model.runner == "modules":
                assert any("forward" in module.__dict__ for module in model.modules()) == native_layers
            answers.append(llm.generate([list(range(2, 30))], greedy(5))[0].completions[0].token_ids)
    assert answers[0] == answers[1] == answers[2]
    with pytest.raises(OptionError, match="leave one of the two out"):
        LLM(model, native_layers=False, runner="lean")
