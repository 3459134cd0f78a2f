"""`parley talk`: a conversation from files, printed as it happens."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.logs import log_file
from app.report import print_stages, write_report
from app.transcript import Transcript
from engine import (
    Bypass,
    Engine,
    EngineConfig,
    InputConfig,
    MediaError,
    ModelConfig,
    ScriptSource,
    ScriptTurn,
    SpeechConfig,
)

BYPASS = {"auto": Bypass.AUTO, "always": Bypass.NEVER, "never": Bypass.ALWAYS}  # "speech always" = never bypass
MEDIA = Path(__file__).resolve().parent.parent / "assets" / "media"
DEMO = (
    ScriptTurn(mic=MEDIA / "question.wav"),
    ScriptTurn(camera=MEDIA / "scene.mp4", interrupts_after_s=1.0),
    ScriptTurn(text="What can you do?"),
)
DEMO_FRAMES = 50  # an untrained model never stops by itself
POLL_S = 0.02

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def run(options: argparse.Namespace) -> int:
    """Hold the conversation that the options describe."""
    try:
        turns = script(options.script or ())
    except ValueError as error:
        return _usage(str(error))
    if not turns:
        return _usage("nothing to say: give --mic FILE, --camera FILE or --text TEXT (see parley talk --help)")
    return converse(turns, options)


def run_demo(options: argparse.Namespace) -> int:
    """Hold the bundled conversation."""
    options.max_frames = min(options.max_frames, DEMO_FRAMES)
    options.max_tokens = min(options.max_tokens, DEMO_FRAMES)
    return converse(DEMO, options)


def script(given: Sequence[tuple[str, Any]]) -> list[ScriptTurn]:
    """Turns out of the options in their order: a camera joins the message beside it, an interruption the one before."""
    builder = _ScriptBuilder()
    for name, value in given:
        match name:
            case "camera":
                builder.show(value)
            case "interrupt_after":
                builder.interrupt(value)
            case "mic":
                builder.say(ScriptTurn(mic=value))
            case "text":
                if not value.strip():
                    raise ValueError("--text is empty: type something")
                if not value.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in value):
                    raise ValueError("--text is not UTF-8: check the terminal's encoding")
                builder.say(ScriptTurn(text=value))
    return builder.finish()


class _ScriptBuilder:
    """Puts options together to turns; a camera waits for the message after it unless it can join the one before."""

    def __init__(self) -> None:
        self._turns: list[ScriptTurn] = []
        self._camera: Path | None = None

    def say(self, turn: ScriptTurn) -> None:
        self._turns.append(replace(turn, camera=self._camera))
        self._camera = None

    def show(self, camera: Path) -> None:
        last = self._turns[-1] if self._turns else None
        if self._camera is None and last and last.camera is None and last.interrupts_after_s is None:
            self._turns[-1] = replace(self._turns[-1], camera=camera)
            return
        self.finish()
        self._camera = camera

    def interrupt(self, after_s: float) -> None:
        self.finish()
        if not self._turns:
            raise ValueError("--interrupt-after stands before any message: put it after the one it belongs to")
        self._turns[-1] = replace(self._turns[-1], interrupts_after_s=after_s)

    def finish(self) -> list[ScriptTurn]:
        if self._camera is not None:
            self._turns.append(ScriptTurn(camera=self._camera))
            self._camera = None
        return self._turns


def converse(turns: Sequence[ScriptTurn], options: argparse.Namespace) -> int:
    """Run the engine over `turns`; print the conversation, write what was asked for, return the exit code."""
    try:
        check_outputs(options)
        config = engine_config(options)
        source = ScriptSource(turns)
    except (MediaError, ValueError) as error:
        return _usage(str(error))
    engine = Engine(config, source)
    transcript = Transcript(sys.stdout)
    engine.start()
    try:
        _follow(engine, transcript)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        transcript.was_stopped = True
    finally:
        engine.stop()
    for event in engine.poll():
        transcript.take(event)
    return _conclude(transcript, options)


def _conclude(transcript: Transcript, options: argparse.Namespace) -> int:
    """Print the figures or the failure, write the report, and return the exit code."""
    if transcript.failure is not None:
        print(f"parley: {transcript.failure.message}", file=sys.stderr)
        if transcript.failure.is_fault:
            print(f"        the details are in {log_file()}", file=sys.stderr)
    if transcript.summary is not None and transcript.replies:
        print_stages(transcript.summary, sys.stdout)
    if options.json is not None and transcript.ready is not None:
        write_report(options.json, transcript)
    if transcript.was_stopped:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if transcript.failure else EXIT_OK


def check_outputs(options: argparse.Namespace) -> None:
    """Refuse a file that cannot be written now, not after the conversation."""
    for path in (options.out, options.json, options.trace):
        if path is not None and not os.access(path.parent, os.W_OK):
            raise ValueError(f"{path} cannot be written: {path.parent} is not a folder that you may write to")


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """The engine's configuration for the options; raises ValueError for values it does not take."""
    config = EngineConfig(
        model=ModelConfig(options.model, options.device, options.dtype, options.hub),
        speech=SpeechConfig(
            voice=options.voice,
            is_greedy=options.greedy,
            seed=options.seed,
            bypass=BYPASS[options.speech],
            max_text_tokens=options.max_tokens,
            max_frames=options.max_frames,
        ),
        input=InputConfig(window_ms=options.window_ms, video_fps=options.fps, exact_floor=not options.running_floor),
        is_realtime=options.realtime,
        trace=options.trace,
        speech_file=options.out,
        threads=options.threads,
    )
    return config if options.system is None else replace(config, system_prompt=options.system.strip())


def _follow(engine: Engine, transcript: Transcript) -> None:
    """Print events until the conversation is over."""
    while not transcript.is_over:
        for event in engine.poll():
            transcript.take(event)
        time.sleep(POLL_S)  # noqa: TID251 - a terminal has no event loop to wait in


def _usage(message: str) -> int:
    print(f"parley: {message}", file=sys.stderr)
    return EXIT_USAGE
