"""Makes the user's message out of what each step brings, and says when there is something to answer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine import events
from engine.clock import MIC_RATE_HZ, MIC_STEP, STEP_MS, mic_seconds
from engine.config import Bypass, EngineConfig
from engine.conversation import ContextFullError, Conversation, Mark
from engine.io.media import MediaError, Picture
from engine.io.sources import PictureSampler, StepInput, TurnOpening, audible_peak
from engine.stages import Stages
from engine.user_turn import TurnMedia, TurnPolicy, UserTurn, picture_message

Emit = Callable[[events.Event], None]


@dataclass(frozen=True, slots=True)
class HeardTurn:
    """A complete user message that wants an answer."""

    turn: int
    is_spoken: bool  # the answer is: the Talker takes part
    media: TurnMedia
    is_image: bool


@dataclass
class _Open:
    """A message under way."""

    number: int
    opening: TurnOpening
    start_s: float
    mark: Mark
    user: UserTurn | None  # None: a still picture, written when its text is known
    sampler: PictureSampler
    still: Picture | None = None
    duration_s: float = 0.0
    peak: float = 0.0


class Listener:
    """Takes steps; returns a `HeardTurn` at the end of each message that can be answered."""

    def __init__(self, conversation: Conversation, stages: Stages, config: EngineConfig, emit: Emit) -> None:
        self._conversation, self._stages, self._config, self._emit = conversation, stages, config, emit
        settings = config.input
        self._policy = TurnPolicy(
            settings.provisional, settings.provisional_chunks, settings.stride_chunks, settings.exact_floor
        )
        self._num_turns = 0
        self._open: _Open | None = None

    @property
    def is_open(self) -> bool:
        """Whether a message is under way."""
        return self._open is not None

    def take(self, step: StepInput, now_s: float, *, is_late: bool) -> HeardTurn | None:
        """Add one step to the message; `is_late` spares the work that may be left out."""
        try:
            return self._take(step, now_s, is_late)
        except (ContextFullError, MediaError) as error:
            self.drop(str(error))
            return None  # steps of the rest of the message find none open, and are passed over

    def forget(self) -> None:
        """Drop the message under way without a word."""
        if self._open is not None:
            self._conversation.rollback(self._open.mark)
            self._open = None

    def drop(self, reason: str) -> None:
        """Give the message under way up, and say why."""
        if self._open is None:
            return
        number = self._open.number
        self.forget()
        self._emit(events.UserTurnDropped(number, reason))

    def _take(self, step: StepInput, now_s: float, is_late: bool) -> HeardTurn | None:
        if step.opening is not None:
            self._begin(step.opening, now_s)
        if self._open is None:
            return None
        self._add(step, self._open, is_late)
        return self._end(step, self._open) if step.ends_turn else None

    def _begin(self, opening: TurnOpening, now_s: float) -> None:
        self._num_turns += 1
        self._conversation.eager_talker = self._is_spoken(opening)
        mark = self._conversation.mark()
        is_picture = opening.is_still and not opening.has_audio
        self._open = _Open(self._num_turns, opening, now_s, mark, None, PictureSampler(self._config.input.video_fps))
        if not is_picture:
            self._open.user = UserTurn(
                self._conversation,
                self._stages,
                self._policy,
                has_audio=opening.has_audio,
                has_video=opening.has_video,
            )
        self._emit(events.UserTurnStarted(self._num_turns, now_s))

    def _is_spoken(self, opening: TurnOpening) -> bool:
        match self._config.speech.bypass:
            case Bypass.ALWAYS:
                return False
            case Bypass.NEVER:
                return self._stages.speech is not None
            case Bypass.AUTO:
                return self._stages.speech is not None and (opening.has_audio or opening.has_video)

    def _add(self, step: StepInput, turn: _Open, is_late: bool) -> None:
        turn.duration_s += mic_seconds(len(step.samples)) if turn.opening.has_audio else STEP_MS / 1000
        turn.peak = max(turn.peak, audible_peak(step.samples))
        for picture in step.pictures:
            turn.still = turn.still or picture
        if turn.user is None:
            return
        turn.user.hear(torch.from_numpy(step.samples))
        for picture in step.pictures:
            for due in turn.sampler.push(picture):
                turn.user.see(due)
        for due in turn.sampler.advance(turn.duration_s):
            turn.user.see(due)
        if not is_late and not step.ends_turn:
            turn.user.update(MIC_STEP)

    def _end(self, step: StepInput, turn: _Open) -> HeardTurn | None:
        for notice in step.notices:
            self._emit(events.Notice(notice))
        nothing = self._nothing_to_answer(step, turn)
        if nothing is not None:
            self.drop(nothing)
            return None
        is_image = turn.user is None
        if turn.user is None:
            assert turn.still is not None, "a picture turn without a picture"
            media = picture_message(self._conversation, self._stages, turn.still, step.text)
        else:
            turn.user.end(step.text)
            media = turn.user.media
        self._open = None
        has_length = turn.opening.has_audio or (turn.opening.has_video and not turn.opening.is_still)
        end_s = turn.start_s + (turn.duration_s if has_length else 0.0)
        self._emit(events.UserTurnEnded(turn.number, turn.start_s, end_s, step.text.strip() or None))
        return HeardTurn(turn.number, self._is_spoken(turn.opening), media, is_image)

    def _nothing_to_answer(self, step: StepInput, turn: _Open) -> str | None:
        """Why the message cannot be answered, or None: an answer made from padding or silence would be invented."""
        settings = self._config.input
        if step.text.strip() or turn.opening.has_video:
            return None
        if not turn.opening.has_audio or turn.user is None:
            return "the message is empty: type something"
        num_samples = turn.user.num_samples
        if num_samples < settings.min_turn_ms * MIC_RATE_HZ // 1000:
            heard_ms = 1000 * num_samples / MIC_RATE_HZ
            return (
                f"{heard_ms:.0f} ms of sound is too short to understand: speak for at least {settings.min_turn_ms} ms"
            )
        if turn.opening.needs_speech and turn.peak < settings.silence_peak:
            return "there was only silence: check that the microphone is not muted, or choose a louder file"
        return None
