"""Real-time engine for conversation with an omni-modal model. Knows nothing of a user interface.

Read it in the order the data flows: engine, pipeline, clock, channels, io/, listening, user_turn, conversation,
models/, reply, speaking. An application needs only what this module exports: it sends commands and polls events.
Nothing here imports torch before it is needed, so that a window can be up first.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from engine.checkpoint import CheckpointError
from engine.config import WINDOWS_MS, Bypass, EngineConfig, InputConfig, ModelConfig, SpeechConfig
from engine.doctor import Check, examine
from engine.engine import Engine
from engine.io.media import MediaError
from engine.io.sources import ScriptSource, ScriptTurn

if TYPE_CHECKING:
    from engine.bench import BenchReport

__all__ = [
    "WINDOWS_MS",
    "BenchReport",
    "Bypass",
    "Check",
    "CheckpointError",
    "Engine",
    "EngineConfig",
    "InputConfig",
    "MediaError",
    "ModelConfig",
    "ScriptSource",
    "ScriptTurn",
    "SpeechConfig",
    "bench",
    "examine",
]


def bench(
    model: ModelConfig,
    question: Path,
    *,
    reply_s: float,
    against_transformers: bool,
    threads: int | None,
    on_progress: Callable[[float, str], None],
) -> "BenchReport":
    """Measure the engine with a spoken `question` and a reply that is made to last `reply_s` seconds."""
    from engine.bench import run_bench

    return run_bench(
        model,
        question,
        reply_s=reply_s,
        against_transformers=against_transformers,
        threads=threads,
        on_progress=on_progress,
    )
