"""Scores of answers: pure functions from text to a number between 0 and 1. They know no task and no model."""

from millpond_lab.evals.metrics.bleu import bleu, self_bleu
from millpond_lab.evals.metrics.choice import class_named, letters_chosen
from millpond_lab.evals.metrics.code import code_similarity, similarity
from millpond_lab.evals.metrics.numbers import last_number, number_share, same_number
from millpond_lab.evals.metrics.overlap import exact, f1, f1_zh
from millpond_lab.evals.metrics.recall import found, found_any, in_order, string_match_all, string_match_part
from millpond_lab.evals.metrics.rouge import Rouge, rouge, rouge_zh

__all__ = [
    "Rouge",
    "bleu",
    "class_named",
    "code_similarity",
    "exact",
    "f1",
    "f1_zh",
    "found",
    "found_any",
    "in_order",
    "last_number",
    "letters_chosen",
    "number_share",
    "rouge",
    "rouge_zh",
    "same_number",
    "self_bleu",
    "similarity",
    "string_match_all",
    "string_match_part",
]
