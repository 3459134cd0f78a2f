"""A conversation driven by hand, without threads: what the exactness tests compare with the oracle."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from engine.config import EngineConfig, InputConfig, SpeechConfig
from engine.conversation import Conversation
from engine.io.media import Picture
from engine.loader import LoadedModel, load_model
from engine.metrics import Metrics
from engine.reply import Reply, ReplyLimits, Sound
from engine.stages import Stages, build_stages
from engine.timeline import Role
from engine.user_turn import TurnMedia, TurnPolicy, UserTurn, picture_message
from tests.offline import Offline, generate

LIMITS = ReplyLimits(max_text_tokens=12, max_frames=10, decode_frames=4)
PROMPT = "You are a helpful voice assistant."


def load(folder: Path, dtype: str = "float64") -> LoadedModel:
    return load_model(folder, device="cpu", dtype=dtype, on_progress=lambda fraction, what: None)


def stages_of(loaded: LoadedModel, window_ms: int | None = None, **speech: object) -> Stages:
    settings = {"is_greedy": True} | speech
    config = EngineConfig(
        speech=SpeechConfig(**settings),  # type: ignore[arg-type]
        input=InputConfig(window_ms=window_ms),
        trace=Path("kept"),  # keeps media; nothing is written here
    )
    return build_stages(loaded, config, Metrics())


@dataclass
class Made:
    """What one streamed reply was."""

    prompt: np.ndarray
    text_ids: list[int]
    codes: np.ndarray
    samples: np.ndarray
    reply: Reply


@dataclass
class Driver:
    """One conversation."""

    stages: Stages
    policy: TurnPolicy = field(default_factory=TurnPolicy)
    limits: ReplyLimits = LIMITS
    prefill_rows: int = 48

    def __post_init__(self) -> None:
        stages = self.stages
        talker = stages.speech.talker if stages.speech else None
        self.conversation = Conversation(
            stages.thinker, talker, stages.scribe, stages.metrics, max_tokens=32768, prefill_rows=self.prefill_rows
        )
        self.conversation.write(Role.SYSTEM, stages.scribe.system(PROMPT))
        self.audios: list[np.ndarray] = []
        self.pictures: list[tuple[str, np.ndarray, np.ndarray]] = []
        self.has_audio_in_video = False

    def say(self, audio: np.ndarray, piece: int = 1280) -> None:
        turn = UserTurn(self.conversation, self.stages, self.policy, has_audio=True, has_video=False)
        for start in range(0, len(audio), piece):
            turn.hear(torch.from_numpy(audio[start : start + piece]))
            turn.update(1280)
        turn.end()
        self.audios.append(audio)

    def say_and_show(self, audio: np.ndarray | None, pictures: list[np.ndarray], text: str = "") -> TurnMedia:
        """Pictures at 2 fps beside the sound, as they come."""
        turn = UserTurn(self.conversation, self.stages, self.policy, has_audio=audio is not None, has_video=True)
        waiting = list(pictures)
        for start in range(0, max(len(audio) if audio is not None else 0, 8000 * len(pictures)), 1280):
            if audio is not None:
                turn.hear(torch.from_numpy(audio[start : start + 1280]))
            while waiting and (len(pictures) - len(waiting)) * 8000 < start + 1280:
                turn.see(Picture(waiting.pop(0), 0.0))
            if audio is not None:
                turn.update(1280)
        turn.end(text)
        if audio is not None:
            self.audios.append(audio)
            self.has_audio_in_video = True
        self.pictures.append(("video", torch.cat(turn.media.pixels).numpy(), np.array(turn.media.grid)))
        return turn.media

    def show_still(self, picture: np.ndarray, text: str) -> None:
        media = picture_message(self.conversation, self.stages, Picture(picture, 0.0), text)
        self.pictures.append(("image", torch.cat(media.pixels).numpy(), np.array(media.grid)))

    def type(self, text: str) -> None:
        UserTurn(self.conversation, self.stages, self.policy, has_audio=False, has_video=False).end(text)

    def reply(self, *, is_spoken: bool = True, after_part: Callable[[], None] | None = None) -> Made:
        reply = Reply(self.conversation, self.stages, self.limits, lambda: None, is_spoken=is_spoken)
        samples = [np.zeros(0, np.float32)]
        for part in reply.run():
            if isinstance(part, Sound):
                samples.append(part.samples)
            if after_part is not None:
                after_part()
        prompt = np.array(self.conversation.timeline.token_ids[: self.conversation.reply_start])
        return Made(prompt, list(reply.token_ids), reply.codes(), np.concatenate(samples), reply)


def offline(loaded: LoadedModel, driver: Driver, made: Made) -> Offline:
    """What stock transformers makes of the prompt of `made`."""
    return generate(
        loaded.model,
        made.prompt,
        audios=driver.audios,
        pictures=driver.pictures,
        seconds_per_grid=driver.stages.seconds_per_grid,
        use_audio_in_video=driver.has_audio_in_video,
        window_ms=driver.stages.window_ms,
        max_tokens=driver.limits.max_text_tokens,
        max_frames=driver.limits.max_frames,
    )


def noise(seconds: float, seed: int = 0, level: float = 0.1) -> np.ndarray:
    """Speech-like in loudness, nothing else: [T] float32 at 16 kHz."""
    rng = np.random.default_rng(seed)
    samples = rng.standard_normal(round(16000 * seconds)) * level
    return (samples * (1.2 + np.sin(np.arange(len(samples)) / 1600))).astype(np.float32)


def picture(seed: int, height: int = 64, width: int = 96) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
