"""What the user says and shows in one message, prefilled while it is said.

Closed encoder windows are final. The open one is encoded and prefilled provisionally, and rolled back exactly when
more arrives, so that at the end of the turn only what changed since is left to compute.
"""

import bisect
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.conversation import Conversation, Mark
from engine.interleave import AudioRun, Cursor, GridRun, Run, order
from engine.io.media import Picture
from engine.models.audio_encoder import AudioEncoderState, AudioEnd
from engine.models.vision_encoder import VisionFeatures, VisionState
from engine.positions import Grid, grid_time, linear, spatial
from engine.stages import Stages
from engine.timeline import Modality, Role


@dataclass(frozen=True, slots=True)
class TurnPolicy:
    """When an open window is prefilled before it closes (design.md R1): a window of chunks that slides by a stride.

    `is_floor_exact`: closed windows whose mel floor a later, louder moment moves are encoded again at the end of the
    turn, as the offline encoder would have had them. Without it they stand; the difference lies below -80 dB.
    """

    is_provisional: bool = True
    provisional_chunks: int = 4
    stride_chunks: int = 2
    is_floor_exact: bool = True

    def is_due(self, num_open_chunks: int) -> bool:
        """Whether a provisional pass is due when `num_open_chunks` chunks wait in the open window."""
        waited = num_open_chunks - self.provisional_chunks
        return self.is_provisional and waited >= 0 and waited % self.stride_chunks == 0


@dataclass
class TurnMedia:
    """What a turn held, kept for a trace."""

    audio: list[Tensor] = field(default_factory=list)  # pieces of 16 kHz samples
    pixels: list[Tensor] = field(default_factory=list)  # per pair [rows, dim]
    grid: tuple[int, int, int] = (0, 0, 0)  # pairs, rows and columns of patches


@dataclass(frozen=True, slots=True)
class _Stop:
    """A place between final runs that a moved mel floor may send us back to."""

    cursor: Cursor
    mark: Mark


