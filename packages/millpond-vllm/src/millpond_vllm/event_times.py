"""When a request evicts: positions of its text that follow from its length and its settings alone."""

from __future__ import annotations

from dataclasses import dataclass

#: Position of an event that never comes.
NEVER = 1 << 60
#: Tokens between two events inside a prompt, where the engine gives no other number.
CHUNK = 512


@dataclass(frozen=True, slots=True)
class EventTimes:
    """Positions at which one request evicts, and the blocks that it holds then.

    An event comes when exactly c tokens are computed. m = (c - recent) // block blocks have then left the newest
    tokens; their entries compete, and the best fill `packed` blocks. Nothing but these numbers decides: the scheduler
    needs no answer of a worker, and a request that is preempted and read again has the same events.

    Attributes:
        prompt: Tokens of the prompt.
        block: Tokens of a block.
        packed: Blocks that kept entries fill; NEVER for a request that keeps everything.
        recent: Newest tokens, which never compete.
        stride: Blocks between two events inside the prompt; 0 for none before its end.
        decoding: Whether each block that is decoded brings an event.
    """

    prompt: int
    block: int
    packed: int
    recent: int
    stride: int = 0
    decoding: bool = False

    def left(self, computed: int) -> int:
        """Return how many blocks have left the newest tokens after `computed` tokens."""
        return max(0, computed - self.recent) // self.block

    def next(self, computed: int) -> int:
        """Return the position of the first event after `computed` tokens; NEVER if there is none."""
        if self.packed >= NEVER:
            return NEVER
        if computed < self.prompt:
            inside = self._inside(computed)
            if inside < self.prompt:
                return inside
            if self.left(self.prompt) > self._held_before_end():
                return self.prompt
        if not self.decoding:
            return NEVER
        most = max(self.left(computed), self.left(self.prompt), self.packed)
        return (most + 1) * self.block + self.recent

    def first(self) -> int:
        """Return the position of the first event; NEVER if there is none."""
        return self.next(0)

    def peak_blocks(self, length: int) -> int:
        """Return the most blocks that a text of `length` tokens holds at once, in front of an event."""
        whole = -(-length // self.block)
        first = self.first()
        if first >= length:
            return whole
        tail = -(-self.recent // self.block)
        if not self.stride:
            inside = -(-min(self.prompt, length) // self.block)
        else:
            inside = self.packed + self.stride + tail
        after = tail + self.packed + 1
        if not self.decoding:  # what is decoded stays
            after += -(-max(0, length - self.prompt) // self.block)
        return min(whole, max(inside, after))

    def _inside(self, computed: int) -> int:
        """Return the first event after `computed` tokens that a longer prompt would have; NEVER for none."""
        if not self.stride:
            return NEVER
        begin = self.recent + self.packed * self.block
        step = self.stride * self.block
        return begin + (max(0, computed - begin) // step + 1) * step

    def _held_before_end(self) -> int:
        """Return the blocks in front of which the last event inside the prompt left `packed`; `packed` if none."""
        if not self.stride:
            return self.packed
        begin = self.recent + self.packed * self.block
        step = self.stride * self.block
        return self.packed + max(0, self.prompt - 1 - begin) // step * self.stride
