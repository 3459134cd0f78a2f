"""Turns microphone samples into log-mel frames as they become final: Whisper's spectrogram without the wait.

A frame is centred on its sample, so it is final half an FFT (12.5 ms) later. Whisper floors the result at the
maximum of the whole utterance minus 8, which no stream can know; so frames leave here raw, and `normalize` applies
a maximum that the caller chooses. `Floor` remembers which one was used, and tells when it has to be done again.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from engine.clock import MIC_RATE_HZ
from engine.models.hf import mel_filters
from engine.models.streaming import StreamState

LOWEST_POWER: Final = 1e-10
FLOOR_BELOW_MAXIMUM: Final = 8.0  # in log10 of power: 80 dB

# One engine step of frames: more would only enlarge the state, since larger pieces are taken in several goes.
_MOST_FRAMES: Final = 8


def normalize(raw: Tensor, maximum: float) -> Tensor:
    """Floor `raw` at 80 dB below `maximum` and scale it to what the encoder was trained on; same shape."""
    return (raw.clamp(min=maximum - FLOOR_BELOW_MAXIMUM) + 4.0) / 4.0


@dataclass(frozen=True, slots=True)
class Floor:
    """The maximum that a stretch of raw mel was normalised with, and the stretch's `lowest` raw value."""

    lowest: float
    maximum: float

    def holds_for(self, maximum: float) -> bool:
        """Whether normalising with `maximum` gives the same values."""
        return maximum == self.maximum or self.lowest >= max(maximum, self.maximum) - FLOOR_BELOW_MAXIMUM


@dataclass
class LogMelState(StreamState):
    """The samples that unfinished frames still need, and what has passed so far.

    `samples` [capacity] starts with room for the reflection before the first sample.
    """

    samples: Tensor
    num_edge_samples: int
    num_buffered: int
    num_samples: int = 0
    num_frames: int = 0
    maximum: float = -math.inf

    def reset(self) -> None:
        """Return to the state that `init_state` made."""
        self.samples.zero_()
        self.num_buffered = self.num_edge_samples
        self.num_samples = 0
        self.num_frames = 0
        self.maximum = -math.inf


class LogMel:
    """WhisperFeatureExtractor's log-mel, frame by frame; float32 on the CPU, as there."""

    def __init__(self, num_mel: int = 128, n_fft: int = 400, hop: int = 160, rate_hz: int = MIC_RATE_HZ) -> None:
        self.num_mel = num_mel
        self.n_fft = n_fft
        self.hop = hop
        self.rate_hz = rate_hz
        self._num_edge = n_fft // 2
        self._window = torch.hann_window(n_fft)  # [n_fft]
        self._filters = mel_filters(num_mel, n_fft, rate_hz).T.contiguous()  # [num_mel, n_fft / 2 + 1]

    def init_state(self) -> LogMelState:
        """The state before the first sample of an utterance."""
        return LogMelState(torch.zeros(self.n_fft + (_MOST_FRAMES - 1) * self.hop), self._num_edge, self._num_edge)

    @torch.no_grad()
    def step(self, samples: Tensor, state: LogMelState) -> Tensor:
        """Take `samples` [T], any T, and return the raw frames that became final, [num_mel, n]."""
        if samples.dim() != 1 or samples.dtype != torch.float32:
            shape = list(samples.shape)
            raise ValueError(f"samples are {samples.dtype} {shape}: pass one channel [T] as float32 in -1..1")
        parts = []
        while samples.numel():
            room = state.samples.numel() - state.num_buffered
            parts.append(self._take(samples[:room], state))
            samples = samples[room:]
        return torch.cat(parts, dim=1) if parts else self._no_frames()

    @torch.no_grad()
    def tail(self, state: LogMelState) -> Tensor:
        """The raw frames [num_mel, m] that would follow if the audio ended now; the state stays as it is.

        None before the audio is longer than its reflected edge (half an FFT): Whisper rejects such audio.
        """
        num_frames = state.num_samples // self.hop - state.num_frames  # Whisper drops the last frame: no "+ 1"
        if num_frames == 0 or state.num_samples <= self._num_edge:
            return self._no_frames()
        held = state.samples[: state.num_buffered]
        reflection = held[-self._num_edge - 1 : -1].flip(0)
        return self._log_power(torch.cat([held, reflection]), num_frames)

    def num_samples_for(self, num_frames: int) -> int:
        """Samples that must have been taken until `num_frames` (at least 1) frames are final."""
        # The first frame waits for one sample more than the others: its left half is a reflection about sample 0.
        return max((num_frames - 1) * self.hop + self._num_edge, self._num_edge + 1)

    def _take(self, samples: Tensor, state: LogMelState) -> Tensor:
        """Buffer `samples`, which fit, and return the frames that are complete."""
        end = state.num_buffered + samples.numel()
        state.samples[state.num_buffered : end] = samples
        state.num_buffered = end
        state.num_samples += samples.numel()
        if state.num_samples <= self._num_edge:
            return self._no_frames()
        if state.num_frames == 0:
            edge = self._num_edge
            state.samples[:edge] = state.samples[edge + 1 : 2 * edge + 1].flip(0)
        num_frames = max(0, (end - self.n_fft) // self.hop + 1)
        if num_frames == 0:
            return self._no_frames()
        raw = self._log_power(state.samples[:end], num_frames)
        rest = state.samples[num_frames * self.hop : end].clone()  # a copy: source and target may overlap
        state.samples[: rest.numel()] = rest
        state.num_buffered = rest.numel()
        state.num_frames += num_frames
        state.maximum = max(state.maximum, float(raw.max()))
        return raw

    def _log_power(self, samples: Tensor, num_frames: int) -> Tensor:
        """Log10 of the mel power of the first `num_frames` (at most 8) frames of `samples`, [num_mel, num_frames]."""
        frames = samples.unfold(0, self.n_fft, self.hop)[:num_frames]  # [num_frames, n_fft]
        power = torch.fft.rfft(frames * self._window).abs() ** 2
        # Always one shape: a product of another width rounds otherwise, and a frame would hang on how samples were cut.
        power = functional.pad(power, (0, 0, 0, _MOST_FRAMES - num_frames))
        mel: Tensor = self._filters @ power.T
        return mel[:, :num_frames].clamp(min=LOWEST_POWER).log10()

    def _no_frames(self) -> Tensor:
        return torch.empty(self.num_mel, 0)
