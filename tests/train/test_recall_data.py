"""The recall generator and its tokenizer: form, determinism, and the held-out split."""

from itertools import pairwise

import pytest
import torch

from millpond.errors import OptionError
from millpond.train.recall_data import Prompt, RecallShape, copy_batch, make_prompt, recall_batch, stream
from millpond.train.recall_tokenizer import build_tokenizer
from millpond.train.words import (
    ASK_ID,
    BOS_ID,
    FILLER,
    FILLER_IDS,
    KEY_IDS,
    KEYS,
    UNK_ID,
    VALUE_IDS,
    VALUES,
    VOCABULARY,
)

SHAPES = [RecallShape(1, 2), RecallShape(4, 16), RecallShape(8, 16), RecallShape(32, 512)]


def test_vocabulary_has_512_different_words_in_disjoint_runs() -> None:
    assert len(set(VOCABULARY)) == len(VOCABULARY) == 512
    assert [VOCABULARY[i] for i in KEY_IDS] == list(KEYS)
    assert [VOCABULARY[i] for i in VALUE_IDS] == list(VALUES)
    assert [VOCABULARY[i] for i in FILLER_IDS] == list(FILLER)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_hide_every_pair_once_and_ask_every_key_once(shape: RecallShape) -> None:
    tokens = recall_batch(shape, 5, stream("train", 1)).tokens
    assert tokens.shape == (5, shape.row_len)
    for row in tokens.tolist():
        body, tail = row[1 : 1 + shape.body_len], row[1 + shape.body_len :]
        hidden = {a: b for a, b in pairwise(body) if a in KEY_IDS}
        assert row[0] == BOS_ID
        assert len(hidden) == shape.pairs == len(set(hidden.values()))
        assert all(value in VALUE_IDS for value in hidden.values())
        assert sum(word in FILLER_IDS for word in body) == shape.body_len - 2 * shape.pairs
        assert tail[0::3] == [ASK_ID] * shape.pairs
        assert dict(zip(tail[1::3], tail[2::3], strict=True)) == hidden


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_supervision_lies_on_the_asked_keys_and_targets_their_values(shape: RecallShape) -> None:
    batch = recall_batch(shape, 3, stream("train", 2))
    assert batch.supervised.sum(dim=1).tolist() == [shape.pairs] * 3
    assert not batch.supervised[:, : 1 + shape.body_len].any()
    assert all(word in KEY_IDS for word in batch.tokens[batch.supervised].tolist())
    assert batch.targets.tolist() == batch.tokens[:, 1 + shape.body_len :][:, 2::3].flatten().tolist()


def test_pairs_reach_both_ends_of_the_body() -> None:
    shape = RecallShape(1, 6)
    tokens = recall_batch(shape, 200, stream("train", 3)).tokens[:, 1:7]
    places = torch.isin(tokens, torch.tensor(KEY_IDS)).nonzero()[:, 1]
    assert set(places.tolist()) == {0, 1, 2, 3, 4}


def test_copy_rows_supervise_only_what_an_earlier_text_foretells() -> None:
    batch = copy_batch(64, stream("train", 4))
    distances = set()
    for row, marks in zip(batch.tokens.tolist(), batch.supervised.tolist(), strict=True):
        places = [i for i, marked in enumerate(marks) if marked]
        assert places == list(range(places[0], places[-1] + 1))
        assert 4 <= len(places) <= 59
        repeated = row[places[0] : places[-1] + 2]
        starts = [i for i in range(1, places[0]) if row[i : i + len(repeated)] == repeated]
        assert starts
        distances.add(places[0] - starts[0])
    assert len(distances) > 20


def test_equal_streams_give_equal_batches_and_others_differ() -> None:
    shape = RecallShape(8, 64)
    first = recall_batch(shape, 4, stream("train", 5, 6)).tokens
    assert first.equal(recall_batch(shape, 4, stream("train", 5, 6)).tokens)
    for other in (stream("train", 5, 7), stream("train", 6, 6), stream("eval", 5, 6)):
        assert not first.equal(recall_batch(shape, 4, other).tokens)


def test_the_generator_draws_what_it_drew_when_the_weights_were_measured() -> None:
    prompt = make_prompt(n_pairs=2, body_len=8, seed=1)
    assert prompt == Prompt(
        "could back at lena hammer no nina flute", ["<ask> nina", "<ask> lena"], ["flute", "hammer"]
    )


def test_prompts_are_held_out_from_training_seeds() -> None:
    prompt = make_prompt(n_pairs=4, body_len=16, seed=0)
    row = recall_batch(RecallShape(4, 16), 1, stream("train", 0)).tokens[0, 1:17].tolist()
    assert prompt.context.split() != [VOCABULARY[i] for i in row]


def test_prompt_questions_have_their_answer_in_the_context() -> None:
    prompt = make_prompt(n_pairs=6, body_len=40, n_questions=4, seed=7)
    assert len(prompt.context.split()) == 40
    assert len(prompt.questions) == len(prompt.answers) == 4
    assert len(set(prompt.questions)) == 4
    for question, answer in zip(prompt.questions, prompt.answers, strict=True):
        assert f" {question.removeprefix('<ask> ')} {answer} " in f" {prompt.context} "


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_pairs": 5, "body_len": 9}, r"body_len \(9\) must be at least 2 \* pairs \(10\)"),
        ({"n_pairs": 97}, r"pairs \(97\) must be between 1 and 96"),
        ({"n_pairs": 0}, r"pairs \(0\) must be between 1 and 96"),
        ({"n_pairs": 4, "n_questions": 5}, r"n_questions \(5\) must be between 0 and n_pairs \(4\)"),
    ],
)
def test_impossible_prompts_are_refused_with_the_rule(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make_prompt(**arguments)


def test_tokenizer_round_trip_is_one_token_per_word() -> None:
    tokenizer = build_tokenizer(4096)
    prompt = make_prompt(n_pairs=4, body_len=32, seed=8)
    text = f"{prompt.context} {prompt.questions[0]}"
    ids = tokenizer(text)["input_ids"]
    assert ids == [BOS_ID, *(VOCABULARY.index(word) for word in text.split())]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer(prompt.questions[0], add_special_tokens=False)["input_ids"] == ids[-2:]
    assert tokenizer.convert_tokens_to_ids("zebra") == UNK_ID


def test_chat_template_joins_context_and_question() -> None:
    tokenizer = build_tokenizer(4096)
    chat = [{"role": "user", "content": "alice lamp"}, {"role": "user", "content": "<ask> alice"}]
    ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    assert ids == tokenizer("alice lamp <ask> alice")["input_ids"]
