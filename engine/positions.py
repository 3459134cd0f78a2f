"""TM-RoPE positions of one segment, relative to where it starts: [3, n] rows are temporal, height, width.

All rules are those of `get_rope_index` (modeling_qwen3_omni_moe.py, 5.24), in the closed form that needs no second
look at the token ids: text and audio count on, a picture spreads over height and width, and a second of any of them
is `positions_per_second` (13) steps of the temporal row, so that sound and picture of one moment meet.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Grid:
    """One temporal patch (a pair of pictures) after spatial merge: `height` x `width` tokens at `time`."""

    height: int
    width: int
    time: float  # in positions after the segment's start

    @property
    def num_tokens(self) -> int:
        """Tokens of the grid."""
        return self.height * self.width

    @property
    def last(self) -> float:
        """The largest position of any row."""
        return max(self.time, self.height - 1, self.width - 1)


def linear(length: int, start: float = 0.0) -> Tensor:
    """Positions [3, length] of text or audio: the three rows count together."""
    return (torch.arange(length, dtype=torch.float32) + start).expand(3, -1)


def spatial(grid: Grid) -> Tensor:
    """Positions [3, height * width] of a grid: constant in time, line by line."""
    height = torch.arange(grid.height, dtype=torch.float32).repeat_interleave(grid.width)
    width = torch.arange(grid.width, dtype=torch.float32).repeat(grid.height)
    return torch.stack((torch.full_like(height, grid.time), height, width))


def grid_time(index: int, seconds_per_grid: float, positions_per_second: float) -> float:
    """Temporal position of the grid `index` of a video, rounded as float32 arithmetic rounds it."""
    seconds = torch.tensor(index) * torch.tensor(seconds_per_grid, dtype=torch.float32)
    return float((seconds * positions_per_second).float())
