"""Brings sound of any rate and channel count to the engine's: mono, one rate, no sample that is not a number."""

from time import perf_counter
from typing import Final, cast

import numpy as np
import soxr  # type: ignore[import-untyped]
from numpy.typing import NDArray

from engine.clock import MIC_RATE_HZ

Samples = NDArray[np.float32]

# No sound format reaches it (32-bit integers stored as floats do not), and beyond it sums could overflow to infinity.
LOUDEST_SAMPLE: Final = 2.0**32


class StreamResampler:
    """Mixes down and resamples one stream; however it is split into blocks, the output is the same.

    `num_bad_samples` counts NaN, infinite and absurdly large samples, each replaced by silence; `busy_s` is the time
    spent here. The filter holds samples back, so the last of them come from `flush`.
    """

    def __init__(self, in_rate_hz: int, num_channels: int, out_rate_hz: int = MIC_RATE_HZ) -> None:
        for name, value in (("in_rate_hz", in_rate_hz), ("num_channels", num_channels), ("out_rate_hz", out_rate_hz)):
            if value < 1:
                raise ValueError(f"{name} is {value}: give what the device or file reports, at least 1")
        self.num_bad_samples = 0
        self.busy_s = 0.0
        self._num_channels = num_channels
        self._stream = (
            None if in_rate_hz == out_rate_hz else soxr.ResampleStream(in_rate_hz, out_rate_hz, 1, "float32", "HQ")
        )

    def step(self, block: Samples) -> Samples:
        """Take `block` [T, C] and return the mono samples [n] that are ready; n may be 0."""
        if block.ndim != 2 or block.shape[1] != self._num_channels:
            raise ValueError(f"block has shape {block.shape}: pass [T, {self._num_channels}]")
        started = perf_counter()
        mono = self._mix_down(block)
        out = mono if self._stream is None else cast(Samples, self._stream.resample_chunk(mono))
        self.busy_s += perf_counter() - started
        return out

    def flush(self) -> Samples:
        """End the stream: return the samples [n] held back; the next `step` begins a new stream."""
        if self._stream is None:
            return np.empty(0, np.float32)
        started = perf_counter()
        out = cast(Samples, self._stream.resample_chunk(np.empty(0, np.float32), last=True))
        self._stream.clear()
        self.busy_s += perf_counter() - started
        return out

    def _mix_down(self, block: Samples) -> Samples:
        """Mean over channels [T, C] -> [T], always a copy: device blocks are reused by their owner."""
        is_good = np.abs(block) <= LOUDEST_SAMPLE  # False for NaN as well
        num_bad = block.size - int(np.count_nonzero(is_good))
        if num_bad:
            self.num_bad_samples += num_bad
            block = np.where(is_good, block, np.float32(0))
        mono: Samples = block.mean(axis=1, dtype=np.float32)
        return mono
