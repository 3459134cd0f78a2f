"""Makes one reply and plays it: bounded work per step, events as it goes, and one end, whatever happens."""

from collections.abc import Callable

from engine import events
from engine.clock import SPEAKER_STEP, speaker_seconds
from engine.config import EngineConfig
from engine.conversation import Conversation
from engine.heard import SpeechRate, num_heard_tokens
from engine.io.speaker import Speaker
from engine.layout import TextStream
from engine.listening import Emit, HeardTurn
from engine.reply import EndReason, Reply, ReplyLimits, Sound, StageError, TextToken, codec_sha256
from engine.stages import Stages
from engine.trace import TraceWriter

LIMIT_NOTICES = {
    EndReason.TEXT_LIMIT: "The reply was cut: it reached the limit of {limits.max_text_tokens} text tokens.",
    EndReason.SPEECH_LIMIT: "The speech was cut: it reached the limit of {limits.max_frames} codec frames.",
    EndReason.SPEECH_LOOP: "The speech was cut: it had repeated itself for six seconds.",
    EndReason.CONTEXT_FULL: "The reply was cut: the conversation is full. Start a new one.",
    EndReason.EMPTY: "The model had nothing to say.",
}


class Speaking:
    """One reply, from the end of the user's turn to the last sample heard."""

    def __init__(
        self,
        heard: HeardTurn,
        generation: int,
        conversation: Conversation,
        stages: Stages,
        config: EngineConfig,
        speaker: Speaker,
        emit: Emit,
        clock: Callable[[], float],
        asked_at: float,
    ) -> None:
        """`asked_at` is the moment on `clock` when the user's turn ended."""
        self._heard_turn, self._generation = heard, generation
        self._conversation, self._stages, self._config = conversation, stages, config
        self._speaker, self._emit, self._clock = speaker, emit, clock
        self._asked_at = asked_at
        speech = config.speech
        self._limits = ReplyLimits(speech.max_text_tokens, speech.max_frames, speech.decode_frames, speech.stops_loops)
        self._reply = Reply(conversation, stages, self._limits, speaker.backlog_ms, is_spoken=heard.is_spoken)
        self._parts = self._reply.run()
        self._text = TextStream(stages.scribe)
        self._lengths: list[int] = []  # characters per token
        self._pieces: list[str] = []
        self._samples: list[Sound] = []
        self._num_samples = 0
        self._prompt_ids: tuple[int, ...] = ()
        self._first_token_ms: float | None = None
        self._first_audio_ms: float | None = None
        self._busy_s = 0.0
        self._is_made = False
        speaker.begin()
        emit(events.ReplyStarted(generation, heard.turn))

    @property
    def is_over(self) -> bool:
        """Whether all is made and played."""
        return self._is_made and not self._speaker.backlog_ms()

    @property
    def heard_s(self) -> float:
        """Speech the user has heard of this reply."""
        return speaker_seconds(self._speaker.num_heard())

    @property
    def busy_s(self) -> float:
        """Compute time spent on this reply."""
        return self._busy_s

    @property
    def spoken_s(self) -> float:
        """Length of the speech made so far."""
        return speaker_seconds(self._num_samples)

    def advance(self, until: float, stop_at_s: float | None) -> None:
        """Work until the moment `until`, or until enough speech waits, or `stop_at_s` seconds were heard."""
        most = self._config.speech.decode_frames * SPEAKER_STEP
        while not self._is_made and self._clock() < until and self._speaker.room >= most and self._may_run_ahead():
            if stop_at_s is not None and self.heard_s >= stop_at_s:
                return
            self._make_part()

    def finish(self, rate: SpeechRate, trace: TraceWriter | None) -> SpeechRate:
        """Close a reply that ran to its end; return the voice's rate with this one counted."""
        if self._heard_turn.is_spoken and self._num_samples and self._reply.end_reason is EndReason.FINISHED:
            rate = rate.after(sum(self._lengths), self.spoken_s)
        if notice := LIMIT_NOTICES.get(self._reply.end_reason):
            self._emit(events.Notice(notice.format(limits=self._limits)))
        self._end(self._reply.end_reason.value, len(self._reply.token_ids), trace)
        return rate

    def cut(self, rate: SpeechRate, trace: TraceWriter | None) -> None:
        """Stop now: the history keeps what was heard, and nothing of the rest is ever played."""
        self._parts.close()
        self._speaker.cut()
        num_kept = len(self._reply.token_ids)
        if self._heard_turn.is_spoken:
            spoken_s = self.spoken_s if self._reply.speech_ended else None
            num_kept = num_heard_tokens(self._lengths, self.heard_s, spoken_s, rate)
        self._end(EndReason.INTERRUPTED.value, num_kept, trace)

    def _may_run_ahead(self) -> bool:
        backlog_ms = self._speaker.backlog_ms()
        return backlog_ms is None or backlog_ms < self._config.speech.max_ahead_ms

    def _make_part(self) -> None:
        began = self._clock()
        try:
            part = next(self._parts, None)
        except StageError as error:
            self._emit(events.Notice(str(error)))
            part = None
        now = self._clock()
        self._busy_s += now - began
        match part:
            case None:
                self._is_made = True
                self._speaker.end()
            case TextToken(token_id):
                self._take_text(token_id, now)
            case Sound():
                self._take_sound(part, now)

    def _take_text(self, token_id: int, now: float) -> None:
        if self._first_token_ms is None:
            self._first_token_ms = 1000 * (now - self._asked_at)
            self._prompt_ids = self._conversation.timeline.token_ids[: self._conversation.reply_start]
        delta = self._text.push(token_id)
        self._lengths.append(len(delta))
        if delta:
            self._pieces.append(delta)
            self._emit(events.TextDelta(self._generation, delta))

    def _take_sound(self, sound: Sound, now: float) -> None:
        if self._first_audio_ms is None:
            self._first_audio_ms = 1000 * (now - self._asked_at)
        self._num_samples += len(sound.samples)
        if self._stages.keeps_media:
            self._samples.append(sound)
        self._speaker.write(sound.samples)
        self._emit(events.SpeechDelta(self._generation, len(sound.samples)))

    def _end(self, reason: str, num_kept: int, trace: TraceWriter | None) -> None:
        codes = self._reply.codes()
        token_ids = self._reply.token_ids
        if trace is not None:
            prompt = self._prompt_ids or self._conversation.timeline.token_ids
            trace.add_reply(prompt, token_ids, codes, [sound.samples for sound in self._samples])
        heard_s = self.heard_s
        self._conversation.end_reply(token_ids[:num_kept])
        self._emit(
            events.ReplyEnded(
                generation=self._generation,
                turn=self._heard_turn.turn,
                reason=reason,
                text="".join(self._pieces),
                heard_text=self._stages.scribe.text(token_ids[:num_kept]),
                token_ids=tuple(token_ids),
                num_codec_frames=len(codes),
                codec_sha256=codec_sha256(codes),
                audio_s=self.spoken_s,
                heard_s=heard_s,
                first_token_ms=self._first_token_ms,
                first_audio_ms=self._first_audio_ms,
                busy_s=self._busy_s,
            )
        )