class UserTurn:
    """One user message under way: `hear`, `see`, `update`, then `end`."""

    def __init__(
        self, conversation: Conversation, stages: Stages, policy: TurnPolicy, *, has_audio: bool, has_video: bool
    ) -> None:
        self._conversation, self._stages, self._policy = conversation, stages, policy
        self._has_audio, self._has_video = has_audio, has_video
        self._audio_state: AudioEncoderState | None = (
            stages.audio.init_state(conversation.longest_sound_chunk) if has_audio else None
        )
        self._vision_state: VisionState | None = stages.vision.init_state() if has_video else None
        self._features = _Features()  # final audio features
        self._grids: list[VisionFeatures] = []
        self._cursor = Cursor()
        self._stops: list[_Stop] = []
        self._provisional: Mark | None = None
        self._open_samples = 0
        self._chunks_passed = 0
        self._last_run: Run | None = None
        self.media = TurnMedia()
        self._open()

    @property
    def num_samples(self) -> int:
        """Microphone samples heard in this turn."""
        return self._audio_state.num_samples if self._audio_state else 0

    def hear(self, samples: Tensor) -> None:
        """Take microphone samples [T]."""
        if self._audio_state is None or samples.numel() == 0:
            return
        if self._stages.keeps_media:
            self.media.audio.append(samples.clone())
        with self._stages.metrics.span("audio_encoder"):
            closed = self._stages.audio.step(samples, self._audio_state)
        self._open_samples += samples.numel()
        if closed.shape[0]:
            self._features.append(closed)
            self._open_samples = 0
            self._chunks_passed = 0
            self._append_final()

    def see(self, picture: Picture) -> None:
        """Take one sampled picture; two make a grid."""
        if self._vision_state is None:
            return
        with self._stages.metrics.span("vision_encoder"):
            features = self._stages.vision.step(picture.rgb, self._vision_state)
        if features is not None:
            self._add_grid(features)
            self._append_final()

    def update(self, chunk_samples: int) -> None:
        """After a chunk: prefill the open window provisionally if the policy says so."""
        num_chunks = self._open_samples // chunk_samples
        if num_chunks > self._chunks_passed and self._policy.is_due(num_chunks):
            self._prefill_provisional()
        self._chunks_passed = num_chunks

    def end(self, text: str = "") -> None:
        """Close the message, with what was typed beside it; the assistant's turn can begin."""
        self._finish_streams()
        conversation, layout = self._conversation, self._stages.scribe.layout
        if self._has_media:
            both = self._has_audio and self._has_video
            conversation.close_segment(self._span(), self._rows_at(self._cursor) if both else None)
        closing = [*self._closing_tokens(), *self._stages.scribe.typed(text), *layout.message_end]
        conversation.write(Role.USER, closing)

    # -- the parts of a turn

    @property
    def _has_media(self) -> bool:
        return self._has_audio or self._has_video

    def _open(self) -> None:
        layout = self._stages.scribe.layout
        opening = list(layout.user_header)
        if self._has_video:
            opening.append(layout.vision_start)
        if self._has_audio:
            opening.append(layout.audio_start)
        self._conversation.write(Role.USER, opening)
        if not self._has_media:
            return
        modality = Modality.AUDIO if not self._has_video else Modality.VIDEO
        if self._has_audio and self._has_video:
            modality = Modality.AUDIO_VIDEO
        self._conversation.open_segment(Role.USER, modality)
        self._stops.append(_Stop(self._cursor, self._conversation.mark()))

    def _closing_tokens(self) -> list[int]:
        layout = self._stages.scribe.layout
        return [layout.audio_end] * self._has_audio + [layout.vision_end] * self._has_video

    def _append_final(self) -> None:
        """Append what no later input can change."""
        self._drop_provisional()
        before = self._cursor
        self._cursor = self._append_runs(self._features, is_complete=False)
        if self._cursor != before:
            self._conversation.flush()
            self._stops.append(_Stop(self._cursor, self._conversation.mark()))

    def _prefill_provisional(self) -> None:
        assert self._audio_state is not None, "only audio has open windows"
        self._drop_provisional()
        with self._stages.metrics.span("audio_encoder"):
            tail = self._stages.audio.provisional(self._audio_state)
        if not tail.shape[0]:
            return
        self._provisional = self._conversation.mark()
        self._append_runs(self._features.followed_by(tail), is_complete=False)
        self._conversation.flush()
        self._stages.metrics.count("provisional_passes")

    def _drop_provisional(self) -> None:
        if self._provisional is not None:
            self._conversation.rollback(self._provisional)
            self._provisional = None

    def _finish_streams(self) -> None:
        self._drop_provisional()
        if self._vision_state is not None:
            with self._stages.metrics.span("vision_encoder"):
                features = self._stages.vision.finish(self._vision_state)
            if features is not None:
                self._add_grid(features)
        if self._audio_state is not None:
            with self._stages.metrics.span("audio_encoder"):
                end = self._end_of_audio(self._audio_state)
            if end.num_kept_tokens < self._features.length:
                self._return_to(end.num_kept_tokens)
            self._features.append(end.features)
            self._conversation.longest_sound_chunk = self._stages.audio.longest_chunk(self._audio_state)
        self._cursor = self._append_runs(self._features, is_complete=True)

    def _end_of_audio(self, state: AudioEncoderState) -> AudioEnd:
        if self._policy.is_floor_exact:
            return self._stages.audio.finish(state)
        return AudioEnd(state.num_closed_tokens, self._stages.audio.provisional(state))

    def _return_to(self, num_tokens: int) -> None:
        """The loudest moment came late and moved the mel floor of closed windows: go back to before them."""
        self._features.truncate(num_tokens)
        stop = max((s for s in self._stops if s.cursor.num_audio <= num_tokens), key=lambda s: s.mark.thinker_rows)
        self._conversation.rollback(stop.mark)
        self._cursor = stop.cursor
        self._stages.metrics.count("mel_floor_revisions")

    def _add_grid(self, features: VisionFeatures) -> None:
        self._grids.append(features)
        pairs, height, width = self.media.grid
        self.media.grid = (pairs + 1, features.grid[1], features.grid[2])
        if self._stages.keeps_media:
            self.media.pixels.append(features.pixels)

    def _append_runs(self, features: "_Features", *, is_complete: bool) -> Cursor:
        runs, cursor = order(
            self._cursor,
            features.length,
            len(self._grids),
            self._stages.seconds_per_grid,
            self._stages.positions_per_second,
            is_complete=is_complete or not (self._has_audio and self._has_video),  # one stream waits for no other
        )
        num_rows = self._rows_at(self._cursor)
        for run in runs:
            match run:
                case AudioRun(start, end):
                    num_rows = self._append_audio(features.between(start, end), start, num_rows)
                case GridRun(index):
                    num_rows = self._append_grid(index, num_rows)
            self._last_run = run
        return cursor

    def _append_audio(self, features: Tensor, start: int, num_rows: int) -> int:
        end = start + features.shape[0]
        self._conversation.append(
            [self._stages.scribe.layout.audio] * features.shape[0],
            features,
            linear(features.shape[0], start),
            is_text=False,
            talker_offsets=self._talker_offsets(features.shape[0], num_rows),
        )
        return num_rows + end - start

    def _append_grid(self, index: int, num_rows: int) -> int:
        grid, features = self._grid(index), self._grids[index]
        self._conversation.append(
            [self._stages.scribe.layout.video] * grid.num_tokens,
            features.tokens,
            spatial(grid),
            is_text=False,
            deepstack=tuple(features.deepstack),
            talker_offsets=self._talker_offsets(grid.num_tokens, num_rows),
        )
        return num_rows + grid.num_tokens

    def _talker_offsets(self, num_new: int, num_rows: int) -> Tensor | None:
        """The Talker's positions where sound and picture are interleaved: it counts them on, one by one.

        transformers does not tell its Talker of `use_audio_in_video` (modeling_qwen3_omni_moe.py, `generate`), so that
        there the rows of such a segment are linear; sound, pictures and silent video keep their own positions.
        """
        return linear(num_new, num_rows) if self._has_audio and self._has_video else None

    def _rows_at(self, cursor: Cursor) -> int:
        tokens_per_grid = self._grid(0).num_tokens if self._grids else 0
        return cursor.num_audio + cursor.num_grids * tokens_per_grid

    def _grid(self, index: int) -> Grid:
        merge = self._stages.spatial_merge
        _, height, width = self._grids[index].grid
        time = grid_time(index, self._stages.seconds_per_grid, self._stages.positions_per_second)
        return Grid(height // merge, width // merge, time)

    def _span(self) -> float:
        """Positions the segment takes: those of its last run of one kind, as `get_rope_index` counts them."""
        if isinstance(self._last_run, GridRun):
            return self._grid(self._last_run.index).last + 1
        return self._features.length


class _Features:
    """Audio features of a turn, window by window: read by token number without ever joining them all."""

    def __init__(self) -> None:
        self._windows: list[Tensor] = []
        self._starts: list[int] = []
        self.length = 0

    def append(self, features: Tensor) -> None:
        """Add `features` [n, D] behind the others."""
        self._windows.append(features)
        self._starts.append(self.length)
        self.length += features.shape[0]

    def followed_by(self, features: Tensor) -> "_Features":
        """These and `features` behind them; the windows are shared."""
        longer = _Features()
        longer._windows, longer._starts, longer.length = [*self._windows], [*self._starts], self.length
        longer.append(features)
        return longer

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on, which is where a window ends."""
        num_kept = bisect.bisect_left(self._starts, length)
        del self._windows[num_kept:], self._starts[num_kept:]
        self.length = sum(window.shape[0] for window in self._windows)
        assert self.length == length, f"{length} is inside a window"

    def between(self, start: int, end: int) -> Tensor:
        """Features [end - start, D] of the tokens `start` to `end` - 1."""
        first, last = bisect.bisect_right(self._starts, start) - 1, bisect.bisect_left(self._starts, end)
        origin = self._starts[first]
        windows = self._windows[first:last]
        joined = windows[0] if len(windows) == 1 else torch.cat(windows)
        return joined[start - origin : end - origin]


def picture_message(conversation: Conversation, stages: Stages, picture: Picture, text: str) -> TurnMedia:
    """A message of one still picture and what was typed beside it."""
    state = stages.vision.init_state()
    layout, merge = stages.scribe.layout, stages.spatial_merge
    with stages.metrics.span("vision_encoder"):
        features = stages.vision.step(picture.rgb, state) or stages.vision.finish(state)
    assert features is not None, "one picture always makes a grid"
    grid = Grid(features.grid[1] // merge, features.grid[2] // merge, 0.0)
    conversation.write(Role.USER, [*layout.user_header, layout.vision_start])
    conversation.open_segment(Role.USER, Modality.PICTURE)
    conversation.append(
        [layout.image] * grid.num_tokens,
        features.tokens,
        spatial(grid),
        is_text=False,
        deepstack=tuple(features.deepstack),
    )
    conversation.close_segment(grid.last + 1)
    conversation.write(Role.USER, [layout.vision_end, *stages.scribe.typed(text), *layout.message_end])
    return TurnMedia(pixels=[features.pixels] if stages.keeps_media else [], grid=features.grid)
