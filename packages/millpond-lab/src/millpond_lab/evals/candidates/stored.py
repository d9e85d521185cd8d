"""A text that was stored in a storage codec and restored before anybody asked, as `remember` and sessions do."""

from __future__ import annotations

import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millpond.codec.transform.allocation import LEAST_BITS, MOST_MEAN_BITS
from millpond.codec.transform.storage_codec import parse_storage_codec
from millpond.hf.cache import MillpondCache
from millpond.hf.compress import compress
from millpond.hf.document import restore_document, save_document
from millpond.hf.grad_mode import no_autograd
from millpond.hf.text_storage import TextStorage, TransformSource
from millpond.option_ranges import Range
from millpond_lab.evals.candidates.candidate import Candidate, OwnFormat, candidate
from millpond_lab.evals.decoding.batch import PromptBatch

#: What looks at the queries of each cache while it reads.
_storages: weakref.WeakKeyDictionary[MillpondCache, TextStorage] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Stored(OwnFormat):
    """See `stored`."""

    codec: str
    transform: TransformSource = None

    def open(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: PromptBatch, budget: str, codec: str
    ) -> MillpondCache:
        cache = compress(model, "full")
        _storages[cache] = TextStorage(cache, self.codec, self.transform)
        return cache

    @no_autograd
    def restored(self, model: PreTrainedModel, cache: MillpondCache, ids: Tensor) -> tuple[MillpondCache, float]:
        """Store the one text of a cache and restore it: a cache of its own, and the file's share of a bf16 cache.

        Args:
            ids: of the text, (1, n).
        """
        full = cache.stats().full_kv_bytes * 2 // cache.dtype.itemsize
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "text.safetensors"
            share = save_document(cache, ids, file, storage=_storages.pop(cache)) / full
            other, _ = restore_document(model, file, calibration=self.transform)
        return other, share


@candidate("stored")
def stored(
    bits: Annotated[float, "of each number, in the codec transform", Range(LEAST_BITS, MOST_MEAN_BITS)] = 1.5,
) -> Candidate:
    """Store the prompt in the codec transform, as `millpond remember --storage-codec` does, and restore it.

    The transform file is that of millpond-models for the model. Bytes are those of the file, ids and exact tokens
    included, and noted as claimed: what answers is the restored cache, in plain numbers.
    """
    return Stored(parse_storage_codec(f"transform:{bits:g}").name)
