"""The engine thread and the only door to it."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from engine import events
from engine.channels import Latest, Mailbox
from engine.clock import SPEAKER_RATE_HZ, STEP_MS
from engine.commands import Command
from engine.config import EngineConfig, SettingError
from engine.events import Event, Failed, Loading, Ready
from engine.io.media import MediaError, Picture
from engine.io.sources import Source
from engine.io.speaker import FileSpeaker

if TYPE_CHECKING:
    from engine.loader import LoadedModel
    from engine.pipeline import Pipeline

log = logging.getLogger(__name__)

COMMAND_CAPACITY, EVENT_CAPACITY = 256, 4096
RING_SLACK_MS = 1000


class Stopped(Exception):  # noqa: N818 - not an error: it carries a stop through the loader's callbacks
    """The engine was asked to stop while it was loading."""


class Engine:
    """Runs the pipeline on a thread of its own; every method here is safe from any thread."""

    def __init__(self, config: EngineConfig, source: Source) -> None:
        self._config = config
        self._source = source
        self._commands: Mailbox[Command] = Mailbox(COMMAND_CAPACITY)
        self._events: Mailbox[Event] = Mailbox(EVENT_CAPACITY)
        self._loaded: Mailbox[LoadedModel | Failed] = Mailbox(capacity=1)
        self._preview: Latest[Picture] = Latest()
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine")
        # A daemon: `import torch` cannot be broken off, and stopping must not wait for it.
        self._loader = threading.Thread(target=self._load, name="loader", daemon=True)

    def start(self) -> None:
        """Begin loading, then stepping."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Finish the piece of work under way, write what must be written, and join the thread."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                log.warning("the engine thread did not stop within %.1f s", timeout_s)

    def send(self, command: Command) -> None:
        """Queue `command` and wake the engine: it is obeyed before the next step. Never blocks."""
        self._commands.put(command)
        self._wake.set()

    def poll(self) -> Iterator[Event]:
        """Yield the events since the last poll, oldest first. For one reader."""
        return self._events.drain()

    def take_preview(self) -> Picture | None:
        """Newest camera picture, once, or None."""
        return self._preview.take()

    # -- on the engine thread

    def _run(self) -> None:
        try:
            pipeline = self._build()
            try:
                self._step_until_stopped(pipeline)
            finally:
                pipeline.close()
        except Stopped:
            log.info("stopped while loading")
        except (MediaError, SettingError) as error:
            self._events.put(Failed("engine", str(error), is_fault=False))
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: report, then stop
            log.exception("engine stopped")
            self._events.put(Failed("engine", f"{type(error).__name__}: {error}", is_fault=True))

    def _build(self) -> "Pipeline":
        self._loader.start()
        outcome = self._wait_for_loader()
        if isinstance(outcome, Failed):
            self._events.put(outcome)
            raise Stopped
        from engine.bundled import is_untrained
        from engine.metrics import Metrics
        from engine.pipeline import Pipeline
        from engine.stages import build_stages
        from engine.threads import use_threads

        use_threads(self._config.threads)
        stages = build_stages(outcome, self._config, Metrics())
        clock = time.perf_counter if self._config.is_realtime else None
        speech = self._config.speech
        capacity = (speech.max_ahead_ms + speech.decode_frames * STEP_MS + RING_SLACK_MS) * SPEAKER_RATE_HZ // 1000
        speaker = FileSpeaker(self._config.speech_file, capacity, clock)
        pipeline = Pipeline(
            stages, self._config, self._source, speaker, self._events.put, self._preview, time.perf_counter
        )
        self._events.put(
            Ready(
                model=str(outcome.info.folder),
                fingerprint=outcome.info.fingerprint,
                is_untrained=is_untrained(outcome.info.folder),
                device=str(outcome.device),
                dtype=str(outcome.dtype).removeprefix("torch."),
                why_device=outcome.device_reason,
                num_parameters=outcome.info.num_parameters,
                voice=stages.speech.voice if stages.speech else None,
                voices=tuple(sorted(stages.speech.speakers)) if stages.speech else (),
                window_ms=stages.window_ms,
                max_tokens=stages.max_tokens,
            )
        )
        return pipeline

    def _wait_for_loader(self) -> "LoadedModel | Failed":
        while not self._stop.is_set():
            self._wake.wait()
            self._wake.clear()
            for outcome in self._loaded.drain():
                return outcome
        raise Stopped

    def _step_until_stopped(self, pipeline: "Pipeline") -> None:
        """Step every 80 ms in real time, or without a pause where nobody listens; rest when nothing is left."""
        step_s = STEP_MS / 1000
        due = time.perf_counter() + step_s  # a step is due when its samples are in
        while not self._stop.is_set():
            for command in self._commands.drain():
                pipeline.obey(command)
            late_s = time.perf_counter() - due
            if pipeline.is_resting:
                self._wait(None)
                due = time.perf_counter()
            elif not self._config.is_realtime or late_s >= 0:
                pipeline.step(is_late=self._config.is_realtime and late_s > step_s)
                due = max(due + step_s, time.perf_counter() - 5 * step_s)
            else:
                self._wait(-late_s)

    def _wait(self, timeout_s: float | None) -> None:
        self._wake.wait(timeout_s)
        self._wake.clear()

    # -- on the loader thread

    def _load(self) -> None:
        outcome: LoadedModel | Failed
        try:
            outcome = self._load_model(self._report_progress)
        except Stopped:
            return
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: report, then end
            outcome = _load_failure(error)
        self._loaded.put(outcome)
        self._wake.set()

    def _load_model(self, on_progress: Callable[[float, str], None]) -> "LoadedModel":
        on_progress(0.0, "Starting the engine")
        from engine.bundled import locate
        from engine.loader import load_model

        model = self._config.model
        folder = locate(model, on_progress)
        return load_model(folder, device=model.device, dtype=model.dtype, on_progress=on_progress)

    def _report_progress(self, fraction: float, what: str) -> None:
        if self._stop.is_set():
            raise Stopped
        self._events.put(Loading(fraction, what))


def _load_failure(error: Exception) -> events.Failed:
    """A message for the user; a traceback in the log only where the error is not one we know how to explain."""
    from engine.checkpoint import CheckpointError
    from engine.loader import DeviceError

    if isinstance(error, CheckpointError | DeviceError | ValueError):
        return Failed("loader", str(error), is_fault=False)
    log.exception("loading failed")
    return Failed("loader", f"the model could not be loaded ({type(error).__name__}: {error})", is_fault=True)
