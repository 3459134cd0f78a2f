"""One conversation: its timeline, the keys and values of Thinker and Talker, and how both grow and are cut.

Nothing is computed twice: a turn prefills only what is new, and what was not heard is cut off both caches.
The Talker's prompt holds the user's segments only (facts.md section 2.4), so it has a timeline of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.layout import Scribe
from engine.metrics import Metrics
from engine.models.decoder import Deepstack
from engine.models.talker import Talker
from engine.models.thinker import Thinker
from engine.positions import linear
from engine.timeline import Modality, Role, Timeline, TimelineMark

# A message of the user is taken only if this many tokens are left for its answer.
REPLY_ROOM = 64
# Kept free behind a reply: its last token, and the end of the message.
CLOSING_ROOM = 8


class ContextFullError(RuntimeError):
    """The conversation has no room for what was to be added."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows that wait to be prefilled, all text or all media."""

    embeddings: Tensor  # [n, H]
    positions: Tensor  # [3, n]
    talker_positions: Tensor | None  # [3, n]; None for what the Talker never sees
    is_text: bool
    deepstack: tuple[Tensor, ...] = ()  # per layer [n, H]

    def split(self, num_rows: int) -> tuple["Piece", "Piece"]:
        """The first `num_rows` rows and the rest."""
        head, tail = slice(None, num_rows), slice(num_rows, None)
        return self._rows(head), self._rows(tail)

    def _rows(self, rows: slice) -> "Piece":
        talker = None if self.talker_positions is None else self.talker_positions[:, rows]
        deepstack = tuple(feature[rows] for feature in self.deepstack)
        return Piece(self.embeddings[rows], self.positions[:, rows], talker, self.is_text, deepstack)

    def __len__(self) -> int:
        return self.embeddings.shape[0]


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of the conversation to come back to."""

    thinker: TimelineMark
    talker: TimelineMark
    thinker_rows: int
    talker_rows: int
    num_waiting: int
    longest_sound_chunk: int


class Conversation:
    """Grows by segments, is cut at marks. Belongs to the engine thread."""

    def __init__(
        self,
        thinker: Thinker,
        talker: Talker | None,
        scribe: Scribe,
        metrics: Metrics,
        *,
        max_tokens: int,
        prefill_rows: int,
    ) -> None:
        """`prefill_rows` bounds one forward pass, `max_tokens` the whole context."""
        self._thinker, self._talker, self._scribe, self._metrics = thinker, talker, scribe, metrics
        self._max_tokens, self._prefill_rows = max_tokens, prefill_rows
        self._thinker_state = thinker.init_state()
        self._talker_state = None if talker is None else talker.init_state()
        self.timeline = Timeline()
        self.talker_timeline = Timeline()
        self._queue: list[Piece] = []
        self._waiting: list[tuple[Tensor, Tensor]] = []  # Talker rows not prefilled: nothing was spoken yet
        self._talker_sees = False
        self._hidden: Tensor | None = None  # [1, H]: after the last prefilled row
        self._reply_start: Mark | None = None
        self._num_reply_tokens = 0
        self.longest_sound_chunk = 0  # mel frames; the encoder pads shorter sounds up to it
        self.eager_talker = True  # prefill the Talker at once, because the reply will be spoken

    @property
    def num_tokens(self) -> int:
        """Length of the context, queued rows included."""
        return len(self.timeline)

    @property
    def max_tokens(self) -> int:
        """The most tokens the context can hold."""
        return self._max_tokens

    @property
    def num_prefilled(self) -> int:
        """Rows in the Thinker's KV cache."""
        return self._thinker_state.store.length

    @property
    def nbytes(self) -> int:
        """Bytes of both KV caches."""
        return self._thinker_state.nbytes + (self._talker_state.nbytes if self._talker_state else 0)

    # -- growing, segment by segment

    def open_segment(self, role: Role, modality: Modality) -> None:
        """Begin a segment; the Talker sees it when it is the user's."""
        self.timeline.open_segment(role, modality)
        self._talker_sees = role is Role.USER
        if self._talker_sees:
            self.talker_timeline.open_segment(role, modality)

    def append(
        self,
        token_ids: Sequence[int],
        embeddings: Tensor,
        offsets: Tensor,
        *,
        is_text: bool,
        deepstack: tuple[Tensor, ...] = (),
        talker_offsets: Tensor | None = None,
    ) -> None:
        """Add rows [n, H] to the open segment, `offsets` [3, n] from its base. They are prefilled by `flush`.

        `talker_offsets` are given where the Talker counts otherwise.
        """
        self._claim(len(token_ids), REPLY_ROOM if self._talker_sees else 0)
        positions = self.timeline.append(token_ids, offsets)
        talker_positions: Tensor | None = None
        if self._talker_sees:
            talker_offsets = offsets if talker_offsets is None else talker_offsets
            talker_positions = self.talker_timeline.append(token_ids, talker_offsets)
        self._queue.append(Piece(embeddings, positions, talker_positions, is_text, deepstack))

    def close_segment(self, span: float, talker_span: float | None = None) -> None:
        """End the open segment `span` positions after its base; `talker_span` where the Talker counts otherwise."""
        self.timeline.close_segment(span)
        if self._talker_sees:
            self.talker_timeline.close_segment(span if talker_span is None else talker_span)

    def write(self, role: Role, token_ids: Sequence[int]) -> None:
        """Add a whole text segment."""
        if not token_ids:
            return
        self.open_segment(role, Modality.TEXT)
        self.append(token_ids, self._thinker.embed(token_ids), linear(len(token_ids)), is_text=True)
        self.close_segment(len(token_ids))

    def flush(self) -> None:
        """Prefill what is queued, in passes of at most `prefill_rows` rows."""
        while self._queue:
            self._prefill(self._take_pass())

    def mark(self) -> Mark:
        """The present end; what is queued is prefilled first."""
        self.flush()
        if self.eager_talker:
            self._prefill_talker()
        talker_rows = self._talker_state.store.length if self._talker_state else 0
        return Mark(
            self.timeline.mark(),
            self.talker_timeline.mark(),
            self.num_prefilled,
            talker_rows,
            len(self._waiting),
            self.longest_sound_chunk,
        )

    def rollback(self, mark: Mark) -> None:
        """Return to `mark`: both timelines and both caches."""
        self._queue.clear()
        self.timeline.truncate(mark.thinker)
        self.talker_timeline.truncate(mark.talker)
        self._thinker_state.store.crop(mark.thinker_rows)
        if self._talker_state is not None:
            self._talker_state.store.crop(mark.talker_rows)
        del self._waiting[mark.num_waiting :]
        self.longest_sound_chunk = mark.longest_sound_chunk
        self._hidden = None

    def _claim(self, num_new: int, num_kept_free: int) -> None:
        """Raise where `num_new` tokens do not fit before the last `num_kept_free` of the context."""
        if self.num_tokens + num_new > self._max_tokens - num_kept_free:
            raise ContextFullError(
                f"the conversation holds {self.num_tokens} of {self._max_tokens} tokens, and {num_new} more do not fit "
                "with an answer behind them: start a new conversation"
            )

    def _take_pass(self) -> list[Piece]:
        taken: list[Piece] = []
        room = self._prefill_rows
        while self._queue and room > 0:
            piece = self._queue.pop(0)
            if len(piece) > room:
                piece, rest = piece.split(room)
                self._queue.insert(0, rest)
            taken.append(piece)
            room -= len(piece)
        return taken

    def _prefill(self, pieces: list[Piece]) -> None:
        embeddings = torch.cat([piece.embeddings for piece in pieces])
        positions = torch.cat([piece.positions for piece in pieces], dim=1).to(self._thinker.device)
        with self._metrics.span("thinker_prefill"):
            out = self._thinker.step(embeddings, positions, self._thinker_state, _deepstack(pieces, embeddings.device))
        self._metrics.count("thinker_prefill_tokens", embeddings.shape[0])
        self._hidden = out.hidden[-1:]
        if self._talker is None or out.tapped is None:
            return
        start = 0
        for piece in pieces:
            end = start + len(piece)
            if piece.talker_positions is not None:
                rows = self._talker.user_rows(piece.embeddings, out.tapped[start:end], is_text=piece.is_text)
                self._waiting.append((rows, piece.talker_positions))
            start = end
        if self.eager_talker:
            self._prefill_talker()

    def _prefill_talker(self) -> None:
        if not self._waiting or self._talker is None or self._talker_state is None:
            return
        rows = torch.cat([rows for rows, _ in self._waiting])
        positions = torch.cat([positions for _, positions in self._waiting], dim=1).to(self._talker.device)
        with self._metrics.span("talker_prefill"):
            self._talker.step(rows, positions, self._talker_state)
        self._metrics.count("talker_prefill_tokens", rows.shape[0])
        self._waiting.clear()

    # -- the reply

    @property
    def reply_start(self) -> int:
        """Number of tokens before the reply under way: its prompt."""
        assert self._reply_start is not None, "no reply is under way"
        return self._reply_start.thinker.num_tokens

    def begin_reply(self) -> None:
        """Open the assistant's message: what follows are the reply's own tokens."""
        self.write(Role.ASSISTANT, self._scribe.layout.assistant_header)
        self._reply_start = self.mark()
        self.open_segment(Role.ASSISTANT, Modality.TEXT)
        self._num_reply_tokens = 0

    def reply_logits(self) -> Tensor:
        """Scores [V] of the reply's next token."""
        assert self._hidden is not None, "logits are asked for before anything was prefilled"
        return self._thinker.logits(self._hidden)

    def extend_reply(self, token: Tensor, token_id: int) -> None:
        """Feed the reply's next token, `token` [] on the device."""
        offset = linear(1, self._num_reply_tokens)
        self._claim(1, CLOSING_ROOM)
        positions = self.timeline.append([token_id], offset).to(self._thinker.device)
        with self._metrics.span("thinker_decode"):
            self._hidden = self._thinker.decode(self._thinker.embed_token(token), positions, self._thinker_state)
        self._num_reply_tokens += 1

    def begin_speech(self, rows: Tensor) -> Tensor:
        """Open the Talker's part with the nine `rows`; return its hidden state [1, H]."""
        assert self._talker_state is not None, "this model has no Talker"
        assert self._reply_start is not None, "begin_speech before begin_reply"
        self._prefill_talker()
        # The rows that waited are the user's: they stay when this reply is cut.
        self._reply_start = replace(self._reply_start, talker_rows=self._talker_state.store.length, num_waiting=0)
        self.talker_timeline.open_segment(Role.ASSISTANT, Modality.TEXT)
        return self.extend_speech(rows, 0)

    def extend_speech(self, rows: Tensor, num_before: int) -> Tensor:
        """Feed the Talker `rows` [n, H], `num_before` rows into the reply; return the last hidden state [1, H]."""
        assert self._talker is not None, "this model has no Talker"
        assert self._talker_state is not None, "this model has no Talker"
        base = self.talker_timeline.segments[-1].base
        positions = linear(rows.shape[0], base + num_before).to(self._talker.device)
        return self._talker.step(rows, positions, self._talker_state)

    def end_reply(self, heard: Sequence[int]) -> None:
        """Close the assistant's message with the token ids `heard` of its reply, and forget the rest of it.

        The Talker forgets its part altogether: its prompt holds user segments only.
        """
        assert self._reply_start is not None, "end_reply before begin_reply"
        start = self._reply_start
        num_fed = min(self._num_reply_tokens, len(heard))
        fed_is_heard = self.timeline.token_ids[start.thinker.num_tokens :][:num_fed] == tuple(heard[:num_fed])
        assert fed_is_heard, "the heard tokens are not those of the reply"
        keep = TimelineMark(
            start.thinker.num_tokens + num_fed,
            start.thinker.num_segments + (1 if num_fed else 0),
            start.thinker.next_position + num_fed,
        )
        self.rollback(replace(start, thinker=keep, thinker_rows=start.thinker_rows + num_fed))
        self._reply_start = None
        self.write(Role.ASSISTANT, [*heard[num_fed:], *self._scribe.layout.message_end])


def _deepstack(pieces: list[Piece], device: torch.device) -> Deepstack | None:
    """The visual features of a pass, with the rows where they belong."""
    rows: list[Tensor] = []
    features: list[tuple[Tensor, ...]] = []
    start = 0
    for piece in pieces:
        if piece.deepstack:
            rows.append(torch.arange(start, start + len(piece), device=device))
            features.append(piece.deepstack)
        start += len(piece)
    if not rows:
        return None
    return Deepstack(torch.cat(rows), tuple(torch.cat(layer) for layer in zip(*features, strict=True)))
