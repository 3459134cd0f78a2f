"""Judges the length a WAV header states: crashed and streaming recorders leave it 0, huge, odd or out of date."""

import struct
from dataclasses import dataclass
from typing import BinaryIO, Final

# Only where one sample is a fixed number of bytes can a length be incomplete: PCM, float, A-law, mu-law, extensible.
FIXED_SIZE_TAGS: Final = frozenset({1, 3, 6, 7, 0xFFFE})


@dataclass(frozen=True, slots=True)
class DataChunk:
    """The sound of a WAV file: bytes stated, bytes present, and whether only whole chunks follow it."""

    stated_bytes: int
    present_bytes: int
    bytes_per_sample: int | None
    is_followed_by_chunks: bool

    @property
    def is_unfinished(self) -> bool:
        """No length was ever written, and yet sound follows."""
        return self.stated_bytes == 0 and self.present_bytes > 0 and not self.is_followed_by_chunks

    def warnings(self) -> list[str]:
        """What is wrong with the length, in words for the user."""
        found = []
        num_bytes = min(self.stated_bytes, self.present_bytes)
        if self.is_unfinished or self.stated_bytes > self.present_bytes:
            num_bytes = self.present_bytes
            found.append(
                f"the header states {self.stated_bytes} bytes of sound and the file holds {self.present_bytes}: "
                "read to the end of the file"
            )
        elif self.stated_bytes < self.present_bytes and not self.is_followed_by_chunks:
            num_left = self.present_bytes - self.stated_bytes
            found.append(
                f"{num_left} bytes after the {self.stated_bytes} bytes of sound that the header states: not read"
            )
        if self.bytes_per_sample and num_bytes % self.bytes_per_sample:
            found.append("the last sample is incomplete: left out")
        return found


def find_data_chunk(file: BinaryIO) -> DataChunk | None:
    """Look for the sound in a RIFF WAV file; None if it is another format or has none. Leaves `file` at its start."""
    num_bytes = file.seek(0, 2)
    file.seek(0)
    head = file.read(12)
    bytes_per_sample = None
    chunk = None
    if head[:4] == b"RIFF" and head[8:] == b"WAVE":
        while len(header := file.read(8)) == 8:
            name, size = struct.unpack("<4sI", header)
            start = file.tell()
            if not _is_chunk_name(name):
                break
            if name == b"data":
                follows = _are_chunks(file, start + size + size % 2, num_bytes)
                chunk = DataChunk(size, num_bytes - start, bytes_per_sample, follows)
                break
            if name == b"fmt " and len(fmt := file.read(14)) == 14:
                tag, _, _, _, block_align = struct.unpack("<HHIIH", fmt)
                bytes_per_sample = block_align if tag in FIXED_SIZE_TAGS else None
            file.seek(start + size + size % 2)
    file.seek(0)
    return chunk


def _are_chunks(file: BinaryIO, start: int, end: int) -> bool:
    """Whether the bytes from `start` to `end` are whole chunks, or nothing (but a pad byte that was forgotten)."""
    while start + 8 <= end:
        file.seek(start)
        name, size = struct.unpack("<4sI", file.read(8))
        if not _is_chunk_name(name):
            return False
        start += 8 + size + size % 2
    return 0 <= start - end <= 1


def _is_chunk_name(name: bytes) -> bool:
    return all(32 <= letter < 127 for letter in name)
