import itertools

from millpond_vllm.event_times import NEVER, EventTimes


def by_counting(times: EventTimes, length: int) -> list[int]:
    """Events of a text of `length` tokens, found token by token from what a row holds."""
    events, packed_until = [], 0
    for computed in range(1, length + 1):
        left = max(0, computed - times.recent) // times.block
        held = left - packed_until + (times.packed if packed_until else 0)
        inside = computed < times.prompt
        if held <= times.packed or left == packed_until:
            continue
        if inside and not times.stride:
            continue
        if inside:
            begin = times.recent + times.packed * times.block
            if (computed - begin) % (times.stride * times.block) or computed <= begin:
                continue
        if computed > times.prompt and not times.decoding:
            continue
        events.append(computed)
        packed_until = left
    return events


CASES = [
    EventTimes(prompt, block, packed, recent, stride, decoding)
    for prompt, block, packed, recent, stride, decoding in itertools.product(
        (31, 97, 333), (16, 32), (1, 3), (0, 8, 32, 45), (0, 1, 4), (False, True)
    )
]


def test_events_are_those_of_counting():
    for times in CASES:
        length = times.prompt + 120
        events, at = [], 0
        while (at := times.next(at)) <= length:
            events.append(at)
        assert events == by_counting(times, length), times


def test_next_does_not_depend_on_where_it_is_asked():
    for times in CASES:
        events, at = [], 0
        while (at := times.next(at)) <= times.prompt + 120:
            events.append(at)
        for computed in range(times.prompt + 120):
            assert times.next(computed) == next(
                (one for one in events if one > computed), times.next(times.prompt + 120)
            )


def test_peak_is_never_below_what_is_held():
    for times in CASES:
        length = times.prompt + 120
        held, packed_until, most = 0, 0, 0
        events = set(by_counting(times, length))
        for computed in range(1, length + 1):
            held = -(-computed // times.block) - packed_until + (times.packed if packed_until else 0)
            most = max(most, held)
            if computed in events:
                packed_until = times.left(computed)
        assert most <= times.peak_blocks(length), times
        assert times.peak_blocks(length) <= -(-length // times.block)


def test_a_request_that_keeps_everything_has_no_events():
    times = EventTimes(1000, 32, NEVER, 0)
    assert times.first() == NEVER
    assert times.peak_blocks(1100) == 35


def test_a_prompt_of_many_pools_holds_budget_and_chunk():
    times = EventTimes(100_000, 32, packed=8, recent=32, stride=16, decoding=True)
    assert times.peak_blocks(100_500) == 8 + 16 + 1
