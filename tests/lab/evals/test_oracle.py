"""The oracle holds most of the attention that will be paid, at the same budget and bytes as any other method."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import millpond as mp
from millpond.errors import CacheMismatchError, OptionError
from millpond.hf.compress import compress
from millpond.methods import METHODS
from millpond.policy.layer_allocation import EvenLayers
from millpond.policy.view import View
from millpond_lab.evals.candidates.candidate import find_candidate
from millpond_lab.evals.candidates.oracle import Oracle, PrecomputedScore, Tables, foresee, given
from millpond_lab.evals.decoding.batch import BatchReader, EncodedPrompt, EncodedQuestion, PromptBatch, encode
from millpond_lab.evals.sample import Question, Sample
from millpond_lab.evals.spec import Spec
from tests.helpers.evals.small import TinyTask, examined, tiny_model, tiny_samples, tiny_tokenizer, with_stop
from tests.helpers.matrix.models import llama

BUDGET = 12


class Spelled:
    """Stands for a tokenizer: token n is spelled "n "; nothing ends a text."""

    eos_token_id = None

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(f"{i} " for i in ids)


def tokens(count: int, seed: int) -> tuple[int, ...]:
    drawn: list[int] = torch.randint(2, 96, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tuple(drawn)


def prompt(length: int = 40, questions: int = 1, seed: int = 0, target: int = 9) -> EncodedPrompt:
    asked = []
    for i in range(questions):
        text = Question("", max_new_tokens=6)
        targets = (tokens(target, 100 + seed + i),) if target else ()
        asked.append(EncodedQuestion(i, text, tokens(4 + i, 50 + seed + i), targets))
    return EncodedPrompt(Sample(f"s{seed}", "", tuple(a.question for a in asked)), tokens(length, seed), tuple(asked))


def batch(*prompts: EncodedPrompt, protocol: Any = "agnostic", kind: Any = "perplexity") -> PromptBatch:
    return PromptBatch(protocol, kind, prompts)


def look(*prompts: EncodedPrompt, heads: str = "gqa", **how: Any) -> Tables:
    statistics = how.pop("statistics", "later")
    return foresee(llama(heads), Spelled(), batch(*prompts, **how), statistics=statistics)  # type: ignore[arg-type]


@lru_cache(maxsize=4)
def eager(heads: str, ids: tuple[int, ...]) -> list[Tensor]:
    """Attention (Hq, n, n) of each layer, by transformers itself."""
    model = llama(heads)
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return [a[0] for a in model(torch.tensor([ids]), output_attentions=True).attentions]
    finally:
        model.set_attn_implementation(before)


def by_group(a: Tensor) -> Tensor:
    """(Hq, n, n) -> (2, n): column sums over the query heads of both KV heads."""
    return a.view(2, -1, *a.shape[1:]).sum((1, 2))


def whole(p: EncodedPrompt, question: int = 0) -> tuple[int, ...]:
    """All tokens that the full cache reads: the last one of the target is not read."""
    asked = p.asked[question]
    return p.opening + asked.tokens + asked.targets[0][:-1]


# ------------------------------------------------------------------ the tables


@pytest.mark.parametrize("heads", ["mha", "gqa"])
@pytest.mark.parametrize("statistics", ["later", "all"])
def test_tables_are_the_columns_of_later_rows(heads: str, statistics: str) -> None:
    p = prompt()
    tables = look(p, heads=heads, statistics=statistics)
    assert sorted(tables) == [(0, 0), (1, 0)]
    for layer, a in enumerate(eager(heads, whole(p))):
        assert sorted(tables[layer, 0]) == [40, 44]  # after the opening, and after the question
        for moment, table in tables[layer, 0].items():
            rows = a[:, (moment if statistics == "later" else 0) :]
            assert torch.allclose(table.double(), by_group(rows), atol=1e-5)


def test_prompts_of_a_batch_do_not_mix() -> None:
    first, second = prompt(40), prompt(27, seed=7)
    together = look(first, second)
    for index, p in enumerate((first, second)):
        alone = look(p)
        for layer in (0, 1):
            assert list(together[layer, index]) == list(alone[layer, 0])
            for moment, table in alone[layer, 0].items():
                assert torch.allclose(together[layer, index][moment][:, : table.shape[1]], table, atol=1e-5)


def test_questions_on_one_context_are_summed() -> None:
    p = prompt(questions=2)
    tables = look(p)
    for layer in (0, 1):
        later = [by_group(eager("gqa", whole(p, i))[layer][:, 40:])[:, :40] for i in (0, 1)]
        assert torch.allclose(tables[layer, 0][40][:, :40].double(), later[0] + later[1], atol=1e-5)
        assert sorted(tables[layer, 0]) == [40, 44, 45]


def test_turns_look_to_the_last_one() -> None:
    p = prompt(questions=2)
    ids = whole(p) + p.asked[0].targets[0][-1:] + p.asked[1].tokens + p.asked[1].targets[0][:-1]
    tables = look(p, protocol="turns")
    for layer, a in enumerate(eager("gqa", ids)):
        assert torch.allclose(tables[layer, 0][40].double(), by_group(a[:, 40:]), atol=1e-5)


def test_a_decoded_answer_is_the_full_cache_s_own() -> None:
    p = prompt(target=0)
    tables = look(p, kind="generate")
    model, ids = llama("gqa"), list(p.opening + p.asked[0].tokens)
    with torch.no_grad():
        for _ in range(5):  # the last of its six tokens is not read
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    for layer, a in enumerate(eager("gqa", tuple(ids))):
        assert torch.allclose(tables[layer, 0][40].double(), by_group(a[:, 40:]), atol=1e-5)


# ------------------------------------------------------------------ the upper bound


def kept_mass(method: Any, tables: Tables, opening: tuple[int, ...], **options: Any) -> tuple[Tensor, Tensor]:
    """Later attention that a method's cache holds (layers, heads), and how many entries (layers, heads)."""
    with torch.no_grad(), compress(llama("gqa"), method, BUDGET, page_slots=4, **options) as cache:
        llama("gqa")(torch.tensor([opening]), cache=cache)
        kept = [cache.positions(layer) for layer in (0, 1)]
        tables_now = [tables[layer, 0][len(opening)].double() for layer in (0, 1)]
        mass = [[float(t[h, rows[h]].sum()) for h in (0, 1)] for t, rows in zip(tables_now, kept, strict=True)]
        return torch.tensor(mass, dtype=torch.float64), torch.tensor([[len(row) for row in rows] for rows in kept])


