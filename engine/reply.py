"""One reply, made in the order in which it is needed: first token, first frame, first sound, then token by token.

Thinker, Talker, code predictor and Code2Wav advance in lock-step, one text token and one codec frame at a time. The
Talker can never run ahead of the text: frame g is made only when token g + 1 is there, or the text has ended.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.clock import STEP_MS
from engine.conversation import ContextFullError, Conversation
from engine.models.code2wav import Code2WavState
from engine.models.sampling import NOT_FINITE
from engine.models.transfer import to_host
from engine.stages import Speech, Stages

# One call of Code2Wav may make as much sound as half of what waits at the speaker.
BACKLOG_SHARE = 0.5


class StageError(RuntimeError):
    """A stage computed something that is no result."""


class EndReason(Enum):
    """Why a reply ended."""

    FINISHED = "finished"
    EMPTY = "empty"
    TEXT_LIMIT = "text limit"
    SPEECH_LIMIT = "speech limit"
    SPEECH_LOOP = "speech loop"
    CONTEXT_FULL = "context full"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class TextToken:
    """The Thinker's next token."""

    token_id: int


@dataclass(frozen=True, slots=True, eq=False)
class Sound:
    """Speech samples [n] at 24 kHz, on the host."""

    samples: NDArray[np.float32]
    num_frames: int


ReplyPart = TextToken | Sound


@dataclass(frozen=True, slots=True)
class ReplyLimits:
    """Where a reply that does not end is cut."""

    max_text_tokens: int
    max_frames: int
    decode_frames: int
    stops_loops: bool = True


def frames_per_decode(num_decoded: int, backlog_ms: float | None, most: int) -> int:
    """How many codec frames to decode in one call: one while sound is urgent, more once playback has a cushion.

    `backlog_ms` is None where nobody waits for the sound (a file played as fast as it can be).
    """
    if num_decoded == 0:
        return 1
    if backlog_ms is None:
        return most
    return max(1, min(most, int(BACKLOG_SHARE * backlog_ms / STEP_MS)))


class LoopGuard:
    """Notices speech that repeats itself: code 0 has had one period, of up to `max_period` frames, for `num_frames`."""

    def __init__(self, max_period: int = 25, num_frames: int = 75) -> None:
        self._num_frames = num_frames
        self._runs = [0] * max_period  # for each period: frames in a row that equal the one a period earlier
        self._recent: deque[int] = deque(maxlen=max_period)

    def is_loop(self, code: int) -> bool:
        """Add a frame's code 0 and say whether it has looped long enough to be no speech."""
        for period, earlier in enumerate(reversed(self._recent)):
            self._runs[period] = self._runs[period] + 1 if earlier == code else 0
        self._recent.append(code)
        return max(self._runs) >= self._num_frames


