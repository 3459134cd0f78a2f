"""`parley bench`: the engine's figures, as a table and as JSON."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from app.report import write_json
from engine import CheckpointError, MediaError, ModelConfig, bench

if TYPE_CHECKING:
    from engine import BenchReport

QUESTION = Path(__file__).resolve().parent.parent / "assets" / "media" / "question.wav"


def run(options: argparse.Namespace) -> int:
    """Measure and print; exit code 1 where the model cannot be loaded."""
    model = ModelConfig(options.model, options.device, options.dtype, options.hub)
    try:
        report = bench(
            model,
            QUESTION,
            reply_s=options.seconds,
            against_transformers=options.against is not None,
            threads=options.threads,
            on_progress=_show_progress,
        )
    except (CheckpointError, MediaError, ValueError) as error:
        print(f"parley: {error}", file=sys.stderr)
        return 1
    print(table(report))
    if options.json is not None:
        write_json(options.json, report.as_dict())
    return 0


def table(report: "BenchReport") -> str:
    """The report as text; a figure that was not measured is `n/a`."""
    rows = [
        ("", "Parley", "transformers", "ratio"),
        (
            "end of turn to first sample, ms",
            f"{report.first_audio_ms:.1f}",
            _number(report.stock_first_audio_ms, 1),
            _number(report.first_audio_ratio, 1, "x sooner"),
        ),
        ("end of turn to first token, ms", f"{report.first_token_ms:.1f}", "n/a", "n/a"),
        (
            "one codec frame (16 codes), ms",
            f"{report.frame_ms:.2f}",
            _number(report.stock_frame_ms, 2),
            _number(report.frame_cost_ratio, 1, "x cheaper"),
        ),
        (
            "  its sound by Code2Wav, ms",
            f"{report.code2wav_frame_ms:.2f}",
            _number(report.stock_code2wav_frame_ms, 2),
            _number(report.code2wav_ratio, 2, "x one full decode"),
        ),
        (
            "  both, ms",
            f"{report.frame_ms + report.code2wav_frame_ms:.2f}",
            _sum(report.stock_frame_ms, report.stock_code2wav_frame_ms),
            _number(report.sounding_frame_ratio, 1, "x cheaper"),
        ),
        (
            "tokens prefilled in turn 2",
            str(report.prefill_turn_2),
            "n/a",
            f"of a prompt of {report.prompt_turn_2}",
        ),
        (
            "tokens prefilled in turn 10",
            str(report.prefill_turn_10),
            "n/a",
            f"of a prompt of {report.prompt_turn_10}; {report.prefill_growth:.2f}x turn 2",
        ),
        (
            "the whole reply, s",
            f"{report.reply_s:.2f}",
            "n/a" if report.stock_first_audio_ms is None else f"{report.stock_first_audio_ms / 1000:.2f}",
            "n/a",
        ),
        (
            "  the same without the Talker, s",
            f"{report.text_only_reply_s:.2f}",
            "n/a",
            f"{report.bypass_saving:.0%} saved",
        ),
        ("real-time factor of the reply", f"{report.rtf:.2f}", "n/a", "n/a"),
    ]
    head = [
        f"model    {report.model} on {report.device}, {report.dtype}",
        f"machine  {report.cpu}; {report.threads} threads",
        f"input    {report.question_s:.2f} s of speech, a reply of {report.reply_frames} frames",
        "",
    ]
    return "\n".join([*head, *(f"{a:<34}{b:>10}{c:>14}  {d}" for a, b, c, d in rows)])


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "n/a" if value is None else f"{value:.{digits}f}{unit}"


def _sum(first: float | None, second: float | None) -> str:
    return "n/a" if first is None or second is None else f"{first + second:.2f}"


def _show_progress(fraction: float, what: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{fraction:4.0%} {what:<60.60}", end="", file=sys.stderr, flush=True)
