"""What the engine tells the application. Plain frozen data: no tensor, no array, no Qt object."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Loading:
    """The model is being loaded: `fraction` 0 to 1 of `what`."""

    fraction: float
    what: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine can converse. `is_untrained`: the weights are random, and so is what it says.

    `fingerprint` tells checkpoints apart by the headers and sizes of their files.
    """

    model: str
    fingerprint: str
    is_untrained: bool
    device: str
    dtype: str
    why_device: str
    num_parameters: int
    voice: str | None
    voices: tuple[str, ...]
    window_ms: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class UserTurnStarted:
    """The user began a message."""

    turn: int
    start_s: float


@dataclass(frozen=True, slots=True)
class UserTurnEnded:
    """The user's message is complete; `text` is what was typed of it."""

    turn: int
    start_s: float
    end_s: float
    text: str | None


@dataclass(frozen=True, slots=True)
class UserTurnDropped:
    """The user's message holds nothing to answer; nothing of it is kept."""

    turn: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReplyStarted:
    """The model begins to answer turn `turn`."""

    generation: int
    turn: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of a reply."""

    generation: int
    text: str


@dataclass(frozen=True, slots=True)
class SpeechDelta:
    """More speech of a reply was handed to the speaker."""

    generation: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class ReplyEnded:
    """A reply is over; each has exactly one such event. Times count from the end of the user's turn.

    `text` and `token_ids` are what was made; `heard_text` is what stays in the history.
    """

    generation: int
    turn: int
    reason: str
    text: str
    heard_text: str
    token_ids: tuple[int, ...]
    num_codec_frames: int
    codec_sha256: str
    audio_s: float
    heard_s: float
    first_token_ms: float | None
    first_audio_ms: float | None
    busy_s: float

    @property
    def interrupted(self) -> bool:
        """Whether the user cut it."""
        return self.reason == "interrupted"


@dataclass(frozen=True, slots=True)
class Notice:
    """Something the user should know; nothing is lost."""

    text: str


@dataclass(frozen=True, slots=True)
class ContextUsed:
    """The real length of the context."""

    num_tokens: int
    max_tokens: int
    cache_bytes: int


@dataclass(frozen=True, slots=True)
class StageSummary:
    """What one stage cost so far, in milliseconds."""

    name: str
    num_calls: int
    total_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Stage times and counters at the end of a conversation.

    `rtf` is compute time over seconds of speech made, None where nothing was spoken.
    """

    stages: tuple[StageSummary, ...]
    counters: tuple[tuple[str, int], ...]
    rtf: float | None


@dataclass(frozen=True, slots=True)
class Finished:
    """The source is at its end and the last reply is over."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A thread stopped because of `message`. `is_fault`: the fault is Parley's, and the log says more."""

    thread: str
    message: str
    is_fault: bool


Event = (
    Loading
    | Ready
    | UserTurnStarted
    | UserTurnEnded
    | UserTurnDropped
    | ReplyStarted
    | TextDelta
    | SpeechDelta
    | ReplyEnded
    | Notice
    | ContextUsed
    | Summary
    | Finished
    | Failed
)
