"""Prints a conversation as it happens and keeps what the report needs of it."""

import unicodedata
from typing import TextIO

from engine import events
from engine.events import Event

BAR_WIDTH = 24


def printable(text: str) -> str:
    """`text` without control characters: what a model or a user wrote must not steer the terminal."""
    return "".join(letter for letter in text if letter in "\n\t" or unicodedata.category(letter) != "Cc")


class Transcript:
    """Takes events in order; `is_over` once nothing more will come."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._at_line_start = True
        self._progress_shown = ""
        self.ready: events.Ready | None = None
        self.turns: dict[int, events.UserTurnEnded] = {}
        self.dropped: list[events.UserTurnDropped] = []
        self.replies: list[events.ReplyEnded] = []
        self.summary: events.Summary | None = None
        self.failure: events.Failed | None = None
        self.is_over = False
        self.was_stopped = False

    def take(self, event: Event) -> None:
        """Show one event."""
        match event:
            case events.Loading():
                self._show_progress(event)
            case events.Ready():
                self._show_ready(event)
            case events.Summary():
                self.summary = event
            case events.Finished():
                self.is_over = True
            case events.Failed():
                self.failure = event
                self.is_over = True
            case _:
                self._take_talk(event)

    def _take_talk(self, event: Event) -> None:
        match event:
            case events.UserTurnEnded():
                self._show_user(event)
            case events.UserTurnDropped():
                self.dropped.append(event)
                self._line(f"you     [nothing to answer: {event.reason}]")
            case events.ReplyStarted():
                self._write("parley  ")
            case events.TextDelta():
                self._write(printable(event.text))
            case events.ReplyEnded():
                self._show_reply_end(event)
            case events.Notice():
                self._line(f"        note: {event.text}")

    def _show_progress(self, event: events.Loading) -> None:
        if self._is_terminal:
            filled = round(BAR_WIDTH * event.fraction)
            bar = "#" * filled + "." * (BAR_WIDTH - filled)
            self._out.write(f"\r[{bar}] {event.what:<50.50}")
            self._out.flush()
            self._at_line_start = False
        elif event.what != self._progress_shown:
            self._line(f"{event.what} ...")
        self._progress_shown = event.what

    def _show_ready(self, event: events.Ready) -> None:
        self.ready = event
        if self._is_terminal:
            self._out.write("\r" + " " * (BAR_WIDTH + 54) + "\r")
            self._at_line_start = True
        millions = event.num_parameters / 1e6
        self._line(f"model   {event.model} ({millions:.1f} M parameters)")
        self._line(f"device  {event.device}, {event.dtype} ({event.why_device})")
        if event.voice is not None:
            self._line(f"voice   {event.voice} of {', '.join(event.voices)}")
        if event.is_untrained:
            self._line("note    this stand-in model is not trained: its words and its voice are noise")
        self._line("")

    def _show_user(self, event: events.UserTurnEnded) -> None:
        self.turns[event.turn] = event
        said = f"[{event.start_s:.2f} to {event.end_s:.2f} s]" if event.end_s > event.start_s else ""
        self._line("you     " + printable(" ".join(part for part in (said, event.text) if part)))

    def _show_reply_end(self, event: events.ReplyEnded) -> None:
        self.replies.append(event)
        facts = []
        if event.interrupted:
            facts.append(f"interrupted after {event.heard_s:.2f} s, heard: {event.heard_text!r}")
        if event.audio_s:
            facts.append(f"{event.audio_s:.2f} s of speech")
        if event.first_token_ms is not None:
            facts.append(f"first token {event.first_token_ms:.0f} ms")
        if event.first_audio_ms is not None:
            facts.append(f"first sound {event.first_audio_ms:.0f} ms")
        self._line("")
        self._line(f"        ({'; '.join(facts) or event.reason})")

    def _line(self, text: str) -> None:
        if not self._at_line_start:
            self._out.write("\n")
        self._out.write(text + "\n" if text else "")
        self._out.flush()
        self._at_line_start = True

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
        self._at_line_start = text.endswith("\n")
