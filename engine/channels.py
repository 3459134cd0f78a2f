"""Bounded channels between threads: one writer and one reader each, never blocking either."""

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]
T = TypeVar("T")


class AudioRing:
    """Ring of mono samples. The writer moves only `_written`, the reader only `_read`, so neither takes a lock.

    Both count samples since the stream opened: their difference is the backlog, and neither wraps. Full: what does
    not fit is refused, and `write` says how much.
    """

    def __init__(self, capacity: int) -> None:
        self._samples = np.zeros(capacity, dtype=np.float32)
        self._written = 0
        self._read = 0
        self._cut = 0

    @property
    def capacity(self) -> int:
        """Samples that fit."""
        return len(self._samples)

    @property
    def backlog(self) -> int:
        """Samples written and neither read nor cut."""
        return self._written - max(self._read, self._cut)

    def write(self, block: Samples) -> int:
        """Append what fits of `block` [T] and return how many samples that was."""
        n = min(len(block), self.capacity - (self._written - self._read))
        start = self._written % self.capacity
        head = min(n, self.capacity - start)
        self._samples[start : start + head] = block[:head]
        self._samples[: n - head] = block[head:n]
        self._written += n  # published last: the reader never sees samples not yet copied
        return n

    def read_into(self, out: Samples) -> int:
        """Fill `out` [T], padding with silence, and return how many samples were real."""
        read = max(self._read, self._cut)
        n = min(len(out), self._written - read)
        start = read % self.capacity
        head = min(n, self.capacity - start)
        out[:head] = self._samples[start : start + head]
        out[head:n] = self._samples[: n - head]
        out[n:] = 0.0
        self._read = read + n
        return n

    def cut(self) -> int:
        """Drop all that was written so far (barge-in) and return how many samples that was."""
        dropped = self.backlog
        self._cut = self._written
        return dropped


class Latest(Generic[T]):
    """One slot for the newest item: a slow reader skips, it never falls behind. Full: the older item gives way."""

    def __init__(self) -> None:
        self._slot: deque[T] = deque(maxlen=1)

    def put(self, item: T) -> None:
        """Replace whatever has not been taken yet."""
        self._slot.append(item)

    def take(self) -> T | None:
        """Return the newest item once, then None until the next."""
        try:
            return self._slot.popleft()
        except IndexError:
            return None


class Mailbox(Generic[T]):
    """Bounded queue drained whole by a polling reader. Full: the oldest item gives way and is counted."""

    def __init__(self, capacity: int) -> None:
        self._items: deque[T] = deque(maxlen=capacity)
        self.num_dropped = 0

    def put(self, item: T) -> None:
        """Append without blocking."""
        self.num_dropped += len(self._items) == self._items.maxlen
        self._items.append(item)

    def drain(self) -> Iterator[T]:
        """Yield what is there now, oldest first."""
        for _ in range(len(self._items)):
            try:
                yield self._items.popleft()
            except IndexError:  # a full box lost its oldest item to the writer meanwhile
                return
