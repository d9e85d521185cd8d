"""Statistics of key and value channels: what a codec needs before a region's first entry, and the choice it made."""

from __future__ import annotations

import copy
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.cache.types import PerSequence
from millpond.codec.channels import channel_scores, kept_channels, query_balance, value_channel_scores
from millpond.codec.spec import Codec

#: Newest queries that decide which channels stay (ThinK, arXiv:2407.21018).
PRUNING_QUERIES = 32


class PromptStatistics(NamedTuple):
    """Sums and maxima over the queries and keys of one sequence.

    Any split of a prompt into passes gives the same.
    """

    max_q: Tensor  #: (Hq, D) float32, the largest |q| of each channel
    max_k: Tensor  #: (Hkv, D) float32, the largest |k|
    last_q: Tensor  #: (Hq, <= PRUNING_QUERIES, D), the newest queries
    squares: Tensor  #: (Hkv, D) float32, the sum of k^2
    last_outputs: Tensor | None = None  #: (Hq, <= PRUNING_QUERIES, V), what the newest queries read
    output_norms: Tensor | None = None  #: (Hq, V), norms of the rows of the output projection

    @classmethod
    def of(cls, q: Tensor, k: Tensor, outputs: Tensor | None = None, norms: Tensor | None = None) -> PromptStatistics:
        """Return the statistics of new tokens, see `KeyChannels.collect`."""
        return cls(
            q.float().abs().amax(1),
            k.float().abs().amax(1),
            q[:, -PRUNING_QUERIES:].clone(),
            k.double().square().sum(1).float(),
            None if outputs is None else outputs[:, -PRUNING_QUERIES:].clone(),
            norms,
        )

    def merge(self, later: PromptStatistics) -> PromptStatistics:
        """Return the statistics of two runs of tokens, these and `later` ones."""
        return PromptStatistics(
            torch.maximum(self.max_q, later.max_q),
            torch.maximum(self.max_k, later.max_k),
            torch.cat([self.last_q, later.last_q], 1)[:, -PRUNING_QUERIES:],
            self.squares + later.squares,
            None
            if self.last_outputs is None or later.last_outputs is None
            else torch.cat([self.last_outputs, later.last_outputs], 1)[:, -PRUNING_QUERIES:],
            later.output_norms,
        )

    def channels(self, codec: Codec) -> Tensor | None:
        """Return the key channels that are kept, (Hkv, kept) int32; None for all."""
        if not codec.prune:
            return None
        return kept_channels(channel_scores(self.last_q, self.squares.sqrt()[:, None]), codec.prune)

    def value_channels(self, codec: Codec) -> Tensor | None:
        """Return the value channels that are kept, (Hkv, kept) int32; None for all."""
        if not codec.prune_values:
            return None
        assert self.last_outputs is not None, "who prunes values collects outputs"
        assert self.output_norms is not None, "and the norms of their projection"
        scores = value_channel_scores(self.last_outputs, self.output_norms, len(self.max_k))
        return kept_channels(scores, codec.prune_values)

    def balance(self, codec: Codec) -> Tensor | None:
        """Return the factors of `query_balance`, (Hkv, D) float32; None for 1."""
        return query_balance(self.max_q[:, None], self.max_k[:, None]) if codec.balanced else None


def kept_dim(ratio: float, dim: int) -> int:
    """Return how many of `dim` channels stay where a share of them, `ratio`, is dropped."""
    return kept_channels(torch.zeros(1, dim), ratio).shape[1] if ratio else dim


