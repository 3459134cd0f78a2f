"""Parley's command line: what to do is read here, how is in the module of each command."""

import argparse
import io
import math
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app import bench, doctor, talk
from app.logs import start_log
from engine import WINDOWS_MS

DESCRIPTION = "Parley: live conversation with an omni-modal model that hears, sees and speaks."
TALK_HELP = """\
Hold a conversation from files, in the order they are given. Each --mic or --text is one message of yours; a --camera
goes with the --mic or --text it stands beside. Speech comes out while the reply is still being made.

examples:
  parley talk --mic question.wav --out reply.wav
  parley talk --mic question.wav --camera scene.mp4
  parley talk --camera clip-with-sound.mp4
  parley talk --text "Hello there" --mic question.wav --interrupt-after 1.5 --mic another.wav
"""


class _Append(argparse.Action):
    """Collects the options that make up the conversation in the order in which they stand."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        namespace.script = [*(namespace.script or ()), (self.dest, values)]


def start() -> int:
    """Run as a program: the log goes to its file."""
    start_log()
    return main()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in `arguments` (those of the process) and return the exit code."""
    # A reader that closes the pipe early (`parley talk | head`) ends the program instead of raising.
    if hasattr(signal, "SIGPIPE"):  # Windows has none
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a letter shows a mark, not a traceback
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    return int(options.run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="parley", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", metavar="command")
    _add_talk(commands)
    _add_demo(commands)
    _add_bench(commands)
    _add_doctor(commands)
    return parser


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--model", metavar="PATH", help="checkpoint folder, or a hub id with --hub (default: bundled)")
    group.add_argument("--hub", action="store_true", help="allow a download of the model; without it, no network")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to run (auto)")
    group.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float16", "float32", "float64"),
        default="auto",
        help="precision (auto: bfloat16 on a GPU, float32 on a CPU; float64 is for exact comparison)",
    )
    group.add_argument("--threads", type=_positive, metavar="N", help="CPU threads (default: one less than the cores)")


def _add_reply_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("reply")
    group.add_argument("--voice", metavar="NAME", help="voice, by the model's table (default: ethan)")
    group.add_argument("--system", metavar="TEXT", help="system prompt; an empty one is left out")
    group.add_argument("--greedy", action="store_true", help="always the most probable token: the same reply each time")
    group.add_argument("--seed", type=int, default=42, metavar="N", help="seed of all sampling (42)")
    group.add_argument(
        "--speech",
        choices=("auto", "always", "never"),
        default="auto",
        help="speak the reply? auto: typed messages are answered in text only",
    )
    group.add_argument("--max-tokens", type=_positive, default=1024, metavar="N", help="longest text, tokens (1024)")
    group.add_argument(
        "--max-frames", type=_positive, default=4095, metavar="N", help="longest speech, frames of 80 ms (4095)"
    )
    group.add_argument("--window-ms", type=int, choices=WINDOWS_MS, help="audio encoder window (the checkpoint's)")
    group.add_argument(
        "--running-floor",
        action="store_true",
        help="never encode a closed window again when a louder moment moves its floor: faster, not exact below -80 dB",
    )
    group.add_argument("--fps", type=float, default=2.0, help="pictures a second that the model sees (2)")


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--out", type=Path, metavar="WAV", help="write what was heard of the replies to this file")
    group.add_argument("--json", type=Path, metavar="FILE", help="write a report of turns and stage times")
    group.add_argument("--trace", type=Path, metavar="NPZ", help="write all that is needed to recompute the replies")


def _add_talk(commands: Any) -> None:
    parser = commands.add_parser(
        "talk",
        help="hold a conversation from sound, video and text files",
        description=TALK_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group("conversation")
    group.add_argument("--mic", action=_Append, type=Path, metavar="FILE", help="what you say: any sound file")
    group.add_argument("--camera", action=_Append, type=Path, metavar="FILE", help="what you show: a video or picture")
    group.add_argument("--text", action=_Append, metavar="TEXT", help="what you type")
    group.add_argument(
        "--interrupt-after",
        action=_Append,
        type=_seconds,
        dest="interrupt_after",
        metavar="S",
        help="speak over the reply to the message before, once S seconds of it were heard",
    )
    group.add_argument("--realtime", action="store_true", help="at the pace of speech, not as fast as possible")
    parser.set_defaults(script=None, run=talk.run)
    _add_reply_options(parser)
    _add_output_options(parser)
    _add_model_options(parser)


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="hold a conversation with the bundled model on bundled sound and video",
        description="Hold a short conversation on sound and video that come with Parley, and print it.",
    )
    parser.add_argument("--realtime", action="store_true", help="at the pace of speech, not as fast as possible")
    parser.set_defaults(script=None, run=talk.run_demo)
    _add_reply_options(parser)
    _add_output_options(parser)
    _add_model_options(parser)


def _add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure speed, as ratios within one run",
        description="Measure the engine: time to the first sample, cost of a codec frame, Code2Wav, growth of prefill.",
    )
    parser.add_argument(
        "--against", choices=("transformers",), help="also run stock transformers on the same weights and input"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--seconds", type=_seconds, default=4.0, help="length of the reply that is measured (4)")
    parser.set_defaults(run=bench.run)
    _add_model_options(parser)


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check this machine and say what to do",
        description="Check Python, libraries, device, memory, model files and audio devices; each line ok or a remedy.",
    )
    parser.add_argument("--model", metavar="PATH", help="checkpoint folder to check (default: bundled)")
    parser.set_defaults(run=doctor.run)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count: give a whole number from 1 up")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: give seconds above 0")
    return value


if __name__ == "__main__":
    sys.exit(start())
