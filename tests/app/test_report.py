import io
import json

import pytest

from app.report import print_stages, report, write_json, write_report
from app.transcript import Transcript
from engine import events

TOP = {"turns", "dropped", "stages", "counters", "rtf", "model", "model_fingerprint", "device", "dtype"}
REPLY = {
    "text", "heard_text", "token_ids", "num_codec_frames", "codec_sha256", "audio_s", "heard_s",
    "first_token_ms", "first_audio_ms", "interrupted", "end_reason",
}  # fmt: skip
STAGE = {"num_calls", "total_ms", "p50_ms", "p95_ms", "p99_ms", "max_ms"}

READY = events.Ready("/models/mini", "f00d", False, "cpu", "float32", "why", 10, "ethan", ("ethan",), 8000, 32768)
SUMMARY = events.Summary(
    stages=(
        events.StageSummary("thinker", 7, 70.0, 9.0, 11.0, 12.0, 13.5),
        events.StageSummary("a_stage_with_a_name_that_is_long", 1, 0.25, 0.25, 0.25, 0.25, 0.25),
    ),
    counters=(("provisional_passes", 3), ("mel_floor_revisions", 0)),
    rtf=0.4321,
)


def reply_end(turn, reason="finished", **changes):
    values = {
        "generation": turn, "turn": turn, "reason": reason, "text": "Hello there.", "heard_text": "Hello",
        "token_ids": (5, 6), "num_codec_frames": 25, "codec_sha256": "ab" * 32, "audio_s": 2.0, "heard_s": 1.0,
        "first_token_ms": 12.5, "first_audio_ms": None, "busy_s": 0.5,
    }  # fmt: skip
    return events.ReplyEnded(**(values | changes))


@pytest.fixture
def transcript():
    transcript = Transcript(io.StringIO())
    for event in (
        READY,
        events.UserTurnEnded(1, 0.0, 1.5, None),
        reply_end(1, "interrupted"),
        events.UserTurnDropped(2, "there was only silence"),
        events.UserTurnEnded(3, 4.0, 4.0, "你好"),
        reply_end(3),
        SUMMARY,
        events.Finished(),
    ):
        transcript.take(event)
    return transcript


def test_a_report_has_its_keys_and_no_others(transcript):
    content = report(transcript)
    assert set(content) == TOP
    assert [set(turn) for turn in content["turns"]] == [{"user", "reply"}] * 2
    assert [set(turn["user"]) for turn in content["turns"]] == [{"start_s", "end_s"}, {"start_s", "end_s", "text"}]
    assert [set(turn["reply"]) for turn in content["turns"]] == [REPLY] * 2
    assert [set(stage) for stage in content["stages"].values()] == [STAGE] * 2
    assert [set(dropped) for dropped in content["dropped"]] == [{"turn", "reason"}]


def test_a_report_holds_what_happened(transcript):
    content = report(transcript)
    first, third = content["turns"]
    assert first["user"] == {"start_s": 0.0, "end_s": 1.5}
    assert third["user"] == {"start_s": 4.0, "end_s": 4.0, "text": "你好"}
    assert first["reply"] == {
        "text": "Hello there.",
        "heard_text": "Hello",
        "token_ids": [5, 6],
        "num_codec_frames": 25,
        "codec_sha256": "ab" * 32,
        "audio_s": 2.0,
        "heard_s": 1.0,
        "first_token_ms": 12.5,
        "first_audio_ms": None,  # unknown is not 0
        "interrupted": True,
        "end_reason": "interrupted",
    }
    assert (third["reply"]["interrupted"], third["reply"]["end_reason"]) == (False, "finished")
    assert content["dropped"] == [{"turn": 2, "reason": "there was only silence"}]
    assert content["stages"]["thinker"] == {
        "num_calls": 7, "total_ms": 70.0, "p50_ms": 9.0, "p95_ms": 11.0, "p99_ms": 12.0, "max_ms": 13.5,
    }  # fmt: skip
    assert content["counters"] == {"provisional_passes": 3, "mel_floor_revisions": 0}
    assert (content["rtf"], content["model"], content["device"], content["dtype"]) == (
        0.4321,
        "/models/mini",
        "cpu",
        "float32",
    )


def test_a_conversation_that_never_began_is_reported_too():
    content = report(Transcript(io.StringIO()))
    assert set(content) == TOP
    assert (content["turns"], content["dropped"], content["stages"], content["counters"]) == ([], [], {}, {})
    assert [content[key] for key in ("rtf", "model", "device", "dtype")] == [None] * 4


def test_the_file_is_the_report(tmp_path, transcript, capsys):
    path = tmp_path / "report.json"
    write_report(path, transcript)
    text = path.read_text(encoding="utf-8")
    assert json.loads(text) == report(transcript)
    assert "你好" in text  # readable, not escaped
    assert text.endswith("}\n")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("where", ["missing/report.json", ".", "file.txt/report.json"])
def test_a_path_that_cannot_be_written_is_said_on_stderr(tmp_path, transcript, capsys, where):
    (tmp_path / "file.txt").write_text("not a folder")
    path = tmp_path / where
    write_report(path, transcript)
    out, err = capsys.readouterr()
    assert out == ""
    assert str(path) in err
    assert "cannot be written" in err
    assert "choose another file" in err
    assert err.count("\n") == 1


def test_any_content_can_be_written(tmp_path):
    write_json(tmp_path / "a.json", {"ratio": 1.5, "what": None})
    assert json.loads((tmp_path / "a.json").read_text()) == {"ratio": 1.5, "what": None}


def test_the_table_of_stages_stands_in_columns():
    out = io.StringIO()
    print_stages(SUMMARY, out)
    _, head, thinker, _, factor = out.getvalue().splitlines()
    assert " ".join(head.split()) == "stage calls total ms p50 ms p95 ms p99 ms max ms"
    assert thinker.split() == ["thinker", "7", "70.0", "9.00", "11.00", "12.00", "13.50"]
    assert len(thinker) == len(head)
    assert factor == "real-time factor of the replies: 0.43"


def test_a_real_time_factor_that_was_not_measured_is_no_number():
    out = io.StringIO()
    print_stages(events.Summary((), (), None), out)
    assert "n/a" in out.getvalue()
    assert "0.00" not in out.getvalue()
