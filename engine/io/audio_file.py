"""Reads any sound file, or the sound of a video file, as the microphone would have heard it: mono at 16 kHz.

libsndfile reads the sound formats; FFmpeg reads the rest, and the WAV files whose header was never finished.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import soundfile
from av.audio.frame import AudioFrame

from engine.io.container import CUT_SHORT_S, REMEDY, MediaContainer
from engine.io.media import Closing, MediaError, NamelessFile, open_media_file
from engine.io.resample import Samples, StreamResampler
from engine.io.wav_header import DataChunk, find_data_chunk

BLOCK: Final = 4096  # samples per channel decoded at once; where a file is damaged, so many before it are lost too
TIMESTAMP_SLACK_S: Final = 0.04  # Matroska rounds to 1 ms, others worse: below this a gap is rounding
LONGEST_GAP_S: Final = 600.0  # beyond it the timestamps are wrong rather than the sound missing


@dataclass(frozen=True, slots=True)
class AudioClip:
    """A whole sound file: `samples` [T] at 16 kHz, and what it was before."""

    samples: Samples
    source_rate_hz: int
    num_channels: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SoundBlock:
    """Decoded sound as the file holds it: `samples` [T, C]."""

    samples: Samples
    rate_hz: int


class SoundDecoder(Protocol):
    """One way to decode a file; `warnings` is complete when `blocks` has ended."""

    rate_hz: int
    num_channels: int
    container: str
    warnings: list[str]

    def blocks(self) -> Iterator[SoundBlock]:
        """Yield the sound from its start."""

    def close(self) -> None:
        """Release the file."""


class AudioReader(Closing):
    """The sound of `path` as one stream of mono samples at 16 kHz, decoded as it is read.

    Sample 0 is time 0 of the container: a sound track that starts late begins with silence, as its pictures expect.
    `warnings` and `num_bad_samples` speak of what has been read so far. Use it in a `with` block.
    """

    def __init__(self, path: Path | str) -> None:
        self._decoder = _open_decoder(Path(path))
        self.source_rate_hz = self._decoder.rate_hz
        self.num_channels = self._decoder.num_channels
        self.container = self._decoder.container
        self._resamplers: list[StreamResampler] = []
        self._pieces = self._resampled()
        self._piece: Samples = np.empty(0, np.float32)  # the rest of what was decoded and not yet read
        self._is_closed = False

    def read(self, num_samples: int) -> Samples:
        """Return the next samples [n]; n is `num_samples` until the end, where it is less, then 0."""
        if num_samples < 1:
            raise ValueError(f"num_samples is {num_samples}: ask for at least 1")
        if self._is_closed:
            raise ValueError("the AudioReader is closed: read inside its with block")
        out = np.empty(num_samples, np.float32)
        filled = 0
        while filled < num_samples:
            if self._piece.size == 0:
                piece = next(self._pieces, None)
                if piece is None:
                    break
                self._piece = piece
            num_taken = min(num_samples - filled, self._piece.size)
            out[filled : filled + num_taken] = self._piece[:num_taken]
            self._piece = self._piece[num_taken:]
            filled += num_taken
        return out[:filled]

    def read_all(self) -> Samples:
        """Return everything that is left [n]."""
        return np.concatenate([self._piece, *self._pieces])

    def close(self) -> None:
        """Release the file; may be called twice."""
        self._is_closed = True
        self._decoder.close()

    @property
    def num_bad_samples(self) -> int:
        """Samples that were NaN, infinite or absurd, and were read as silence."""
        return sum(resampler.num_bad_samples for resampler in self._resamplers)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was wrong with the file and did not keep it from being read."""
        if self.num_bad_samples == 0:
            return tuple(self._decoder.warnings)
        return (*self._decoder.warnings, f"{self.num_bad_samples} samples are not numbers: read as silence")

    def _resampled(self) -> Iterator[Samples]:
        current = None
        for block in self._decoder.blocks():
            source = (block.rate_hz, block.samples.shape[1])
            if source != current:  # a broadcast may change its rate or channels in the middle
                if self._resamplers:
                    yield self._resamplers[-1].flush()
                self._resamplers.append(StreamResampler(*source))
                current = source
            yield self._resamplers[-1].step(block.samples)
        if self._resamplers:
            yield self._resamplers[-1].flush()


def read_audio(path: Path | str) -> AudioClip:
    """Read the whole of `path`."""
    with AudioReader(path) as reader:
        samples = reader.read_all()
        return AudioClip(samples, reader.source_rate_hz, reader.num_channels, reader.warnings)


class SequentialSound(soundfile.SoundFile):  # type: ignore[misc]  # soundfile carries no types
    """A sound file that is read from its start to its end.

    `soundfile` 0.14 seeks after every read of a file that can seek; in an MP3 later blocks then begin wrongly.
    """

    def seekable(self) -> bool:
        """Keep `read` from seeking."""
        return False


