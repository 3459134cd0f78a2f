"""Camera pictures to the patches that the vision encoder reads, equal to what Qwen2-VL's image processor makes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

Picture = NDArray[np.uint8]

# The processor refuses longer pictures: they would become a strip one patch high.
MAX_ASPECT_RATIO: Final = 200
NUM_LEVELS: Final = 256


class PictureError(ValueError):
    """A picture that cannot become patches; the message says why."""


@dataclass(frozen=True, slots=True)
class PictureConfig:
    """How large pictures become and how they are cut, as in the checkpoint's preprocessor_config.json."""

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]

    @classmethod
    def from_checkpoint(cls, preprocessor_config: Mapping[str, Any]) -> "PictureConfig":
        """Read the keys of preprocessor_config.json; newer files keep the pixel bounds under `size`."""
        size = preprocessor_config.get("size") or {}
        return cls(
            patch_size=preprocessor_config["patch_size"],
            temporal_patch_size=preprocessor_config["temporal_patch_size"],
            merge_size=preprocessor_config["merge_size"],
            min_pixels=preprocessor_config.get("min_pixels") or size["shortest_edge"],
            max_pixels=preprocessor_config.get("max_pixels") or size["longest_edge"],
            image_mean=tuple(preprocessor_config["image_mean"]),
            image_std=tuple(preprocessor_config["image_std"]),
        )

    @property
    def grid_pixels(self) -> int:
        """Width and height of a token in pixels: sides are multiples of it."""
        return self.patch_size * self.merge_size


def smart_resize(height: int, width: int, config: PictureConfig) -> tuple[int, int]:
    """The size (height, width) that a picture gets.

    Sides are rounded to whole tokens, then both are scaled alike until the area is within the bounds. A picture
    smaller than a token, down to one pixel, is scaled up. A very long picture may exceed `max_pixels`, because its
    short side cannot be less than one token.
    """
    if min(height, width) < 1:
        raise PictureError(f"picture is {width}x{height}: it has no pixels")
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise PictureError(
            f"picture is {width}x{height}: its sides differ {ratio:.1f} times, at most {MAX_ASPECT_RATIO} is possible; "
            "crop it"
        )
    unit = config.grid_pixels
    rows, columns = round(height / unit), round(width / unit)
    if rows * columns * unit**2 > config.max_pixels:
        shrink = math.sqrt(height * width / config.max_pixels)
        rows = max(1, math.floor(height / shrink / unit))
        columns = max(1, math.floor(width / shrink / unit))
    elif rows * columns * unit**2 < config.min_pixels:
        grow = math.sqrt(config.min_pixels / (height * width))
        rows, columns = math.ceil(height * grow / unit), math.ceil(width * grow / unit)
    return rows * unit, columns * unit


def to_rgb(picture: NDArray[Any]) -> Picture:
    """`picture` as uint8 [H, W, 3].

    Takes [H, W], [H, W, 1], [H, W, 3] and [H, W, 4] of uint8 or uint16. 16 bits are scaled to 8; behind transparent
    pixels is white, as in the image processor.
    """
    if picture.dtype not in (np.uint8, np.uint16):
        raise PictureError(f"picture has type {picture.dtype}; pass uint8 or uint16")
    if picture.ndim == 2:
        picture = picture[:, :, None]
    if picture.ndim != 3 or picture.shape[2] not in (1, 3, 4) or 0 in picture.shape:
        raise PictureError(f"picture has shape {list(picture.shape)}; pass [H, W], [H, W, 1], [H, W, 3] or [H, W, 4]")
    if picture.dtype == np.uint16:
        # 65535 / 255 = 257, rounded to the nearest level.
        picture = ((picture.astype(np.uint32) + 128) // 257).astype(np.uint8)
    if picture.shape[2] == 4:
        white = Image.new("RGBA", (picture.shape[1], picture.shape[0]), "white")
        return np.array(Image.alpha_composite(white, Image.fromarray(np.ascontiguousarray(picture))).convert("RGB"))
    return np.ascontiguousarray(np.broadcast_to(picture, (*picture.shape[:2], 3)))


def patchify(
    pictures: Sequence[Picture], config: PictureConfig, size: tuple[int, int] | None = None
) -> tuple[Tensor, tuple[int, int, int]]:
    """Cut RGB pictures [H, W, 3] to patches.

    Returns pixels float32 [t * rows * columns, 3 * temporal_patch_size * patch_size²] and the grid (t, rows,
    columns). Every picture is resized once, to `size` (height, width), by default what `smart_resize` makes of the
    first; the last one is repeated until the temporal patch is full. The patches of one token follow each other.
    """
    if not pictures:
        raise PictureError("no pictures; pass at least one")
    height, width = size or smart_resize(pictures[0].shape[0], pictures[0].shape[1], config)
    unit = config.grid_pixels
    if height % unit or width % unit:
        raise PictureError(f"size {height}x{width} is not a multiple of {unit}; take it from smart_resize")
    resized = [_resize(picture, height, width) for picture in pictures]
    resized += [resized[-1]] * (-len(resized) % config.temporal_patch_size)
    stacked = np.stack(resized)
    patch, merge = config.patch_size, config.merge_size
    grid = (len(resized) // config.temporal_patch_size, height // patch, width // patch)
    # [t, pictures, rows, merge, patch, columns, merge, patch, channel], then the processor's order of it
    cut = stacked.reshape(
        grid[0], config.temporal_patch_size, grid[1] // merge, merge, patch, grid[2] // merge, merge, patch, 3
    ).transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    levels = _normalised_levels(config)
    pixels = np.empty(cut.shape, dtype=np.float32)
    for channel in range(3):
        np.take(levels[channel], cut[:, :, :, :, :, channel], out=pixels[:, :, :, :, :, channel])
    return torch.from_numpy(pixels.reshape(math.prod(grid), -1)), grid


def _resize(picture: Picture, height: int, width: int) -> Picture:
    return np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC))


def _normalised_levels(config: PictureConfig) -> NDArray[np.float32]:
    """The value [channel, level] of every 8-bit level, rounded where the image processor rounds."""
    levels = (np.arange(NUM_LEVELS) * (1 / 255)).astype(np.float32)
    mean, std = np.array(config.image_mean, np.float32), np.array(config.image_std, np.float32)
    normalised: NDArray[np.float32] = (levels - mean[:, None]) / std[:, None]
    return normalised
