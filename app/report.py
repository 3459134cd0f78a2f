"""The numbers of a conversation: the table of stage times, and the report as JSON."""

import json
import sys
from pathlib import Path
from typing import Any, TextIO

from app.transcript import Transcript
from engine import events


def print_stages(summary: events.Summary, out: TextIO) -> None:
    """Print what each stage cost."""
    out.write(f"\n{'stage':<18}{'calls':>7}{'total ms':>11}{'p50 ms':>9}{'p95 ms':>9}{'p99 ms':>9}{'max ms':>9}\n")
    for stage in summary.stages:
        times = (stage.p50_ms, stage.p95_ms, stage.p99_ms, stage.max_ms)
        columns = "".join(f"{value:9.2f}" for value in times)
        out.write(f"{stage.name:<18}{stage.num_calls:7}{stage.total_ms:11.1f}{columns}\n")
    rtf = "n/a (nothing was spoken)" if summary.rtf is None else f"{summary.rtf:.2f}"
    out.write(f"real-time factor of the replies: {rtf}\n")


def report(transcript: Transcript) -> dict[str, Any]:
    """The conversation as the documented JSON object."""
    ready, summary = transcript.ready, transcript.summary
    stages = {} if summary is None else {stage.name: _stage(stage) for stage in summary.stages}
    return {
        "turns": [_turn(transcript.turns[reply.turn], reply) for reply in transcript.replies],
        "dropped": [{"turn": dropped.turn, "reason": dropped.reason} for dropped in transcript.dropped],
        "stages": stages,
        "counters": {} if summary is None else dict(summary.counters),
        "rtf": None if summary is None else summary.rtf,
        "model": None if ready is None else ready.model,
        "model_fingerprint": None if ready is None else ready.fingerprint,
        "device": None if ready is None else ready.device,
        "dtype": None if ready is None else ready.dtype,
    }


def write_report(path: Path, transcript: Transcript) -> None:
    """Write the report; a path that cannot be written is said, not raised."""
    write_json(path, report(transcript))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` to `path`; a path that cannot be written is said, not raised."""
    try:
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        print(f"parley: {path} cannot be written ({error.strerror}): choose another file", file=sys.stderr)


def _turn(user: events.UserTurnEnded, reply: events.ReplyEnded) -> dict[str, Any]:
    said: dict[str, Any] = {"start_s": user.start_s, "end_s": user.end_s}
    if user.text is not None:
        said["text"] = user.text
    return {
        "user": said,
        "reply": {
            "text": reply.text,
            "heard_text": reply.heard_text,
            "token_ids": list(reply.token_ids),
            "num_codec_frames": reply.num_codec_frames,
            "codec_sha256": reply.codec_sha256,
            "audio_s": reply.audio_s,
            "heard_s": reply.heard_s,
            "first_token_ms": reply.first_token_ms,
            "first_audio_ms": reply.first_audio_ms,
            "interrupted": reply.interrupted,
            "end_reason": reply.reason,
        },
    }


def _stage(stage: events.StageSummary) -> dict[str, float]:
    return {
        "num_calls": stage.num_calls,
        "total_ms": stage.total_ms,
        "p50_ms": stage.p50_ms,
        "p95_ms": stage.p95_ms,
        "p99_ms": stage.p99_ms,
        "max_ms": stage.max_ms,
    }
