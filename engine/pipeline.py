"""One step of the engine, top to bottom in the order the data flows: listen, or answer; then say what happened."""

from collections.abc import Callable

from engine import events
from engine.channels import Latest
from engine.clock import STEP_MS
from engine.commands import Command, EndTurn, Interrupt, Reset, SendText
from engine.config import EngineConfig, SettingError
from engine.conversation import Conversation
from engine.events import StageSummary
from engine.heard import SpeechRate
from engine.io.media import MediaError, Picture
from engine.io.sources import Source, StepInput, TurnOpening
from engine.io.speaker import Speaker
from engine.listening import Emit, HeardTurn, Listener
from engine.models.transfer import copies
from engine.speaking import Speaking
from engine.stages import Stages
from engine.timeline import Role
from engine.trace import TraceWriter

# The part of a step that may be spent on a reply: the rest belongs to listening and to being on time.
REPLY_SHARE = 0.95
# The part of the context that the system prompt may take.
SYSTEM_SHARE = 0.5


class Pipeline:
    """Owns the conversation; touched by the engine thread only."""

    def __init__(
        self,
        stages: Stages,
        config: EngineConfig,
        source: Source,
        speaker: Speaker,
        emit: Emit,
        preview: Latest[Picture],
        clock: Callable[[], float],
    ) -> None:
        self._stages, self._config, self._source, self._speaker = stages, config, source, speaker
        self._emit, self._preview, self._clock = emit, preview, clock
        self._conversation = Conversation(
            stages.thinker,
            stages.speech.talker if stages.speech else None,
            stages.scribe,
            stages.metrics,
            max_tokens=stages.max_tokens,
            prefill_rows=config.input.prefill_rows,
        )
        self._write_system(config.system_prompt)
        self._start = self._conversation.mark()
        self._listener = Listener(self._conversation, stages, config, emit)
        self._trace = self._new_trace()
        self._speaking: Speaking | None = None
        self._num_replies = 0
        self._rate = SpeechRate()
        self._time_s = 0.0  # of the conversation: what was listened to and what was played
        self._busy_s = 0.0
        self._spoken_s = 0.0
        self._source_ended = False

    def _write_system(self, prompt: str) -> None:
        ids = self._stages.scribe.system(prompt) if prompt else []
        if len(ids) > SYSTEM_SHARE * self._stages.max_tokens:
            raise SettingError(
                f"the system prompt takes {len(ids)} of the {self._stages.max_tokens} tokens of the context: shorten it"
            )
        self._conversation.write(Role.SYSTEM, ids)

    @property
    def is_resting(self) -> bool:
        """Whether nothing will happen until a command comes."""
        return self._source_ended and self._speaking is None

    def obey(self, command: Command) -> None:
        """Apply one command between two steps."""
        match command:
            case Interrupt():
                self._interrupt()
            case SendText(text):
                self._interrupt()
                opening = None if self._listener.is_open else TurnOpening(False, False, False, False)
                self._listen(StepInput(opening, ends_turn=True, text=text), is_late=False)
            case EndTurn():
                if self._listener.is_open:
                    self._listen(StepInput(ends_turn=True), is_late=False)
            case Reset():
                self._reset()

    def step(self, *, is_late: bool) -> None:
        """Advance the conversation by one step."""
        if self._speaking is None:
            self._ingest(is_late)
        else:
            self._answer(self._speaking)

    def close(self) -> None:
        """End what is under way, write the trace and report."""
        self._interrupt()
        self._listener.forget()
        self._source.close()
        self._speaker.close()
        self._emit(self._summary())
        if self._trace is not None:
            self._trace.save()

    # -- listening

    def _ingest(self, is_late: bool) -> None:
        if self._source_ended:
            return
        try:
            step = self._source.read()
        except MediaError as error:  # the file broke off in the middle: the conversation goes on with the next turn
            self._listener.drop(str(error))
            self._source.skip()
            return
        if step is None:
            self._source_ended = True
            self._emit(events.Finished())
            return
        if step.pictures:
            self._preview.put(step.pictures[-1])
        self._listen(step, is_late)

    def _listen(self, step: StepInput, is_late: bool) -> None:
        began = self._clock()
        heard = self._listener.take(step, self._time_s, is_late=is_late)
        self._time_s += STEP_MS / 1000
        self._stages.metrics.add("listening_step", self._clock() - began)
        if heard is not None:
            self._begin_reply(heard, asked_at=began)

    # -- answering

    def _begin_reply(self, heard: HeardTurn, asked_at: float) -> None:
        if self._trace is not None:
            self._trace.add_turn(heard.media, is_image=heard.is_image)
        self._num_replies += 1
        self._speaking = Speaking(
            heard,
            self._num_replies,
            self._conversation,
            self._stages,
            self._config,
            self._speaker,
            self._emit,
            self._clock,
            asked_at,
        )
        self._answer(self._speaking)  # at once: the user waits

    def _answer(self, speaking: Speaking) -> None:
        stop_at_s = self._source.interrupts_after_s
        speaking.advance(self._clock() + REPLY_SHARE * STEP_MS / 1000, stop_at_s)
        if stop_at_s is not None and speaking.heard_s >= stop_at_s:
            self._interrupt()
        elif speaking.is_over:
            self._rate = speaking.finish(self._rate, self._trace)
            self._reply_is_over(speaking)

    def _interrupt(self) -> None:
        if self._speaking is not None:
            self._speaking.cut(self._rate, self._trace)
            self._reply_is_over(self._speaking)

    def _reply_is_over(self, speaking: Speaking) -> None:
        self._time_s += speaking.heard_s
        self._busy_s += speaking.busy_s
        self._spoken_s += speaking.spoken_s
        self._speaking = None
        conversation = self._conversation
        self._emit(events.ContextUsed(conversation.num_tokens, conversation.max_tokens, conversation.nbytes))

    def _reset(self) -> None:
        self._interrupt()
        self._listener.forget()
        self._conversation.rollback(self._start)
        self._rate = SpeechRate()
        if self._trace is not None:
            self._trace = self._new_trace()

    def _new_trace(self) -> TraceWriter | None:
        path = self._config.trace
        return None if path is None else TraceWriter(path, self._stages.window_ms, self._stages.seconds_per_grid)

    def _summary(self) -> events.Summary:
        stages = tuple(
            StageSummary(name, t.num_calls, t.total_ms, t.p50_ms, t.p95_ms, t.p99_ms, t.max_ms)
            for name, t in self._stages.metrics.stages().items()
        )
        counters = self._stages.metrics.counters | {f"host_copies_{name}": n for name, n in copies().items()}
        counters["speaker_underrun_samples"] = self._speaker.num_underrun_samples
        rtf = self._busy_s / self._spoken_s if self._spoken_s else None
        return events.Summary(stages, tuple(sorted(counters.items())), rtf)
