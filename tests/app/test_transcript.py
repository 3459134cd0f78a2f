import io
from dataclasses import replace

import pytest

from app.transcript import Transcript
from engine import events

READY = events.Ready(
    model="/models/mini",
    fingerprint="f00d",
    is_untrained=False,
    device="cpu",
    dtype="float32",
    why_device="no usable GPU: none found",
    num_parameters=3_400_000,
    voice="ethan",
    voices=("aiden", "chelsie", "ethan"),
    window_ms=8000,
    max_tokens=32768,
)

GPU_GONE = events.Failed("engine", "the GPU is gone", is_fault=False)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def reply_end(**changes):
    values = {
        "generation": 1,
        "turn": 1,
        "reason": "finished",
        "text": "Hello there.",
        "heard_text": "Hello there.",
        "token_ids": (1, 2),
        "num_codec_frames": 25,
        "codec_sha256": "ab" * 32,
        "audio_s": 2.0,
        "heard_s": 2.0,
        "first_token_ms": 12.4,
        "first_audio_ms": 34.6,
        "busy_s": 0.5,
    }
    return events.ReplyEnded(**(values | changes))


def printed(*given, out=None):
    out = out or io.StringIO()
    transcript = Transcript(out)
    for event in given:
        transcript.take(event)
    return out.getvalue()


def reply(*pieces, **changes):
    deltas = [events.TextDelta(1, piece) for piece in pieces]
    return [events.ReplyStarted(1, 1), *deltas, reply_end(**changes)]


def test_a_conversation_reads_from_top_to_bottom():
    text = printed(
        events.UserTurnStarted(1, 0.0),
        events.UserTurnEnded(1, 0.0, 1.25, None),
        *reply("Hel", "lo ", "there."),
        events.UserTurnEnded(2, 3.0, 3.0, "and you?"),
        *reply("Fine."),
        events.Finished(),
    )
    assert text.splitlines() == [
        "you     [0.00 to 1.25 s]",
        "parley  Hello there.",
        "        (2.00 s of speech; first token 12 ms; first sound 35 ms)",
        "you     and you?",
        "parley  Fine.",
        "        (2.00 s of speech; first token 12 ms; first sound 35 ms)",
    ]
    assert text.endswith("\n")


def test_text_is_shown_as_it_comes():
    out = io.StringIO()
    transcript = Transcript(out)
    transcript.take(events.ReplyStarted(1, 1))
    for piece in ("One", " two", " three"):
        transcript.take(events.TextDelta(1, piece))
        assert out.getvalue().endswith(piece)


def test_what_is_said_and_typed_at_once_is_one_line():
    assert printed(events.UserTurnEnded(1, 1.0, 2.5, "look")) == "you     [1.00 to 2.50 s] look\n"


def test_an_interruption_says_what_was_heard():
    text = printed(*reply("Hello there.", reason="interrupted", heard_s=0.75, heard_text="Hello"))
    assert "interrupted after 0.75 s, heard: 'Hello'" in text


def test_a_reply_without_speech_shows_no_speech():
    text = printed(*reply("Hello.", audio_s=0.0, heard_s=0.0, first_audio_ms=None))
    assert text.splitlines()[1] == "        (first token 12 ms)"
    assert "speech" not in text
    assert "sound" not in text


def test_a_reply_of_nothing_says_why():
    text = printed(*reply(reason="empty", text="", audio_s=0.0, first_token_ms=None, first_audio_ms=None))
    assert text.splitlines()[1].strip() == "(empty)"


@pytest.mark.parametrize("pieces", [("A line\n",), ("A line", "\n")])
def test_a_reply_that_ends_its_line_leaves_no_empty_one(pieces):
    assert printed(*reply(*pieces)).splitlines()[:2] == [
        "parley  A line",
        "        (2.00 s of speech; first token 12 ms; first sound 35 ms)",
    ]


def test_a_dropped_turn_says_why_and_is_kept_for_the_report():
    out = io.StringIO()
    transcript = Transcript(out)
    dropped = events.UserTurnDropped(1, "there was only silence")
    transcript.take(dropped)
    assert out.getvalue() == "you     [nothing to answer: there was only silence]\n"
    assert transcript.dropped == [dropped]


