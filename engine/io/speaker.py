"""Where speech goes: it is played at its own pace, and what was heard so far is known to the sample."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import soundfile

from engine.channels import AudioRing, Samples
from engine.clock import SPEAKER_RATE_HZ
from engine.io.media import Closing, MediaError


class Speaker(Protocol):
    """A sink for speech at 24 kHz. Called by the engine thread only."""

    @property
    def room(self) -> int:
        """Samples that can be written now."""
        ...

    def write(self, samples: Samples) -> None:
        """Queue `samples` [n], at most `room` of them."""
        ...

    def backlog_ms(self) -> float | None:
        """Speech queued and not yet played; None where playing takes no time."""
        ...

    def begin(self) -> None:
        """A new reply: count what is heard from zero."""
        ...

    def num_heard(self) -> int:
        """Samples of this reply that were played."""
        ...

    def end(self) -> None:
        """All of this reply was written."""
        ...

    def cut(self) -> int:
        """Drop what is queued and return how many samples that was."""
        ...

    @property
    def num_underrun_samples(self) -> int:
        """Samples by which sound came too late, so far."""
        ...

    def close(self) -> None:
        """Release the device or file."""
        ...


class FileSpeaker(Closing):
    """Plays into a WAV file (or into nothing), at the pace of `clock`, or at once where there is no clock.

    What was cut is not in the file: it holds what a listener would have heard.
    """

    def __init__(self, path: Path | None, capacity: int, clock: Callable[[], float] | None) -> None:
        self._ring = AudioRing(capacity)
        self._block = np.zeros(capacity, dtype=np.float32)
        self._clock = clock
        self._file = None if path is None else _open_wav(path)
        self._began_s: float | None = None
        self._heard = 0
        self._is_fed = False
        self._num_underrun_samples = 0

    @property
    def room(self) -> int:
        """Samples that can be written now."""
        self._play()
        return self._ring.capacity - self._ring.backlog

    def write(self, samples: Samples) -> None:
        """Queue `samples` [n], at most `room` of them."""
        self._play()
        if self._began_s is None and self._clock is not None:
            self._began_s = self._clock()
        self._is_fed = True
        written = self._ring.write(samples)
        assert written == len(samples), f"{len(samples)} samples written, {written} fit: plan by `room`"
        self._play()

    def backlog_ms(self) -> float | None:
        """Speech queued and not yet played; None where playing takes no time."""
        if self._clock is None:
            return None
        self._play()
        return 1000 * self._ring.backlog / SPEAKER_RATE_HZ

    def begin(self) -> None:
        """A new reply: count what is heard from zero."""
        self._began_s = None
        self._heard = 0

    def num_heard(self) -> int:
        """Samples of this reply that were played."""
        self._play()
        return self._heard

    def end(self) -> None:
        """All of this reply was written: silence after it is no underrun."""
        self._is_fed = False

    def cut(self) -> int:
        """Drop what is queued and return how many samples that was."""
        self._play()
        self._is_fed = False
        dropped = self._ring.cut()
        self._ring.read_into(self._block[:0])  # the reader passes the cut, so that its room is free again
        return dropped

    @property
    def num_underrun_samples(self) -> int:
        """Samples by which sound came too late, so far."""
        return self._num_underrun_samples

    def close(self) -> None:
        """Finish the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _play(self) -> None:
        if self._clock is None:
            self._take(self._ring.backlog)
        elif self._began_s is not None:
            due = int((self._clock() - self._began_s) * SPEAKER_RATE_HZ) - self._heard
            missing = due - self._ring.backlog
            self._take(min(due, self._ring.backlog))
            if missing > 0:  # the speaker ran dry: what comes next is late by that much
                self._began_s += missing / SPEAKER_RATE_HZ
                self._num_underrun_samples += missing * self._is_fed

    def _take(self, num_samples: int) -> None:
        if num_samples <= 0:
            return
        block = self._block[:num_samples]
        self._ring.read_into(block)
        self._heard += num_samples
        if self._file is not None:
            self._file.write(block)


def _open_wav(path: Path) -> soundfile.SoundFile:
    try:
        return soundfile.SoundFile(path, "w", samplerate=SPEAKER_RATE_HZ, channels=1, subtype="PCM_16", format="WAV")
    except (soundfile.LibsndfileError, OSError) as error:
        raise MediaError.about(path, f"the speech cannot be written there ({error})", "choose another file") from error
