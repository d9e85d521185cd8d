"""What a policy needs is declared by it; nothing outside looks at its class."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import millpond
from millpond.codec import Codec, resolve
from millpond.methods import METHODS
from millpond.policy.needs import NOTHING, Entropies, PromptRepeat
from millpond.policy.token_classes import TokenClasses

PACKAGE = Path(millpond.__file__).parent
#: Parts that define policies and make them.
AT_HOME = ("policy", "methods")

#: The methods that need something, and what. All others need nothing.
STATED = {
    "attention_gate": {"prompt_flags"},
    "fastgen": {"token_ids", "head_rules"},
    "infllm": {"whole_prompt", "block_lookup"},
    "kvzip": {"token_ids", "prompt_repeat"},
    "attention_matching": {"token_ids", "prompt_repeat"},
    "minference": {"whole_prompt", "prompt_patterns"},
    "sirllm": {"entropies"},
}


def trees(*parts: str) -> Iterator[tuple[Path, ast.Module]]:
    for part in parts:
        for module in sorted((PACKAGE / part).rglob("*.py")):
            yield module, ast.parse(module.read_text(encoding="utf-8"))


def kinds_of_policy() -> set[str]:
    """Names of all classes derived from Policy."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for _, tree in trees(*AT_HOME)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found, new = {"Policy"}, {"Policy"}
    while new:
        new = {name for name, own in bases.items() if own & found} - found
        found |= new
    return found - {"Policy"}


def names(tree: ast.Module) -> set[str]:
    """Every name that a module imports, reads or looks up in another."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add(node.name)
    return found


def test_there_are_kinds_of_policy_to_look_for() -> None:
    assert {"HeadRulesPolicy", "EntropyPolicy", "AnchorPolicy"} <= kinds_of_policy()
    made = [METHODS.get(name)() for name in METHODS.names()] + [METHODS.get("kvzap")(threshold=-6.0)]
    assert {type(policy).__name__ for policy in made} - {"Policy"} == kinds_of_policy()


def test_no_module_outside_policy_looks_at_the_class_of_a_policy() -> None:
    kinds, outside = kinds_of_policy(), [p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name not in AT_HOME]
    found = {str(m.relative_to(PACKAGE)): kinds & names(tree) for m, tree in trees(*outside)}
    assert {module: used for module, used in found.items() if used} == {}


def test_every_method_states_what_it_needs() -> None:
    stated = {}
    for name in METHODS.names():
        needs = METHODS.get(name)().needs
        own = {f.name for f in fields(needs) if getattr(needs, f.name) != getattr(NOTHING, f.name)}
        if own:
            stated[name] = own
    assert stated == STATED


def test_what_is_needed_carries_the_settings() -> None:
    assert METHODS.get("kvzip")(ask="5;6").needs.prompt_repeat == PromptRepeat((5, 6), 2048)
    assert METHODS.get("sirllm")(decay=0.5).needs.entropies == Entropies(0.5)


class Known:
    """A source that knows every token."""

    def classes(self, given: TokenClasses) -> TokenClasses:
        return TokenClasses(frozenset({1}), frozenset({2}))

    def spell(self, text: str) -> tuple[int, ...]:
        return 7, 8


def test_a_policy_asks_the_tokenizer_for_what_it_does_not_know() -> None:
    source = Known()
    head_rules = METHODS.get("fastgen")().with_tokens(source).needs.head_rules
    assert head_rules is not None
    assert head_rules.classes.special == {1}
    assert METHODS.get("kvzip")().with_tokens(source).needs.prompt_repeat == PromptRepeat((7, 8), 2048)
    told = METHODS.get("kvzip")(ask="5;6")
    assert told.with_tokens(source) is told
    for name in set(METHODS.names()) - {"attention_matching", "fastgen", "kvzip"}:
        policy = METHODS.get(name)()
        assert policy.with_tokens(source) is policy


@pytest.mark.parametrize("name", ["fastgen", "full", "minference", "duo_attention", "h2o"])
def test_who_needs_a_budget_and_whose_heads_may_keep_all(name: str) -> None:
    policy = METHODS.get(name)()
    assert policy.needs_budget == (name in ("duo_attention", "h2o"))
    assert policy.heads_may_keep_all == (name in ("fastgen", "duo_attention"))
    assert policy.heads_alike == (name in ("full", "minference", "h2o"))


def test_a_policy_says_which_formats_it_cannot_be_stored_in() -> None:
    plain, tiered = (resolve(name) for name in ("int4", "mikv"))
    assert isinstance(plain, Codec)
    assert isinstance(tiered, Codec)
    assert METHODS.get("h2o")().codec_refusal(plain) is None
    assert METHODS.get("h2o")().codec_refusal(tiered) is None
    assert "for good" in (METHODS.get("fastgen")().codec_refusal(tiered) or "")
    assert METHODS.get("fastgen")().codec_refusal(plain) is None