class SndfileDecoder:
    """Sound that libsndfile reads."""

    def __init__(self, path: Path) -> None:
        self._file = open_media_file(path)
        try:
            chunk = find_data_chunk(self._file)
            self.warnings = chunk.warnings() if chunk else []
            self.is_unfinished = chunk is not None and chunk.is_unfinished
            self._sound = SequentialSound(NamelessFile(self._file))
            self._refuse_cut_header(path, chunk)
        except (soundfile.LibsndfileError, MediaError, OSError):
            self._file.close()
            raise
        self.rate_hz: int = self._sound.samplerate
        self.num_channels: int = self._sound.channels
        self.container: str = self._sound.format.lower()

    def blocks(self) -> Iterator[SoundBlock]:
        """Yield the sound from its start; where it is damaged it ends, with a warning."""
        num_read = 0
        num_expected = self._sound.frames
        try:
            while len(samples := self._sound.read(BLOCK, dtype="float32", always_2d=True)):
                num_read += len(samples)
                yield SoundBlock(samples, self.rate_hz)
        except soundfile.LibsndfileError:
            self.warnings.append(f"damaged after {num_read / self.rate_hz:.2f} s: the rest was left out")
            return
        if num_expected - num_read > CUT_SHORT_S * self.rate_hz:  # the length of some MP3 files is an estimate
            seconds = f"{num_read / self.rate_hz:.2f} s of {num_expected / self.rate_hz:.2f} s"
            self.warnings.append(f"the sound ends at {seconds}: the file is cut short")

    def close(self) -> None:
        """Release the file."""
        self._sound.close()
        self._file.close()

    def _refuse_cut_header(self, path: Path, chunk: DataChunk | None) -> None:
        """libsndfile takes a header cut off inside its last field for a file of no samples."""
        if chunk is None and self._sound.frames == 0 and self._sound.format in ("WAV", "WAVEX"):
            self._sound.close()
            raise MediaError.about(path, "its header is cut off", "record, export or download it again")


class ContainerDecoder:
    """The sound track of a container, placed by its timestamps."""

    def __init__(self, path: Path, warnings: list[str]) -> None:
        self.warnings = warnings
        self._container = MediaContainer(path)
        track = self._container.sound_track
        if track is None:
            self._container.close()
            raise MediaError.about(path, "it has no sound track", "choose a file with sound")
        self._track = track
        self._frames = self._sound_frames()
        self._first = next(self._frames, None)
        is_wide = self._first is not None and self._first.format.name.startswith("s64")  # PyAV has no array for it
        if is_wide or (self._first is None and (self._container.num_damaged or track.rate < 1)):
            self._container.close()
            raise MediaError.about(path, "its sound is in a format that cannot be decoded", REMEDY)
        # The decoder knows better than the header: HE-AAC states half its rate
        self.rate_hz = track.rate if self._first is None else self._first.sample_rate
        self.num_channels = track.channels if self._first is None else self._first.layout.nb_channels
        self.container = self._container.format_name
        self._shift_s = 0.0  # between the track's timestamps and ours, once a jump has shown them wrong

    def blocks(self) -> Iterator[SoundBlock]:
        """Yield the sound from time 0, with silence where the track has none."""
        end_s = 0.0
        frame = self._first
        while frame is not None:
            rate_hz = frame.sample_rate
            samples = to_float(frame)
            for placed in self._placed(samples, self._gap_s(frame, end_s), rate_hz):
                end_s += len(placed) / rate_hz
                yield SoundBlock(placed, rate_hz)
            frame = next(self._frames, None)
        self.warnings += self._container.warnings(self._track, end_s)

    def close(self) -> None:
        """Release the file."""
        self._container.close()

    def _sound_frames(self) -> Iterator[AudioFrame]:
        for frame in self._container.frames(self._track):
            if isinstance(frame, AudioFrame) and frame.samples and frame.sample_rate:
                yield frame

    def _gap_s(self, frame: AudioFrame, end_s: float) -> float:
        """Silence missing between `end_s` and `frame`; negative where they overlap."""
        time_s = self._container.time_s(frame)
        if time_s is None:
            return 0.0
        gap_s = time_s + self._shift_s - end_s
        if abs(gap_s) > LONGEST_GAP_S:
            self._shift_s -= gap_s
            self.warnings.append(f"the timestamps jump by {gap_s:.0f} s at {end_s:.2f} s: the jump was left out")
            return 0.0
        is_rounding = abs(gap_s) < TIMESTAMP_SLACK_S and frame is not self._first
        return 0.0 if is_rounding else gap_s

    def _placed(self, samples: Samples, gap_s: float, rate_hz: int) -> Iterator[Samples]:
        """Yield `samples` [T, C] after the silence of a gap, a second at a time, or without what overlaps."""
        gap = round(gap_s * rate_hz)
        for start in range(0, gap, rate_hz):
            yield np.zeros((min(rate_hz, gap - start), samples.shape[1]), np.float32)
        yield samples[max(-gap, 0) :]


def to_float(frame: AudioFrame) -> Samples:
    """Samples of `frame` [T, C] between -1 and 1, from any of FFmpeg's integer and float formats."""
    raw = frame.to_ndarray()  # [C, T] if planar, else [1, T * C]
    with np.errstate(over="ignore"):  # a double too large becomes infinite and is counted as a bad sample
        samples: Samples = raw.astype(np.float32)
    samples = samples.T if frame.format.is_planar else samples.reshape(-1, frame.layout.nb_channels)
    if raw.dtype.kind == "u":  # 8-bit, silence at 128
        return (samples - np.float32(128)) / np.float32(128)
    if raw.dtype.kind == "i":
        return samples / np.float32(2 ** (8 * raw.itemsize - 1))
    return samples


def _open_decoder(path: Path) -> SoundDecoder:
    try:
        decoder = SndfileDecoder(path)
    except soundfile.LibsndfileError as error:
        return _open_container(path, error)
    if decoder.is_unfinished:  # libsndfile believes a stated length of 0; FFmpeg reads to the end
        decoder.close()
        return ContainerDecoder(path, decoder.warnings)
    return decoder


def _open_container(path: Path, sndfile_error: soundfile.LibsndfileError) -> SoundDecoder:
    """Let FFmpeg try; a WAV file that neither can read gets libsndfile's reason, which is the clearer one."""
    try:
        return ContainerDecoder(path, [])
    except MediaError as error:
        reason = sndfile_error.error_string.rstrip(".")
        if "WAV" not in reason and "Channel" not in reason:
            raise
        raise MediaError.about(path, f"its header makes no sense ({reason})", "export or record it again") from error
