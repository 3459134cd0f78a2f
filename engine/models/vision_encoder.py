"""Encodes the camera as it comes: two pictures make a temporal patch, and no patch looks at another one.

So encoding pair by pair gives exactly what the whole clip gives, and the only thing to keep is an odd picture.
"""

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engine.models import hf
from engine.models.pictures import Picture, PictureConfig, patchify, smart_resize, to_rgb
from engine.models.streaming import StreamState


@dataclass(frozen=True, slots=True)
class VisionFeatures:
    """One temporal patch as the Thinker takes it."""

    tokens: Tensor  # [N, D]
    deepstack: tuple[Tensor, ...]  # [N, D] each, for the first Thinker layers
    pixels: Tensor  # [4 * N, 3 * 2 * patch_size²], float32, on the CPU
    grid: tuple[int, int, int]  # (1, rows, columns) of patches, before they are merged to tokens


@dataclass
class VisionState(StreamState):
    """The odd picture that waits for its second one, and the size that the first picture fixed."""

    pending: Picture | None = None
    size: tuple[int, int] | None = None  # height and width in pixels
    num_pairs: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the waiting picture."""
        return 0 if self.pending is None else self.pending.nbytes

    def reset(self) -> None:
        """Return to the start of a segment."""
        self.pending = None
        self.size = None
        self.num_pairs = 0


class VisionEncoder:
    """Wraps the vision tower; the module keeps its device and dtype."""

    def __init__(self, tower: nn.Module, config: PictureConfig) -> None:
        if config.temporal_patch_size != 2:
            raise ValueError(f"temporal_patch_size is {config.temporal_patch_size}; only pairs are supported")
        self._tower = tower
        self._config = config
        self._device = next(tower.parameters()).device
        # A segment keeps its size, so what depends on the grid alone is made once per segment.
        self._grid: tuple[int, int, int] | None = None
        self._grid_thw = torch.empty(0)
        self._layout: dict[str, Tensor] = {}

    def init_state(self) -> VisionState:
        """The state at the start of a segment."""
        return VisionState()

    def step(self, picture: NDArray[Any], state: VisionState) -> VisionFeatures | None:
        """Take a camera picture, any form that `to_rgb` takes; every second one completes a pair.

        The first picture fixes the size of the segment; a later one of another size is resized to it.
        """
        rgb = to_rgb(picture)
        if state.size is None:
            state.size = smart_resize(rgb.shape[0], rgb.shape[1], self._config)
        if state.pending is None:
            state.pending = rgb.copy()  # the caller may reuse its picture before the second one comes
            return None
        return self._encode_pending(state, rgb)

    def finish(self, state: VisionState) -> VisionFeatures | None:
        """End the segment: encode the odd picture as a pair with itself; None if none waits."""
        return None if state.pending is None else self._encode_pending(state)

    @torch.no_grad()
    def encode_pair(self, pixels: Tensor, grid: tuple[int, int, int]) -> VisionFeatures:
        """Encode one temporal patch, `pixels` [rows * columns, dim] on the CPU and `grid` (1, rows, columns)."""
        if grid[0] != 1:
            raise ValueError(f"grid is {grid}; pass one temporal patch at a time")
        if grid != self._grid:
            self._grid, self._grid_thw = grid, torch.tensor([grid])
            self._layout = hf.vision_layout(self._tower, self._grid_thw, self._device)
        patches = pixels.to(self._device)  # the tower casts to its own dtype
        tokens, deepstack = hf.encode_vision(self._tower, patches, self._grid_thw, **self._layout)
        return VisionFeatures(tokens, tuple(deepstack), pixels, grid)

    def _encode_pending(self, state: VisionState, *second: Picture) -> VisionFeatures:
        assert state.pending is not None, "no picture waits"
        pixels, grid = patchify([state.pending, *second], self._config, state.size)
        features = self.encode_pair(pixels, grid)
        state.pending = None
        state.num_pairs += 1
        return features
