"""What can be set. Frozen, validated when made; every default is the value of design.md section 3."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

# What the audio tower was trained with; a window is a whole number of 1 s chunks.
WINDOWS_MS = (1000, 2000, 4000, 8000)
MAX_FPS = 30
MIN_CONTEXT = 128

DEFAULT_PROMPT = "You are Parley, a friendly voice assistant. You hear and see the user. Answer briefly and naturally."


class SettingError(ValueError):
    """A setting that this model or this machine cannot take; its text names the value and the remedy."""


def _require_counts(settings: object, *names: str) -> None:
    """Raise ValueError where one of the fields `names` is below 1."""
    for name in names:
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} is {getattr(settings, name)}; it must be at least 1")


class Bypass(Enum):
    """When the Talker is left out and the reply is text only (R19)."""

    AUTO = "auto"  # a typed request is answered in text
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which checkpoint (None: the one that comes with Parley), where, and in what precision."""

    name_or_path: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    allow_hub: bool = False


@dataclass(frozen=True, slots=True)
class SpeechConfig:
    """How replies are made."""

    voice: str | None = None  # None: the checkpoint's first voice by its own default, then by its table
    is_greedy: bool = False
    seed: int = 42
    bypass: Bypass = Bypass.AUTO
    max_text_tokens: int = 1024
    max_frames: int = 4095  # 5.5 minutes; what transformers' generate makes of its limit of 4096
    stops_loops: bool = True  # cut speech that has repeated itself for six seconds
    decode_frames: int = 8  # most codec frames in one Code2Wav call once playback has a cushion
    max_ahead_ms: int = 1000  # speech made but not yet played

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must be from 0 to 2**63 - 1")
        _require_counts(self, "max_text_tokens", "max_frames", "decode_frames", "max_ahead_ms")


@dataclass(frozen=True, slots=True)
class InputConfig:
    """How speech and pictures enter the model."""

    window_ms: int | None = None  # None: the checkpoint's own (8000 in the released one)
    provisional: bool = True
    provisional_chunks: int = 4
    stride_chunks: int = 2
    exact_floor: bool = True
    video_fps: float = 2.0
    prefill_rows: int = 256
    max_tokens: int = 32768
    min_turn_ms: int = 80
    silence_peak: float = 0.001  # full scale is 1: under -60 dB nothing was said

    def __post_init__(self) -> None:
        if self.window_ms is not None and self.window_ms not in WINDOWS_MS:
            raise ValueError(f"window_ms is {self.window_ms}; choose one of {', '.join(map(str, WINDOWS_MS))}")
        if not 0 < self.video_fps <= MAX_FPS:
            raise ValueError(f"video_fps is {self.video_fps}; it must be above 0 and at most {MAX_FPS}")
        if self.max_tokens < MIN_CONTEXT:
            raise ValueError(f"max_tokens is {self.max_tokens}; a conversation needs at least {MIN_CONTEXT}")
        _require_counts(self, "provisional_chunks", "stride_chunks", "prefill_rows", "max_tokens")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All that stays fixed while the engine runs."""

    model: ModelConfig = ModelConfig()
    speech: SpeechConfig = SpeechConfig()
    input: InputConfig = InputConfig()
    system_prompt: str = DEFAULT_PROMPT
    is_realtime: bool = True
    trace: Path | None = None
    speech_file: Path | None = None
    use_graphs: bool | None = None  # None: where there is a GPU
    threads: int | None = None  # None: one less than the cores, so that audio is never starved
