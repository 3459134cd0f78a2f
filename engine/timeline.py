"""The timeline: every token of the conversation, its positions and its segment. It is the truth.

Caches, panels and a second model version can all be rebuilt from it. Append-only except `truncate`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

INITIAL_TOKENS = 1024


class Role(Enum):
    """Whose message a segment belongs to."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


class Modality(Enum):
    """What the tokens of a segment stand for."""

    TEXT = "text"
    AUDIO = "audio"
    PICTURE = "picture"
    VIDEO = "video"
    AUDIO_VIDEO = "audio in video"


@dataclass(frozen=True, slots=True)
class Segment:
    """Contiguous tokens of one kind: `start` counts tokens, `base` is the position where the segment begins."""

    role: Role
    modality: Modality
    start: int
    base: float


@dataclass(frozen=True, slots=True)
class TimelineMark:
    """A moment of the timeline to come back to."""

    num_tokens: int
    num_segments: int
    next_position: float


class Timeline:
    """Tokens [T] with positions [3, T] and the segments that they form."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._positions = torch.zeros(3, INITIAL_TOKENS)
        self._segments: list[Segment] = []
        self._next_position = 0.0

    def open_segment(self, role: Role, modality: Modality) -> None:
        """Begin a segment at the first free position."""
        self._segments.append(Segment(role, modality, len(self._token_ids), self._next_position))

    def append(self, token_ids: Sequence[int], offsets: Tensor) -> Tensor:
        """Add tokens to the open segment, `offsets` [3, n] from its base; return their positions [3, n]."""
        start, end = len(self._token_ids), len(self._token_ids) + len(token_ids)
        while end > self._positions.shape[1]:
            self._positions = torch.cat((self._positions, torch.zeros_like(self._positions)), dim=1)
        positions = offsets + self._segments[-1].base
        self._positions[:, start:end] = positions
        self._token_ids.extend(token_ids)
        return positions

    def close_segment(self, span: float) -> None:
        """End the open segment; the next begins `span` positions after its base."""
        self._next_position = self._segments[-1].base + span

    def mark(self) -> TimelineMark:
        """The present end, for `truncate`."""
        return TimelineMark(len(self._token_ids), len(self._segments), self._next_position)

    def truncate(self, mark: TimelineMark) -> None:
        """Forget what was added after `mark`."""
        del self._token_ids[mark.num_tokens :]
        del self._segments[mark.num_segments :]
        self._next_position = mark.next_position

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All token ids, media as placeholders."""
        return tuple(self._token_ids)

    @property
    def positions(self) -> Tensor:
        """All positions [3, T]."""
        return self._positions[:, : len(self._token_ids)]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All segments, oldest first."""
        return tuple(self._segments)