class KeyChannels:
    """Key and value channels of `n_seq * n_kv_heads` regions that a codec prunes or balances.

    Args:
        codec: Number format.
        n_seq: Number of sequences.
        n_kv_heads: KV heads of the layer.
        kept: Channels of a stored key.
        kept_values: Channels of a stored value.
        device: Device of the tensors.

    Attributes:
        channels: Channels that are kept, (R, kept) int32; None for all.
        balance: Divisors of keys, (R, kept) float32, see `query_balance`; None for 1.
        value_channels: Channels of values that are kept, (R, kept_values) int32; None for all.
    """

    def __init__(
        self, codec: Codec, n_seq: int, n_kv_heads: int, kept: int, kept_values: int, device: torch.device
    ) -> None:
        n = n_seq * n_kv_heads
        self._codec, self._n_seq, self._n_kv_heads = codec, n_seq, n_kv_heads
        self.channels = torch.zeros(n, kept, dtype=torch.int32, device=device) if codec.prune else None
        self.balance = torch.ones(n, kept, device=device) if codec.balanced else None
        self.value_channels = (
            torch.zeros(n, kept_values, dtype=torch.int32, device=device) if codec.prune_values else None
        )
        self._statistics: PerSequence[PromptStatistics] = PerSequence()
        self._chosen: PerSequence[bool] = PerSequence()

    @property
    def tables(self) -> dict[str, Tensor | None]:
        """Tables by name; None if there is none."""
        return {"channels": self.channels, "balance": self.balance, "value_channels": self.value_channels}

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        return sum(t.numel() * 4 for t in self.tables.values() if t is not None)

    def collect(
        self, sequence: int, q: Tensor, k: Tensor, outputs: Tensor | None = None, norms: Tensor | None = None
    ) -> None:
        """Add prompt tokens to the statistics until `choose`.

        Args:
            sequence: Sequence in the table.
            q: Queries (Hq, Q, D).
            k: Keys (Hkv, Q, D).
            outputs: What the queries read, (Hq, Q, V), for a codec that prunes values.
            norms: Norms of the rows of the output projection, (Hq, V), likewise.
        """
        if self._is_settled(sequence):
            return
        new, previous = PromptStatistics.of(q, k, outputs, norms), self._statistics.get(sequence)
        self._statistics[sequence] = new if previous is None else previous.merge(new)

    def choose(self, sequence: int) -> None:
        """Fix the channels and the balance of a sequence by the statistics of its prompt."""
        if self._is_settled(sequence):
            return
        self._chosen[sequence] = True
        statistics = self._statistics.pop(sequence)
        rows = slice(sequence * self._n_kv_heads, (sequence + 1) * self._n_kv_heads)
        channels, balance = statistics.channels(self._codec), statistics.balance(self._codec)
        if self.channels is not None and channels is not None:
            self.channels[rows] = channels
            balance = None if balance is None else balance.gather(1, channels.long())
        if self.balance is not None and balance is not None:
            self.balance[rows] = balance
        value_channels = statistics.value_channels(self._codec)
        if self.value_channels is not None and value_channels is not None:
            self.value_channels[rows] = value_channels

    def adopt(self, channels: Tensor | None, balance: Tensor | None, value_channels: Tensor | None) -> None:
        """Take the channels and balance of one sequence that were chosen in another store."""
        self.channels, self.balance, self.value_channels = channels, balance, value_channels
        self._chosen[0] = True

    def select(self, sequences: list[int], regions: npt.NDArray[np.int64]) -> None:
        """Keep the given sequences, whose `regions` are given too, in this order."""
        rows = torch.from_numpy(regions)
        self.channels, self.balance, self.value_channels = (
            None if t is None else t[rows.to(t.device)] for t in (self.channels, self.balance, self.value_channels)
        )
        self._statistics, self._chosen = self._statistics.copy(sequences), self._chosen.copy(sequences)
        self._n_seq = len(sequences)

    def copy(self) -> KeyChannels:
        """Return a copy in tensors of its own."""
        other = copy.copy(self)
        other.channels, other.balance, other.value_channels = (
            None if t is None else t.clone() for t in (self.channels, self.balance, self.value_channels)
        )
        other._statistics, other._chosen = self._statistics.copy(), self._chosen.copy()
        return other

    def join(self, other: KeyChannels) -> None:
        """Take the channels and balance of the sequences of another batch, after these."""
        if self.channels is not None and other.channels is not None:
            self.channels = torch.cat([self.channels, other.channels])
        if self.balance is not None and other.balance is not None:
            self.balance = torch.cat([self.balance, other.balance])
        if self.value_channels is not None and other.value_channels is not None:
            self.value_channels = torch.cat([self.value_channels, other.value_channels])
        self._statistics.join(other._statistics, self._n_seq)
        self._chosen.join(other._chosen, self._n_seq)
        self._n_seq += other._n_seq

    def _is_settled(self, sequence: int) -> bool:
        chooses = self.channels is not None or self.balance is not None or self.value_channels is not None
        return not chooses or sequence in self._chosen
