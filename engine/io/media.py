"""What every reader of media shares: the picture, the error a user sees, and opening a file by what it holds."""

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
from numpy.typing import NDArray


class MediaError(ValueError):
    """A file that cannot be used; its text names the file, what is wrong and what to do, and is shown as it is."""

    @classmethod
    def about(cls, path: Path, problem: str, remedy: str) -> Self:
        """Put the three parts of the message together; `problem` and `remedy` are clauses without a full stop."""
        return cls(f"{path}: {problem}; {remedy}.")


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture, `rgb` [H, W, 3], and when it is shown, counted from the common start of sound and picture."""

    rgb: NDArray[np.uint8]
    time_s: float


class Closing:
    """Makes what has a `close` usable in a `with` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release what is held; may be called twice."""
        raise NotImplementedError


class NamelessFile:
    """An open file that hides its name, so that a decoder judges by content.

    By name, libsndfile plays a text called `.au` as noise and FFmpeg draws a `.txt` as pictures, takes `%d` for an
    image sequence and `a:b` for a protocol.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.read = file.read
        self.readinto = file.readinto  # type: ignore[attr-defined]  # typeshed: BinaryIO lacks it, open() has it
        self.seek = file.seek
        self.tell = file.tell


def open_media_file(path: Path) -> BinaryIO:
    """Open `path` for reading; a path that cannot hold media is a `MediaError`."""
    if path.is_dir():
        raise MediaError.about(path, "this is a folder", "choose a file inside it")
    if not path.exists():
        raise MediaError.about(path, "there is no such file", "check the name, or whether it was moved")
    if not path.is_file():  # opening a pipe would wait for its other end
        raise MediaError.about(path, "this is a device or a pipe", "copy what it holds into a file and choose that")
    if path.stat().st_size == 0:
        raise MediaError.about(path, "the file is empty (0 bytes)", "record, export or download it again")
    try:
        return path.open("rb")
    except OSError as error:
        problem = f"the file cannot be opened ({error.strerror})"
        raise MediaError.about(path, problem, "check that you may read it and that its disk is connected") from error
