"""Encodes speech while it is spoken: samples in, features of finished attention windows out.

The audio tower works in two nested units. Chunks of 1 s of mel are convolved alone, 13 tokens each; windows of
1 to 8 chunks attend within themselves, both ways. So a closed window is final and is handed out once, and an open
one can only be encoded provisionally, as if the audio ended now. All of it equals the tower run over the whole
utterance, down to the mel floor, which hangs on the loudest frame of the utterance: where that comes late, `finish`
takes back the windows it changes.
"""

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.config import WINDOWS_MS
from engine.models.hf import audio_token_count
from engine.models.log_mel import Floor, LogMel, LogMelState, normalize
from engine.models.streaming import StreamState


@dataclass(frozen=True, slots=True, eq=False)
class AudioEnd:
    """The end of an utterance: its first `num_kept_tokens` closed tokens stand, `features` [m, D] follow them."""

    num_kept_tokens: int
    features: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ClosedWindow:
    """The raw mel [num_mel, frames] of a window already handed out, in case its floor moves: 51 KB per second."""

    raw: Tensor
    floor: Floor


@dataclass
class AudioEncoderState(StreamState):
    """The open window of one utterance, and the raw mel of the closed ones.

    `raw` [num_mel, frames] and `convolved` [chunks, tokens, width] are filled from the front; the full chunks of
    the open window are convolved, each with the floor at the same index of `floors`.
    """

    mel: LogMelState
    raw: Tensor
    convolved: Tensor
    # Frames of the longest chunk of the sounds before this one in the prompt: shorter ones are padded up to it.
    longest_before: int = 0
    num_open_frames: int = 0
    floors: list[Floor] = field(default_factory=list)
    closed: list[ClosedWindow] = field(default_factory=list)

    def reset(self) -> None:
        """Return to the state that `init_state` made."""
        self.mel.reset()
        self.raw.zero_()
        self.convolved.zero_()
        self.num_open_frames = 0
        self.floors.clear()
        self.closed.clear()

    @property
    def num_closed_tokens(self) -> int:
        """Tokens handed out by `step` since the utterance began."""
        num_chunks, tokens_per_chunk, _ = self.convolved.shape
        return len(self.closed) * num_chunks * tokens_per_chunk

    @property
    def num_samples(self) -> int:
        """Samples taken since the utterance began."""
        return self.mel.num_samples


