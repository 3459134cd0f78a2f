import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from engine.channels import AudioRing, Latest, Mailbox


@pytest.fixture
def _switching_often():
    """Let threads take turns a thousand times more often: a race shows in one run instead of one in a thousand."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


DEADLINE_S = 20.0  # a thread that waits for ever is a failure, not a suite that hangs


@contextmanager
def writing(items, put):
    """Put `items` from another thread; `put` returns whether it took one. Yields whether that thread still works."""
    ends = time.perf_counter() + DEADLINE_S
    failed = threading.Event()

    def work():
        for item in items:
            while not put(item):
                if failed.is_set() or time.perf_counter() > ends:
                    return

    writer = threading.Thread(target=work)
    writer.start()
    try:
        yield lambda: writer.is_alive() and time.perf_counter() < ends
    except BaseException:
        failed.set()
        raise
    finally:
        writer.join()


def ramp(start, num_samples):
    """Every sample is its own number: order and loss show at once. Exact in float32 below 2**24."""
    return np.arange(start, start + num_samples, dtype=np.float32)


def read(ring, num_samples):
    out = np.full(num_samples, np.nan, dtype=np.float32)
    num_real = ring.read_into(out)
    return out, num_real


def test_a_ring_keeps_order_across_the_wrap():
    ring, written, heard = AudioRing(10), 0, []
    for num_samples in (7, 3, 6, 10, 1, 9, 10, 4, 8) * 3:
        assert ring.write(ramp(written, num_samples)) == num_samples
        written += num_samples
        assert ring.backlog == num_samples
        out, num_real = read(ring, num_samples)
        assert num_real == num_samples
        heard.extend(out)
    assert heard == list(range(written))


def test_a_ring_takes_only_what_fits():
    ring = AudioRing(10)
    assert ring.capacity == 10
    assert ring.write(ramp(0, 6)) == 6
    assert ring.write(ramp(6, 6)) == 4
    assert ring.write(ramp(99, 3)) == 0
    assert ring.backlog == 10
    assert read(ring, 10)[0].tolist() == list(range(10))
    assert ring.write(ramp(10, 25)) == 10
    assert read(ring, 10)[0].tolist() == list(range(10, 20))


def test_a_reader_gets_silence_where_samples_are_missing():
    ring = AudioRing(8)
    ring.write(ramp(1, 3))
    out, num_real = read(ring, 6)
    assert (out.tolist(), num_real) == ([1, 2, 3, 0, 0, 0], 3)
    out, num_real = read(ring, 4)
    assert (out.tolist(), num_real, ring.backlog) == ([0, 0, 0, 0], 0, 0)
    ring.write(ramp(4, 2))  # silence was made up, not taken from what comes next
    assert read(ring, 2)[0].tolist() == [4, 5]


def test_cut_drops_the_past_and_keeps_the_future():
    ring = AudioRing(10)
    ring.write(ramp(0, 4))
    read(ring, 1)
    assert ring.cut() == 3
    assert ring.backlog == 0
    assert ring.cut() == 0
    assert ring.write(ramp(4, 5)) == 5
    assert ring.backlog == 5
    out, num_real = read(ring, 7)
    assert (out.tolist(), num_real) == ([4, 5, 6, 7, 8, 0, 0], 5)


def test_what_is_cut_gives_its_room_back_once_the_reader_has_passed_it():
    ring = AudioRing(10)
    ring.write(ramp(0, 10))
    ring.cut()
    read(ring, 0)
    assert ring.write(ramp(10, 10)) == 10
    assert read(ring, 10)[0].tolist() == list(range(10, 20))


def test_samples_are_seen_only_once_they_are_copied():
    ring, seen = AudioRing(10), []

    class Watched(np.ndarray):
        def __setitem__(self, key, value):
            seen.append(ring.backlog)
            super().__setitem__(key, value)
            seen.append(ring.backlog)

    ring._samples = ring._samples.view(Watched)
    ring.write(ramp(0, 7))
    read(ring, 7)
    ring.write(ramp(7, 8))  # in two pieces, across the wrap
    assert set(seen) == {0}
    assert ring.backlog == 8


@pytest.mark.usefixtures("_switching_often")
def test_a_ring_loses_nothing_between_two_threads():
    ring, block, heard = AudioRing(97), 61, []
    starts = list(range(0, 40_000, block))
    with writing(
        starts, lambda start: ring.capacity - ring.backlog >= block and ring.write(ramp(start, block))
    ) as runs:
        while runs() or ring.backlog:
            out, num_real = read(ring, 43)
            heard.extend(out[:num_real])
            assert not out[num_real:].any()
            assert heard[-1:] in ([], [len(heard) - 1])
    assert heard == list(range(len(starts) * block))


@pytest.mark.usefixtures("_switching_often")
def test_a_reader_never_goes_back_behind_a_cut():
    ring, block, heard, cuts = AudioRing(97), 31, [], []
    starts = list(range(0, 31 * 700, block))
    num_put = 0

    def put(start):
        nonlocal num_put
        num_put += ring.write(ramp(num_put, start + block - num_put))
        if num_put < start + block:
            return False
        if start % 4 == 0:
            cuts.append(ring.cut())
        return True

    with writing(starts, put) as runs:
        while runs() or ring.backlog:
            out, num_real = read(ring, 43)
            heard.extend(out[:num_real])
    total = len(starts) * block
    assert np.all(np.diff(heard) > 0)
    # A block that was being read when it was cut is both: heard and counted as dropped.
    assert total - sum(cuts) <= len(heard) <= total


def test_a_slot_gives_the_newest_once():
    slot = Latest()
    assert slot.take() is None
    slot.put(1)
    slot.put(2)
    assert slot.take() == 2
    assert slot.take() is None


@pytest.mark.usefixtures("_switching_often")
def test_a_slot_between_two_threads_only_moves_forward_and_ends_with_the_last():
    slot, total, taken = Latest(), 20_000, []
    with writing(range(total), lambda number: slot.put(number) is None) as runs:
        while runs():
            if (number := slot.take()) is not None:
                taken.append(number)
    taken += [number for number in (slot.take(), slot.take()) if number is not None]
    assert taken == sorted(set(taken))
    assert taken[-1] == total - 1


def test_a_full_mailbox_loses_the_oldest_and_counts_it():
    box = Mailbox(3)
    for number in range(5):
        box.put(number)
    assert list(box.drain()) == [2, 3, 4]
    assert box.num_dropped == 2
    assert list(box.drain()) == []
    box.put(5)
    assert list(box.drain()) == [5]
    assert box.num_dropped == 2


def test_a_drain_gives_what_was_there_when_it_began():
    box, drained = Mailbox(8), []
    box.put(0)
    for number in box.drain():
        drained.append(number)
        box.put(number + 1)  # a reader that writes must not keep itself busy for ever
    assert drained == [0]
    assert list(box.drain()) == [1]


@pytest.mark.usefixtures("_switching_often")
def test_a_mailbox_between_two_threads_keeps_order_and_accounts_for_everything():
    box, total, drained = Mailbox(50), 30_000, []
    with writing(range(total), lambda number: box.put(number) is None) as runs:
        while runs():
            drained.extend(box.drain())
    drained.extend(box.drain())
    assert drained == sorted(set(drained))
    assert drained[-1] == total - 1
    # `put` looks before it leaps: where the reader empties the box in between, one too many is counted, never too few.
    assert len(drained) + box.num_dropped >= total
    assert box.num_dropped <= total


def test_a_mailbox_with_a_reader_that_keeps_up_drops_nothing():
    box, drained = Mailbox(4), []
    for number in range(100):
        box.put(number)
        if number % 4 == 3:
            drained.extend(box.drain())
    assert (drained, box.num_dropped) == (list(range(100)), 0)