OPTIONS: dict[str, dict[str, Any]] = {
    "attention_gate": {"window": 4},
    "snapkv": {"window": 4, "kernel": 3},
    "ada": {"score": "h2o", "alpha": 0.0},
    "pyramidkv": {"score": "snapkv/window=4/kernel=3"},
    "chunkkv": {"score": "h2o", "chunk": 3},
    "criticalkv": {"score": "h2o"},
    "kvzip": {"ask": "5;6", "across": False},
    "attention_matching": {"ask": "5;6", "across": False},
    **{name: {"window": 4} for name in ("cake", "defensivekv", "lava")},
    "random_attention": {"recent": 4},
    "vase": {"window": 4},
    "fastgen": {"threshold": 1.0, "special": "1", "punctuation": "2;3"},
    "lagkv": {"lag": 6},
    "infllm": {"sinks": 1, "local": 4, "block": 2, "representatives": 1},
    "finch": {"window": 4},
    "dms": {"score": "snapkv/window=4/kernel=3", "window": 4},
    "duo_attention": {"score": "snapkv/window=4/kernel=3", "sinks": 1, "recent": 4},
    "layer_table": {"score": "snapkv/window=4/kernel=3", "table": "2;1"},
    "simlayerkv": {"score": "snapkv/window=4/kernel=3", "sinks": 1, "recent": 4},
    "merge_on_evict": {"score": "snapkv/window=4/kernel=3"},
    "ems": {"window": 4},
}


@pytest.mark.parametrize("seed", range(3))
def test_no_method_holds_more_of_the_later_attention(seed: int) -> None:
    p = prompt(seed=seed)
    tables = look(p)
    best, entries = kept_mass(Oracle().policy(tables), tables, p.opening)
    shared, total = kept_mass(Oracle(heads="ada").policy(tables), tables, p.opening)
    assert (entries == BUDGET).all()
    assert (total.sum(1) == 2 * BUDGET).all()
    assert (shared.sum(1) >= best.sum(1)).all()
    for name in METHODS.names():
        policy = METHODS.get(name)()
        if policy.keeps_all or not isinstance(policy.layers, EvenLayers):  # a layer may hold more than its share
            continue
        mass, held = kept_mass(name, tables, p.opening, **OPTIONS.get(name, {}))
        assert (shared.sum(1) >= mass.sum(1)).all(), name
        assert (held.sum(1) == 2 * BUDGET).all(), name
        if (held == BUDGET).all():
            assert (best >= mass).all(), name
            assert best.sum() > mass.sum(), name  # random attention: nobody else guesses it all


