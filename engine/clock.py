"""The engine's one unit of time, an 80 ms step, and the only unit conversions.

Audio encoder and codec share the step: 1,280 samples come in at 16 kHz, 1,920 go out at 24 kHz.
"""

from typing import Final

STEP_MS: Final = 80
MIC_RATE_HZ: Final = 16_000
SPEAKER_RATE_HZ: Final = 24_000
MIC_STEP: Final = MIC_RATE_HZ * STEP_MS // 1000  # 1280 samples
SPEAKER_STEP: Final = SPEAKER_RATE_HZ * STEP_MS // 1000  # 1920 samples


def mic_seconds(num_samples: int) -> float:
    """Duration of `num_samples` of microphone audio."""
    return num_samples / MIC_RATE_HZ


def speaker_seconds(num_samples: int) -> float:
    """Duration of `num_samples` of speech."""
    return num_samples / SPEAKER_RATE_HZ
