"""Orders the tokens of sound and picture by time: a grid of pictures goes before the audio token of the same moment.

The order depends on nothing that comes later, so it can be emitted while both still arrive; it equals what the
checkpoint's processor builds from the whole clip (processing_qwen3_omni_moe.py, `replace_video_with_audio_token`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AudioRun:
    """Audio tokens `start` to `end` - 1."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class GridRun:
    """All tokens of the grid `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class Cursor:
    """How much of each stream has been ordered."""

    num_audio: int = 0
    num_grids: int = 0


Run = AudioRun | GridRun


def order(
    cursor: Cursor,
    num_audio: int,
    num_grids: int,
    seconds_per_grid: float,
    positions_per_second: float,
    *,
    is_complete: bool,
) -> tuple[Sequence[Run], Cursor]:
    """Return the runs that can follow `cursor`, given what has arrived, and where they end.

    Grid k stands at `k * seconds_per_grid * positions_per_second`, rounded as the processor rounds it, audio token a
    at a. While the streams are open, an audio token waits for a
    grid that belongs before it; `is_complete` says that nothing more will come.
    """
    runs: list[Run] = []
    audio, grid = cursor.num_audio, cursor.num_grids
    while True:
        grid_position = grid * seconds_per_grid * positions_per_second
        if grid < num_grids and (grid_position <= audio or (is_complete and audio >= num_audio)):
            runs.append(GridRun(grid))
            grid += 1
            continue
        waits_for_grid = grid < num_grids or not is_complete
        end = min(num_audio, math.ceil(grid_position)) if waits_for_grid else num_audio
        if end <= audio:
            return runs, Cursor(audio, grid)
        runs.append(AudioRun(audio, end))
        audio = end
