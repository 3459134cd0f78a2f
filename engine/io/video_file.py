"""Reads the pictures of a video file, or a still image, with the times at which they are shown."""

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np
from av.sidedata.sidedata import SideData
from av.video.frame import VideoFrame
from numpy.typing import NDArray
from PIL import ExifTags, Image

from engine.io.container import REMEDY, MediaContainer
from engine.io.media import Closing, MediaError, Picture

STILL_FORMAT_SUFFIX: Final = "_pipe"  # FFmpeg's demuxers of single images: png_pipe, jpeg_pipe …

# What brings a photograph of each EXIF orientation upright (Exif 2.32, tag 0x0112).
UPRIGHT: Final[dict[int, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]]] = {
    1: lambda rgb: rgb,
    2: lambda rgb: rgb[:, ::-1],
    3: lambda rgb: rgb[::-1, ::-1],
    4: lambda rgb: rgb[::-1],
    5: lambda rgb: rgb.transpose(1, 0, 2),
    6: lambda rgb: rgb.transpose(1, 0, 2)[:, ::-1],
    7: lambda rgb: rgb[::-1, ::-1].transpose(1, 0, 2),
    8: lambda rgb: rgb.transpose(1, 0, 2)[::-1],
}


class VideoReader(Closing):
    """The pictures of `path` in the order they are shown, upright and in RGB; iterate once, in a `with` block.

    `width` and `height` are those of the first picture; a stream may change its size later. `sound_offset_s` is when
    the sound track starts on the pictures' clock; `AudioReader` starts with that much silence, so add nothing.
    """

    def __init__(self, path: Path | str) -> None:
        self._container = MediaContainer(Path(path))
        track = self._container.picture_track
        if track is None:
            self._container.close()
            raise MediaError.about(Path(path), "it has no picture track", "choose a video or an image")
        self._track = track
        self._warnings: list[str] = []
        self._seconds_per_picture = float(1 / track.average_rate) if track.average_rate else 0.0
        self.is_still = self._container.format_name.endswith(STILL_FORMAT_SUFFIX)
        self._orientation = exif_orientation(Path(path)) if self.is_still else None
        pictures = self._decoded()
        first = next(pictures, None)
        if first is None:
            self._container.close()
            raise MediaError.about(Path(path), "not one picture in it can be decoded", REMEDY)
        self.height, self.width = first.rgb.shape[:2]
        sound = self._container.sound_track
        self.has_sound = sound is not None
        self.sound_offset_s = 0.0 if sound is None else self._container.start_s(sound)
        self.duration_s = None if self.is_still else self._container.duration_s
        self._pictures = chain([first], pictures)

    def __iter__(self) -> Iterator[Picture]:
        """Go on from the picture after the last one taken."""
        return self._pictures

    def close(self) -> None:
        """Release the file; may be called twice."""
        self._pictures = chain()
        self._container.close()

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was wrong with the part read so far; the file is judged as a whole when its last picture was taken."""
        return tuple(self._warnings)

    def _decoded(self) -> Iterator[Picture]:
        time_s = -self._seconds_per_picture
        for frame in self._container.frames(self._track):
            if not isinstance(frame, VideoFrame):
                continue
            stated_s = self._container.time_s(frame)
            # Times never run backwards, and never before the start that sound and picture share
            time_s = max(time_s + self._seconds_per_picture if stated_s is None else stated_s, time_s, 0.0)
            yield Picture(to_rgb(frame, self._orientation), time_s)
        self._warnings += self._container.warnings(self._track, time_s + self._seconds_per_picture)


def exif_orientation(path: Path) -> int | None:
    """The orientation that a photograph's EXIF data states, 1 to 8, or None."""
    try:
        with Image.open(path) as image:
            found = image.getexif().get(ExifTags.Base.Orientation)
    except (OSError, ValueError, SyntaxError):  # not a format of Pillow's: then PyAV's word counts
        return None
    return found if found in UPRIGHT else None


def to_rgb(frame: VideoFrame, orientation: int | None = None) -> NDArray[np.uint8]:
    """Pixels of `frame` [H, W, 3] as a viewer sees them: turned and mirrored as the camera asked for."""
    rgb = np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)
    if orientation is not None:  # PyAV 18 knows the turn of EXIF data and not the mirror
        return np.ascontiguousarray(UPRIGHT[orientation](rgb))
    try:
        matrix = frame.side_data.get("DISPLAYMATRIX")
    except ValueError:  # PyAV 18 does not know EXIF data, which lie beside the matrix
        return np.ascontiguousarray(np.rot90(rgb, round(frame.rotation / 90)))
    if isinstance(matrix, SideData):
        rgb = _turned(rgb, np.frombuffer(bytes(matrix), np.int32))
    return np.ascontiguousarray(rgb)


def _turned(rgb: NDArray[np.uint8], matrix: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Apply `matrix` [9], which sends pixel (x, y) to (x m0 + y m3, x m1 + y m4), to the nearest quarter turn."""
    x_to_x, x_to_y, y_to_x, y_to_y = (int(matrix[index]) for index in (0, 1, 3, 4))
    if abs(x_to_y) > abs(x_to_x):
        rgb = rgb.transpose(1, 0, 2)
        x_to_x, y_to_y = y_to_x, x_to_y
    return rgb[:: -1 if y_to_y < 0 else 1, :: -1 if x_to_x < 0 else 1]