class AudioEncoder:
    """The audio tower as a stream of attention windows of `window_ms`; runs on the tower's device and dtype.

    The tower must not use flash attention: its window boundaries stay on the CPU, so that no step waits for the device.
    """

    def __init__(self, tower: nn.Module, mel: LogMel, window_ms: int) -> None:
        if window_ms not in WINDOWS_MS:
            raise ValueError(f"window_ms is {window_ms}: choose one of {WINDOWS_MS}, the tower was trained with those")
        self.mel = mel
        self.window_frames = window_ms * mel.rate_hz // (1000 * mel.hop)
        self.chunk_frames = 2 * cast(int, tower.n_window)
        self.tokens_per_chunk = self.num_tokens(self.chunk_frames)
        assert self.window_frames % self.chunk_frames == 0, (self.window_frames, self.chunk_frames)
        self._convolutions = [tower.get_submodule(f"conv2d{i}") for i in (1, 2, 3)]
        self._conv_out = tower.get_submodule("conv_out")
        self._positions = tower.get_submodule("positional_embedding")
        self._layers = list(tower.get_submodule("layers").children())
        self._head = [tower.get_submodule(name) for name in ("ln_post", "proj1", "act", "proj2")]
        self._weight = tower.get_parameter("conv_out.weight")  # [width, ...]: tells width, device and dtype
        self._num_features = tower.get_parameter("proj2.weight").shape[0]

    def init_state(self, longest_before: int = 0) -> AudioEncoderState:
        """The state before the first sample of an utterance.

        `longest_before` is the `longest_chunk` of the earlier sounds in the prompt: the tower pads all chunks of a
        prompt to the longest, so a sound of less than a second is encoded otherwise after a longer one.
        """
        raw = torch.zeros(self.mel.num_mel, self.window_frames)
        num_chunks = self.window_frames // self.chunk_frames
        convolved = self._weight.new_zeros(num_chunks, self.tokens_per_chunk, self._weight.shape[0])
        return AudioEncoderState(self.mel.init_state(), raw, convolved, longest_before)

    @torch.no_grad()
    def step(self, samples: Tensor, state: AudioEncoderState) -> Tensor:
        """Take `samples` [T], any T, and return the features [n, D] of the windows that closed."""
        closed = []
        while samples.numel():
            # Never across the end of a chunk, so that the result does not hang on how the samples were cut.
            num_chunks = state.mel.num_frames // self.chunk_frames + 1
            room = self.mel.num_samples_for(num_chunks * self.chunk_frames) - state.num_samples
            self._take(samples[:room], state)
            samples = samples[room:]
            if state.num_open_frames == self.window_frames:
                closed.append(self._close(state))
        return torch.cat(closed) if closed else self._no_features()

    @torch.no_grad()
    def provisional(self, state: AudioEncoderState) -> Tensor:
        """Features [m, D] of the open window if the audio ended now; the state keeps its value."""
        tail, maximum = self._end(state)
        return self._encode_open(tail, maximum, state)

    @torch.no_grad()
    def finish(self, state: AudioEncoderState) -> AudioEnd:
        """The end of the utterance, exact: closed windows whose floor the loudest frame moved are encoded again.

        The state keeps its value; `reset` it for the next utterance.
        """
        tail, maximum = self._end(state)
        outdated = (index for index, window in enumerate(state.closed) if not window.floor.holds_for(maximum))
        first = next(outdated, len(state.closed))
        features = [self._encode_closed(window.raw, maximum) for window in state.closed[first:]]
        features.append(self._encode_open(tail, maximum, state))
        return AudioEnd(first * self.num_tokens(self.window_frames), torch.cat(features))

    def longest_chunk(self, state: AudioEncoderState) -> int:
        """Mel frames of the longest chunk of the prompt so far, this utterance included."""
        return max(state.longest_before, min(self.chunk_frames, state.num_samples // self.mel.hop))

    def num_tokens(self, num_mel_frames: int) -> int:
        """Tokens that `num_mel_frames` of one utterance become."""
        return audio_token_count(num_mel_frames, self.chunk_frames // 2)

    def _take(self, samples: Tensor, state: AudioEncoderState) -> None:
        """Append the frames of `samples`, which do not reach past the open chunk, and convolve it once it is full."""
        raw = self.mel.step(samples, state.mel)
        if raw.shape[1] == 0:
            return
        end = state.num_open_frames + raw.shape[1]
        state.raw[:, state.num_open_frames : end] = raw
        state.num_open_frames = end
        if end % self.chunk_frames == 0:
            state.floors.append(self._convolve_full(end // self.chunk_frames - 1, state.mel.maximum, state))

    def _close(self, state: AudioEncoderState) -> Tensor:
        """Encode the full window [n, D], keep its raw mel, and open the next."""
        maximum = state.mel.maximum
        features = self._encode_open(state.raw[:, :0], maximum, state)
        state.closed.append(ClosedWindow(state.raw.clone(), Floor(float(state.raw.min()), maximum)))
        state.num_open_frames = 0
        state.floors.clear()
        return features

    def _end(self, state: AudioEncoderState) -> tuple[Tensor, float]:
        """The raw frames that would end the utterance now, and its maximum with them."""
        tail = self.mel.tail(state.mel)
        return tail, max(state.mel.maximum, float(tail.max())) if tail.shape[1] else state.mel.maximum

    def _encode_open(self, tail: Tensor, maximum: float, state: AudioEncoderState) -> Tensor:
        """Features of the open window followed by `tail` [num_mel, m]."""
        num_frames = state.num_open_frames + tail.shape[1]
        assert num_frames <= self.window_frames, (num_frames, self.window_frames)
        if num_frames == 0:
            return self._no_features()
        for index, floor in enumerate(state.floors):
            if not floor.holds_for(maximum):
                state.floors[index] = self._convolve_full(index, maximum, state)
        num_full = len(state.floors)
        hidden = state.convolved[:num_full].flatten(0, 1)
        if num_frames > num_full * self.chunk_frames:
            held = state.raw[:, num_full * self.chunk_frames : state.num_open_frames]
            is_only_chunk = state.mel.num_frames + tail.shape[1] <= self.chunk_frames
            padded_to = state.longest_before if is_only_chunk else self.chunk_frames
            rest = self._convolve(normalize(torch.cat([held, tail], dim=1), maximum), padded_to)
            hidden = torch.cat([hidden, rest])
        return self._attend(hidden)

    def _encode_closed(self, raw: Tensor, maximum: float) -> Tensor:
        """Features of a whole window of `raw` mel [num_mel, frames]."""
        chunks = torch.split(normalize(raw, maximum), self.chunk_frames, dim=1)
        return self._attend(torch.cat([self._convolve(chunk) for chunk in chunks]))

    def _convolve_full(self, index: int, maximum: float, state: AudioEncoderState) -> Floor:
        """Convolve chunk `index` of the open window, which is full, into its place; return the floor it got."""
        raw = state.raw[:, index * self.chunk_frames : (index + 1) * self.chunk_frames]
        state.convolved[index] = self._convolve(normalize(raw, maximum))
        return Floor(float(raw.min()), maximum)

    def _convolve(self, mel: Tensor, padded_to: int = 0) -> Tensor:
        """Tokens [n, width], with positions, of one chunk of `mel` [num_mel, at most chunk_frames].

        The tower pads a short chunk with zeros up to the longest of the prompt: to a full chunk, unless there is
        none. It must be so here too, as the zeros leak through the biases into the last tokens.
        """
        num_frames = mel.shape[1]
        assert num_frames <= self.chunk_frames, num_frames
        if num_frames < padded_to:
            mel = functional.pad(mel, (0, padded_to - num_frames))
        hidden = mel[None, None].to(self._weight)
        for convolution in self._convolutions:
            hidden = functional.gelu(convolution(hidden))
        tokens = self._conv_out(hidden[0].permute(2, 0, 1).flatten(1))  # [channels, bands, n] -> [n, width]
        tokens = tokens + self._positions(tokens.shape[0]).to(tokens)
        return cast(Tensor, tokens[: self.num_tokens(num_frames)])

    def _attend(self, hidden: Tensor) -> Tensor:
        """Features [n, D] of one window of tokens [n, width]."""
        bounds = torch.tensor([0, hidden.shape[0]], dtype=torch.int32)
        for layer in self._layers:
            hidden = layer(hidden, bounds)[0]
        for module in self._head:
            hidden = module(hidden)
        return hidden

    def _no_features(self) -> Tensor:
        return self._weight.new_empty(0, self._num_features)
