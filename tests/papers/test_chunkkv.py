"""ChunkKV by hand: chunk means, whole chunks, a cut last chunk, any score underneath."""

from __future__ import annotations

import pytest
import torch

from millpond.errors import OptionError
from millpond.methods import METHODS
from millpond.methods.chunkkv import ChunkMean
from millpond.policy.scores.key_geometry import KeyNorm
from tests.helpers.papers.keyed import run, sets, text, view

chunkkv = METHODS.get("chunkkv")


def test_means_by_hand() -> None:
    """Norms 1..8 in chunks of three; the last position is protected, so its chunk is worth position 6 alone."""
    keys = torch.arange(1.0, 9)[None, :, None]
    pinned = torch.zeros(1, 8, dtype=torch.bool)
    pinned[0, 7] = True
    assert ChunkMean(KeyNorm(), 3).score(view(keys, pinned=pinned), 0).tolist() == [[-2, -2, -2, -5, -5, -5, -7, -8]]


def test_whole_chunks_stay_and_the_last_is_cut_to_its_newest() -> None:
    q, k, v = text(n=40)
    policy = chunkkv(score="knorm", chunk=5)
    norms = k.norm(dim=-1)
    for budget in (10, 13, 15, 22):
        for h, held in enumerate(sets(run(policy, budget, q, k, v))):
            ranked = sorted(range(8), key=lambda c, h=h: float(norms[h, 5 * c : 5 * c + 5].sum()))  # type: ignore[misc]
            whole, rest = divmod(budget, 5)
            expected = [j for c in ranked[:whole] for j in range(5 * c, 5 * c + 5)]
            expected += range(5 * ranked[whole] + 5 - rest, 5 * ranked[whole] + 5)
            assert held == sorted(expected)


def test_a_chunk_of_one_is_the_score_itself() -> None:
    q, k, v = text()
    for name in ("knorm", "keydiff", "h2o", "tova", "random"):
        assert sets(run(chunkkv(score=name, chunk=1), 12, q, k, v)) == sets(run(METHODS.get(name)(), 12, q, k, v))


def test_the_window_stays_beside_the_chunks() -> None:
    q, k, v = text(n=80)
    cache = run(chunkkv(chunk=8), 48, q, k, v)
    for held in sets(cache):
        assert held[16:] == list(range(48, 80))
        assert [j // 8 for j in held[:16:8]] == [j // 8 for j in held[7:16:8]]  # two whole chunks
        assert all(j % 8 == 0 for j in held[:16:8])


def test_the_worst_chunk_leaves_entry_by_entry_while_decoding() -> None:
    """Of what is held the chunk with the longest keys gives one up at each step, its oldest first."""
    q, k, v = text(1, n=32)
    cache = run(chunkkv(score="knorm", chunk=4, decode="evict"), 12, q, k, v, prompt=24)
    norm = k[0].norm(dim=-1).tolist()

    def leave(places: list[int]) -> list[int]:
        chunks: dict[int, list[int]] = {}
        for j in places:
            chunks.setdefault(j // 4, []).append(j)
        worst = max(chunks.values(), key=lambda js: sum(norm[j] for j in js) / len(js))
        return [j for j in places if j != worst[0]]

    held = list(range(24))
    ranked = sorted(range(6), key=lambda c: sum(norm[4 * c : 4 * c + 4]))
    held = sorted(j for c in ranked[:3] for j in range(4 * c, 4 * c + 4))
    for t in range(24, 32):
        held = leave([*held, t])
    assert sets(cache) == [held]


def test_a_window_moves_on_with_the_text() -> None:
    """While decoding the newest queries vote, not the prompt's: what only the prompt looked at leaves."""
    logits = torch.zeros(1, 40, 40, dtype=torch.float64)
    logits[:, :20, [3, 12]] = 9.0
    logits[:, 20:, 12] = 9.0
    keys = torch.eye(40, dtype=torch.float64)[None]
    policy = chunkkv(score="rkv/buffer=1", chunk=4, decode="evict")
    before = sets(run(policy, 20, logits[:, :20], keys[:, :20], keys[:, :20]))[0]
    after = sets(run(policy, 20, logits, keys, keys, prompt=20))[0]
    assert before == list(range(20))
    assert set(range(8, 16)) <= set(after)
    assert not {0, 1, 2, 3} & set(after)


def test_options_out_of_range() -> None:
    with pytest.raises(OptionError, match="chunk=0 must be 1 to 16,777,216"):
        chunkkv(chunk=0)
    with pytest.raises(OptionError, match="score='full' keeps everything"):
        chunkkv(score="full")
    with pytest.raises(OptionError, match="did you mean 'snapkv'"):
        chunkkv(score="snapk")
