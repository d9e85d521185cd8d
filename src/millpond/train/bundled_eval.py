"""How well a model recalls with its full cache: the ceiling against which every method is read.

Plain transformers: the context is read once, then each question alone follows it on its own copy of the
cache, so no answer can be found by ruling out the values of earlier questions.
"""

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from millpond.train.recall_data import QUESTION_TOKENS, RecallShape, recall_batch, stream


@torch.inference_mode()
def evaluate_recall(
    model: PreTrainedModel, *, pairs: int = 32, body_len: int = 1024, contexts: int = 8, seed: int = 0
) -> float:
    """Share of questions whose most likely next word is the right value, over held-out contexts.

    Args:
        model: any causal model over the bundled vocabulary, on any device.
        pairs: pairs in each context; each is asked, so the answer counts `contexts * pairs` questions.
        body_len: tokens in a context, `<bos>` not counted.
        contexts: how many contexts to draw.
        seed: names the held-out contexts; the same for every model that is to be compared.
    """
    shape = RecallShape(pairs, body_len)
    rows = recall_batch(shape, contexts, stream("eval", seed)).tokens.to(model.device)
    right = sum(_right_answers(model, row, shape) for row in rows)
    return right / (contexts * pairs)


def _right_answers(model: PreTrainedModel, row: Tensor, shape: RecallShape) -> int:
    """Right answers of one row (shape.row_len,), each question asked alone."""
    context, tail = row[: 1 + shape.body_len], row[1 + shape.body_len :].view(-1, QUESTION_TOKENS)
    cache = DynamicCache(config=model.config)
    model(context[None], past_key_values=cache, logits_to_keep=1)
    cache.batch_repeat_interleave(shape.pairs)
    logits = model(tail[:, :-1], past_key_values=cache, logits_to_keep=1).logits[:, -1]  # (pairs, vocab)
    return int((logits.argmax(dim=-1) == tail[:, -1]).sum())