@pytest.mark.parametrize("decode", ["grow", "evict"])
def test_bytes_are_those_of_any_method(decode: Any) -> None:
    p = prompt(64)
    model = llama("gqa")
    stats = []
    for open_cache in (
        lambda: Oracle(decode=decode).open(model, Spelled(), batch(p), "25%", "auto"),  # type: ignore[arg-type]
        lambda: compress(model, "h2o", "25%"),
    ):
        with torch.inference_mode(), open_cache() as cache:
            reader = BatchReader(model, cache, [p.opening])
            stats.append((cache.stats().stored, cache.stats().kv_bytes, reader.held()))
    assert stats[0] == stats[1]


@pytest.mark.parametrize(("decode", "stored"), [("grow", 11 + 8), ("evict", 11)])
def test_growing_or_evicting_while_decoding(decode: Any, stored: int) -> None:
    """A quarter of 44 tokens after the question; then eight tokens one by one."""
    p = prompt(40)
    with torch.inference_mode(), Oracle(decode=decode).open(llama("gqa"), Spelled(), batch(p), "25%", "auto") as cache:  # type: ignore[arg-type]
        reader = BatchReader(llama("gqa"), cache, [p.opening])
        assert cache.stats().stored == [[[10, 10]]] * 2
        reader.feed([p.asked[0].tokens])
        assert cache.stats().stored == [[[11, 11]]] * 2
        for token in p.asked[0].targets[0][:-1]:
            reader.feed([[token]])
        assert cache.stats().stored == [[[stored, stored]]] * 2
        cache.check_integrity()


def test_copies_keep_the_table_of_their_prompt() -> None:
    """After the context was read the rows are multiplied; each plan still looks at its own prompt's numbers."""
    first, second = prompt(40, questions=2), prompt(27, questions=2, seed=7)
    kept: dict[str, list[Any]] = {}
    for name, prompts in {"together": (first, second), "first": (first,), "second": (second,)}.items():
        with torch.inference_mode(), Oracle().open(llama("gqa"), Spelled(), batch(*prompts), "30%", "auto") as cache:  # type: ignore[arg-type]
            reader = BatchReader(llama("gqa"), cache, [p.opening for p in prompts])
            reader.select([row for row in range(len(prompts)) for _ in (0, 1)])
            reader.feed([asked.tokens for p in prompts for asked in p.asked])
            kept[name] = [[cache.positions(layer, row) for layer in (0, 1)] for row in range(2 * len(prompts))]
    assert kept["together"] == kept["first"] + kept["second"]


# ------------------------------------------------------------------ names, options, errors


def test_it_can_be_named() -> None:
    found = find_candidate(Spec.parse("oracle:heads=ada:statistics=all:decode=evict"))
    assert found == Oracle("all", "ada", "evict")
    assert not found.keeps_all
    with pytest.raises(OptionError, match="must be one of 'uniform', 'ada'"):
        find_candidate(Spec.parse("oracle:heads=all"))
    with pytest.raises(mp.BudgetError, match="tokens must be 1 to"):
        found.check("0", "auto")
    with pytest.raises(OptionError, match="unknown codec"):
        found.check("20%", "f33")


def test_other_prompts_than_it_looked_at() -> None:
    p = prompt()
    policy = Oracle().policy(look(p))
    ids = torch.tensor([p.opening, p.opening])
    with (
        torch.no_grad(),
        compress(llama("gqa"), policy, BUDGET) as cache,
        pytest.raises(CacheMismatchError, match="looked ahead for 1 prompts and 2 layers; layer 0 of prompt 1"),
    ):
        llama("gqa")(ids, cache=cache)