class Reply:
    """A reply under way. `run` is a generator of bounded pieces of work; dropping it abandons the reply."""

    def __init__(
        self,
        conversation: Conversation,
        stages: Stages,
        limits: ReplyLimits,
        backlog_ms: Callable[[], float | None],
        *,
        is_spoken: bool,
    ) -> None:
        self._conversation, self._stages, self._limits = conversation, stages, limits
        self._backlog_ms = backlog_ms
        self._speech = stages.speech if is_spoken else None
        self._tokens: list[Tensor] = []
        self.token_ids: list[int] = []
        self._text_ended = False
        self._num_fed = 0
        self._num_spoken: int | None = None  # text tokens the Talker takes; known when the text has ended
        self._frames: list[Tensor] = []
        self._num_decoded = 0
        self._wave: Code2WavState | None = None
        self.speech_ended = False
        self.end_reason = EndReason.FINISHED

    @property
    def num_frames(self) -> int:
        """Codec frames made so far."""
        return len(self._frames)

    def codes(self) -> NDArray[np.int32]:
        """All codec frames so far, [frames, K] int32."""
        if not self._frames:
            num_codes = self._stages.speech.talker.predictor.num_codes if self._stages.speech else 0
            return np.zeros((0, num_codes), dtype=np.int32)
        return to_host(torch.stack(self._frames).to(torch.int32), "codes").numpy()

    def run(self) -> Generator[ReplyPart, None, None]:
        """Make the reply, piece by piece. Speech goes before the rest of the text."""
        self._conversation.begin_reply()
        self._stages.thinker_sampler.reset(self._conversation.timeline.token_ids)
        yield from self._next_token()
        if self.token_ids and self._speech is not None:
            yield from self._speak(self._speech)
        self.speech_ended = True
        while not self._text_ended:
            yield from self._next_token()
        if not self.token_ids:
            self.end_reason = EndReason.EMPTY

    # -- text

    def _next_token(self) -> Iterator[TextToken]:
        if self._num_fed < len(self._tokens):
            try:
                self._conversation.extend_reply(self._tokens[-1], self.token_ids[-1])
            except ContextFullError:  # what is written is still spoken
                self.end_reason = EndReason.CONTEXT_FULL
                self._end_text(len(self.token_ids))
                return
            self._num_fed += 1
        with self._stages.metrics.span("thinker_head"):
            token = self._stages.thinker_sampler(self._conversation.reply_logits())
        token_id = _checked(token, "Thinker")
        if token_id == self._stages.scribe.end_of_reply:
            self._end_text(len(self.token_ids))
            return
        self._tokens.append(token)
        self.token_ids.append(token_id)
        if len(self.token_ids) >= self._limits.max_text_tokens:
            # As transformers' generate: the last token of a text cut by its limit is written, not spoken.
            self._end_text(max(1, len(self.token_ids) - 1))
            self.end_reason = EndReason.TEXT_LIMIT
        yield TextToken(token_id)

    def _end_text(self, num_spoken: int) -> None:
        self._text_ended = True
        self._num_spoken = num_spoken

    # -- speech

    def _speak(self, speech: Speech) -> Iterator[ReplyPart]:
        talker, metrics = speech.talker, self._stages.metrics
        speech.talker_sampler.reset()
        self._wave = speech.code2wav.init_state()
        with metrics.span("talker_start"):
            rows = talker.start_rows(self._text_row(speech, 0), speech.speaker_id)
            hidden = self._conversation.begin_speech(rows)
        num_rows = rows.shape[0]
        guard = LoopGuard()
        while len(self._frames) < self._limits.max_frames:
            with metrics.span("talker_head"):
                code = talker.first_code(hidden, speech.talker_sampler)
                code_id = _checked(code, "Talker")
            if code_id == speech.end_of_speech:
                break
            if guard.is_loop(code_id) and self._limits.stops_loops:
                self.end_reason = EndReason.SPEECH_LOOP
                break
            with metrics.span("code_predictor"):
                frame = talker.complete(hidden, code, speech.predictor_sampler)
            self._frames.append(frame.codes)
            yield from self._decode(speech, at_least=self._frames_wanted())
            yield from self._text_until(len(self._frames))
            with metrics.span("talker_step"):
                row = frame.embedding + self._trailing_row(speech, len(self._frames))
                hidden = self._conversation.extend_speech(row, num_rows)
            num_rows += 1
        else:
            self.end_reason = EndReason.SPEECH_LIMIT
        yield from self._decode(speech, at_least=1)

    def _text_until(self, index: int) -> Iterator[TextToken]:
        """Wait for text token `index`: the Talker must never be fed padding because the Thinker is late."""
        while not self._text_ended and len(self.token_ids) <= index:
            yield from self._next_token()

    def _text_row(self, speech: Speech, index: int) -> Tensor:
        return speech.talker.text_row(self._stages.thinker.embed_token(self._tokens[index]))

    def _trailing_row(self, speech: Speech, index: int) -> Tensor:
        """What the frame `index` is told of the text: token `index`, then the end once, then padding."""
        talker = speech.talker
        if self._num_spoken is None or index < self._num_spoken:
            return self._text_row(speech, index)
        return talker.text_end if index == self._num_spoken else talker.text_pad

    def _frames_wanted(self) -> int:
        return frames_per_decode(self._num_decoded, self._backlog_ms(), self._limits.decode_frames)

    def _decode(self, speech: Speech, at_least: int) -> Iterator[Sound]:
        waiting = self._frames[self._num_decoded :]
        if len(waiting) < at_least:
            return
        assert self._wave is not None, "decoding before speech began"
        with self._stages.metrics.span("code2wav"):
            samples = speech.code2wav.step(torch.stack(waiting, dim=1), self._wave)
            on_host = to_host(samples, "samples").float().numpy()
        self._num_decoded += len(waiting)
        if not np.isfinite(on_host).all():
            raise StageError("Code2Wav computed samples that are no numbers: the speech stops here")
        yield Sound(on_host, len(waiting))


def _checked(token: Tensor, stage: str) -> int:
    """The token id on the host; the one copy between stages that there is."""
    token_id = int(to_host(token, "token"))
    if token_id == NOT_FINITE:
        raise StageError(f"the {stage} computed scores that are no numbers (NaN or infinite): the reply stops here")
    return token_id


def codec_sha256(codes: NDArray[np.int32]) -> str:
    """Hash of codec frames [frames, K] int32 in C order: two runs with equal hashes spoke the same."""
    return hashlib.sha256(np.ascontiguousarray(codes, dtype=np.int32).tobytes()).hexdigest()