def test_a_notice_in_the_middle_of_a_reply_has_its_own_line():
    text = printed(events.ReplyStarted(1, 1), events.TextDelta(1, "Hello"), events.Notice("the speech was cut."))
    assert text.splitlines() == ["parley  Hello", "        note: the speech was cut."]


def test_the_model_is_introduced():
    lines = printed(READY).splitlines()
    assert lines == [
        "model   /models/mini (3.4 M parameters)",
        "device  cpu, float32 (no usable GPU: none found)",
        "voice   ethan of aiden, chelsie, ethan",
    ]


def test_an_untrained_model_is_called_so_and_one_without_a_voice_shows_none():
    text = printed(replace(READY, is_untrained=True, voice=None, voices=()))
    assert "not trained" in text
    assert "voice   " not in text


LOADING = [
    events.Loading(0.0, "Checking the files"),
    events.Loading(0.05, "Loading 3.4 MiB of weights"),
    events.Loading(0.5, "Loading 3.4 MiB of weights"),
    events.Loading(0.9, "Loading 3.4 MiB of weights"),
    events.Loading(1.0, "Ready"),
]


def test_progress_in_a_pipe_is_one_line_a_stage():
    text = printed(*LOADING)
    assert text.splitlines() == ["Checking the files ...", "Loading 3.4 MiB of weights ...", "Ready ..."]
    assert "\r" not in text


def test_progress_on_a_terminal_is_one_bar_that_fills_in_place():
    text = printed(*LOADING, out=Terminal())
    assert "\n" not in text
    bars = [bar[: bar.index("]") + 1] for bar in text.split("\r")[1:]]
    assert len(bars) == len(LOADING)
    assert [bar.count("#") for bar in bars] == [0, 1, 12, 22, 24]
    assert {len(bar) for bar in bars} == {26}
    assert len({len(bar) for bar in text.split("\r")[1:]}) == 1  # a shorter one wipes out a longer one


def on_screen(text):
    """Lines of a terminal after `text`: a carriage return goes back and what follows overwrites."""
    lines = []
    for line in text.split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines


def test_the_bar_is_gone_when_the_model_is_ready():
    lines = on_screen(printed(*LOADING, READY, out=Terminal()))
    assert lines[0] == "model   /models/mini (3.4 M parameters)"
    assert not any("#" in line or "Loading" in line for line in lines)


def test_what_follows_a_bar_that_never_finished_begins_its_own_line():
    text = printed(*LOADING[:2], events.Notice("the disk is slow"), out=Terminal())
    assert on_screen(text)[1].strip() == "note: the disk is slow"


def test_the_end_comes_with_finished_or_failed_and_nothing_else():
    transcript = Transcript(io.StringIO())
    summary = events.Summary((), (), None)
    for event in (READY, *reply("Hi."), events.UserTurnDropped(2, "x"), events.ContextUsed(1, 2, 3), summary):
        transcript.take(event)
        assert not transcript.is_over
    transcript.take(events.Finished())
    assert (transcript.is_over, transcript.failure) == (True, None)
    failed = Transcript(io.StringIO())
    failed.take(GPU_GONE)
    assert (failed.is_over, failed.failure) == (True, GPU_GONE)


def test_what_the_report_needs_is_kept():
    transcript = Transcript(io.StringIO())
    turn, end, summary = events.UserTurnEnded(1, 0.0, 1.0, None), reply_end(), events.Summary((), (("a", 1),), 0.5)
    for event in (READY, turn, events.ReplyStarted(1, 1), end, summary):
        transcript.take(event)
    assert transcript.ready == READY
    assert transcript.turns == {1: turn}
    assert transcript.replies == [end]
    assert transcript.summary == summary


def test_what_a_model_writes_cannot_steer_the_terminal():
    from app.transcript import printable

    assert printable("a\x1b[2Jb\r\x07c\nd\té你好") == "a[2Jbc\nd\té你好"