def test_given_numbers_by_position() -> None:
    table = torch.tensor([[0.5, 0.1, 0.9], [0.2, 0.8, 0.3]])
    positions = torch.tensor([[0, 2, 3], [1, 2, -1]], dtype=torch.int32)
    score = given({(4, 1): {10: table, 20: table * 2}})
    for seen, factor in ((5, 1), (10, 1), (19, 1), (20, 2), (99, 2)):
        value = score.score(View(positions, None, seen, layer=4, sequence=1), 0)
        assert torch.equal(value[0], torch.tensor([0.5 * factor, 0.9 * factor, float("inf")]))
        assert torch.equal(value[1, :2], torch.tensor([0.8, 0.3]) * factor)
    with pytest.raises(CacheMismatchError, match="has 2 KV heads, the given scores are of 1"):
        PrecomputedScore(lambda *_: table[:1]).score(View(positions, None, 5, layer=0), 0)


# ------------------------------------------------------------------ a model that recalls


def test_recall_of_the_bundled_model() -> None:
    """At 10 % the oracle knows which pairs will be asked for; heavy hitters do not."""
    from millpond.cli.demo.task import DemoTask
    from millpond.models.load import load_model, load_tokenizer

    model, tokenizer = load_model("pond-recall"), load_tokenizer("pond-recall")
    task = DemoTask.draw(512, 16, seed=5)
    asked = tuple(
        EncodedQuestion(i, Question("", max_new_tokens=1), (*ids, ids[1]))  # the answer begins with the name
        for i, ids in enumerate(task.questions.tolist())
    )
    one = EncodedPrompt(Sample("s", "", tuple(a.question for a in asked)), tuple(task.context[0].tolist()), asked)
    right = {}
    for name in ("oracle", "h2o"):
        with torch.inference_mode():
            candidate = find_candidate(Spec.parse(name))
            with candidate.open(model, tokenizer, batch(one, kind="generate"), "10%", "auto") as cache:
                reader = BatchReader(model, cache, [one.opening])
                held = reader.held()[0]
                reader.select([0] * len(asked))
                reader.feed([a.tokens for a in asked])
                right[name] = int((reader.logits.argmax(-1) == task.answers).sum())
                assert held.share == pytest.approx(0.1, abs=0.001)
    assert right["oracle"] >= right["h2o"]
    assert right["oracle"] >= 12


# ------------------------------------------------------------------ in the harness


@pytest.mark.covering
@pytest.mark.parametrize(
    ("kind", "protocol"),
    [
        ("generate", "aware"),
        ("generate", "agnostic"),
        ("generate", "turns"),
        ("choice", "agnostic"),
        ("choice", "turns"),
        ("perplexity", "turns"),
        ("fidelity", "agnostic"),
    ],
)
def test_kinds_of_tasks_and_protocols(kind: Any, protocol: Any) -> None:
    """A budget of everything gives the full cache's numbers; a small one is the same in any batch."""
    task = TinyTask(kind, tiny_samples(3))
    full, roomy = (examined(task, "full", "", protocol, 4), examined(task, "oracle", "100%", protocol, 4))
    assert [(r.answer, pytest.approx(r.score)) for r in roomy] == [(r.answer, r.score) for r in full]
    alone, together = (examined(task, "oracle:heads=ada", "25%", protocol, size) for size in (1, 30))
    assert not any(r.failure for r in alone)
    assert [(r.sample, r.answer, r.kv_bytes) for r in alone] == [(r.sample, r.answer, r.kv_bytes) for r in together]
    assert [r.score for r in alone] == pytest.approx([r.score for r in together])
    assert all(r.kept_share <= 0.5 for r in alone)


def test_it_stays_in_the_model_s_positions() -> None:
    """Questions that do not fit are failures of their own, with the oracle as with any method."""
    task = TinyTask("perplexity", tiny_samples(4))
    for method in ("oracle", "window"):
        found = [bool(r.failure) for r in examined(task, method, "25%", "turns", 4, limit=48)]
        assert True in found
        assert False in found


def test_what_comes_after_a_stop_is_not_looked_at() -> None:
    """Neither does the answer go on there: the tables end with it."""
    samples = tiny_samples(1, asks=(2,))
    (plain,) = encode(samples[0], tiny_tokenizer(), "generate", "agnostic")
    (said,) = examined(TinyTask("generate", samples), "full", "", "agnostic")
    stop = " " + said.answer.split()[1]
    (stopped,) = encode(with_stop(samples, stop)[0], tiny_tokenizer(), "generate", "agnostic")
    wide, short = (
        foresee(tiny_model(), tiny_tokenizer(), batch(one, kind="generate"))[0, 0] for one in (plain, stopped)
    )
    moment = len(plain.opening)
    assert short[moment].shape[1] < wide[moment].shape[1]
    assert short[moment].sum() < wide[moment].sum()
