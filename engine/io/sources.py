"""Where the user's side comes from, one 80 ms step at a time. A file, a device and a recording are all sources."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from engine.channels import Samples
from engine.clock import MIC_STEP, STEP_MS
from engine.io.audio_file import AudioReader
from engine.io.media import Closing, MediaError, Picture
from engine.io.video_file import VideoReader

NO_SAMPLES: Samples = np.zeros(0, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class TurnOpening:
    """A user's message begins: what it will hold. `needs_speech`: with nothing audible there is nothing to answer."""

    has_audio: bool
    has_video: bool
    is_still: bool
    needs_speech: bool


@dataclass(frozen=True, slots=True, eq=False)
class StepInput:
    """What one step brings. `pictures` carry times from the start of their turn."""

    opening: TurnOpening | None = None
    samples: Samples = field(default_factory=lambda: NO_SAMPLES)
    pictures: tuple[Picture, ...] = ()
    ends_turn: bool = False
    text: str = ""  # typed beside what was said; with `ends_turn`
    notices: tuple[str, ...] = ()  # what was wrong with the files of the turn; with `ends_turn`


class Source(Protocol):
    """Gives the user's side step by step."""

    def read(self) -> StepInput | None:
        """The next step, or None when there will be no more."""
        ...

    @property
    def interrupts_after_s(self) -> float | None:
        """Seconds of the present reply after which the user speaks over it; None: lets it finish."""
        ...

    def skip(self) -> None:
        """Give the present turn up: the next step belongs to the next one."""
        ...

    def close(self) -> None:
        """Release files and devices."""
        ...


@dataclass(frozen=True, slots=True)
class ScriptTurn:
    """One message of a scripted user: a sound file, a video or picture, typed text, or several of them."""

    mic: Path | None = None
    camera: Path | None = None
    text: str | None = None
    interrupts_after_s: float | None = None  # speak over the reply *to this message* after so much of it

    def __post_init__(self) -> None:
        if self.mic is None and self.camera is None and not (self.text or "").strip():
            raise ValueError("a turn needs a sound file, a camera file or a text that is not empty")


class ScriptSource:
    """Plays a list of turns from files, each 80 ms after 80 ms, in order."""

    def __init__(self, turns: Sequence[ScriptTurn]) -> None:
        """Check that every file can be opened; a `MediaError` names the first that cannot."""
        self._turns = tuple(turns)
        for turn in self._turns:
            with _OpenTurn(turn):
                pass
        self._current: _OpenTurn | None = None
        self._next = 0

    @property
    def interrupts_after_s(self) -> float | None:
        """When the user speaks over the reply to the last turn read."""
        return self._turns[self._next - 1].interrupts_after_s if self._next else None

    def read(self) -> StepInput | None:
        """The next step of the present turn, or the first of the next."""
        opening: TurnOpening | None = None
        if self._current is None:
            if self._next == len(self._turns):
                return None
            self._current = _OpenTurn(self._turns[self._next])
            self._next += 1
            opening = self._current.opening
        step = self._current.read(opening)
        if step.ends_turn:
            self._current.close()
            self._current = None
        return step

    def skip(self) -> None:
        """Give the present turn up: the next step belongs to the next one."""
        self.close()

    def close(self) -> None:
        """Close the files of the present turn."""
        if self._current is not None:
            self._current.close()
            self._current = None


class _OpenTurn(Closing):
    """Readers of one turn. Sound and picture share a clock that starts at 0."""

    def __init__(self, turn: ScriptTurn) -> None:
        self._turn = turn
        self._video = None if turn.camera is None else VideoReader(turn.camera)
        try:
            self._audio = self._open_audio(turn)
        except MediaError:
            self.close()
            raise
        self._pictures: Iterator[Picture] = iter(self._video) if self._video else iter(())
        self._ahead: Picture | None = None
        self._num_steps = 0
        self._audio_ended = self._audio is None
        self._video_ended = self._video is None

    def _open_audio(self, turn: ScriptTurn) -> AudioReader | None:
        self._audio = None
        if turn.mic is not None:
            return AudioReader(turn.mic)
        if self._video is not None and self._video.has_sound and turn.camera is not None:
            return AudioReader(turn.camera)
        return None

    @property
    def opening(self) -> TurnOpening:
        return TurnOpening(
            has_audio=self._audio is not None,
            has_video=self._video is not None,
            is_still=self._video is not None and self._video.is_still,
            needs_speech=self._turn.mic is not None,
        )

    def read(self, opening: TurnOpening | None) -> StepInput:
        samples = NO_SAMPLES
        if self._audio is not None and not self._audio_ended:
            samples = self._audio.read(MIC_STEP)
            self._audio_ended = len(samples) < MIC_STEP
        self._num_steps += 1
        pictures = tuple(self._pictures_before(self._num_steps * STEP_MS / 1000))
        if not (self._audio_ended and self._video_ended):
            return StepInput(opening, samples, pictures)
        return StepInput(opening, samples, pictures, True, self._turn.text or "", tuple(self._notices()))

    def _notices(self) -> Iterator[str]:
        if self._audio is not None:
            yield from self._audio.warnings
        if self._video is not None:
            yield from self._video.warnings
            if self._audio is None and not self._video.is_still:
                yield f"{self._turn.camera}: this video has no sound; it was watched only."

    def _pictures_before(self, end_s: float) -> Iterator[Picture]:
        while not self._video_ended:
            picture = self._ahead or next(self._pictures, None)
            self._ahead = None
            if picture is None:
                self._video_ended = True
            elif picture.time_s >= end_s:
                self._ahead = picture
                return
            else:
                yield picture

    def close(self) -> None:
        if self._audio is not None:
            self._audio.close()
        if self._video is not None:
            self._video.close()


class PictureSampler:
    """Turns pictures with any timestamps into one every 1 / `fps` seconds: the newest at each tick.

    The model's clock has no gaps: a camera that is late shows its last picture again.
    """

    def __init__(self, fps: float) -> None:
        self._interval_s = 1 / fps
        self._num_ticks = 0
        self._newest: Picture | None = None

    def push(self, picture: Picture) -> Iterator[Picture]:
        """Take a picture; yield what was due before it."""
        yield from self.advance(picture.time_s)
        self._newest = picture

    def advance(self, time_s: float) -> Iterator[Picture]:
        """Yield the pictures of the ticks before `time_s`."""
        while self._newest is not None and self._num_ticks * self._interval_s < time_s:
            yield self._newest
            self._num_ticks += 1


def audible_peak(samples: Samples) -> float:
    """Largest magnitude of `samples`, full scale being 1."""
    return float(np.abs(samples).max()) if len(samples) else 0.0
