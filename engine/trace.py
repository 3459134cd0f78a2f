"""Keeps what somebody needs to recompute every reply with stock transformers, and writes it as one `.npz` file.

Per reply n: `input_ids_n` (the whole prompt, media as placeholders), `audio_n_k` (16 kHz samples of the k-th sound),
`pixels_n_k`, `grid_n_k` and `kind_n_k` ("image" or "video") of the k-th picture or video, `text_ids_n`, `codes_n`
[frames, 16], `samples_n`. For all: `window_ms`, `seconds_per_grid`, `use_audio_in_video_n`.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from engine.io.media import MediaError
from engine.user_turn import TurnMedia


@dataclass
class TraceWriter:
    """Collects arrays reply by reply; `save` writes them."""

    path: Path
    window_ms: int
    seconds_per_grid: float
    _arrays: dict[str, NDArray[np.generic]] = field(default_factory=dict)
    _audio: list[NDArray[np.generic]] = field(default_factory=list)
    _pictures: list[tuple[NDArray[np.generic], NDArray[np.generic], str]] = field(default_factory=list)
    _num_replies: int = 0
    _has_audio_in_video: bool = False

    def add_turn(self, media: TurnMedia, *, is_image: bool) -> None:
        """Keep what the user said and showed; all later replies have it in their prompt."""
        if media.audio:
            self._audio.append(torch.cat(media.audio).numpy())
        if media.pixels:
            grid = np.array(media.grid, dtype=np.int64)
            self._pictures.append((torch.cat(media.pixels).numpy(), grid, "image" if is_image else "video"))
            self._has_audio_in_video |= bool(media.audio)

    def add_reply(
        self,
        input_ids: tuple[int, ...],
        text_ids: list[int],
        codes: NDArray[np.int32],
        samples: list[NDArray[np.float32]],
    ) -> None:
        """Keep one reply: its prompt, its tokens, its codec frames and its samples."""
        n = self._num_replies
        self._num_replies += 1
        self._arrays[f"input_ids_{n}"] = np.array(input_ids, dtype=np.int64)
        self._arrays[f"text_ids_{n}"] = np.array(text_ids, dtype=np.int64)
        self._arrays[f"codes_{n}"] = codes
        self._arrays[f"samples_{n}"] = np.concatenate([np.zeros(0, dtype=np.float32), *samples])
        self._arrays[f"use_audio_in_video_{n}"] = np.array(self._has_audio_in_video)
        for k, audio in enumerate(self._audio):
            self._arrays[f"audio_{n}_{k}"] = audio
        for k, (pixels, grid, kind) in enumerate(self._pictures):
            self._arrays[f"pixels_{n}_{k}"] = pixels
            self._arrays[f"grid_{n}_{k}"] = grid
            self._arrays[f"kind_{n}_{k}"] = np.array(kind)

    def save(self) -> None:
        """Write the file."""
        fixed: dict[str, NDArray[np.generic]] = {
            "window_ms": np.array(self.window_ms),
            "seconds_per_grid": np.array(self.seconds_per_grid),
        }
        try:
            with self.path.open("wb") as file:
                np.savez_compressed(file, **fixed, **self._arrays)  # type: ignore[arg-type]
        except OSError as error:
            problem = f"the trace cannot be written ({error.strerror})"
            raise MediaError.about(self.path, problem, "choose another file") from error
