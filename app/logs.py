"""The log file: what went wrong in detail goes there, and a sentence about it to the user."""

import logging
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final

import platformdirs

MAX_BYTES: Final = 1_000_000
NUM_OLD_FILES: Final = 3


def log_file() -> Path:
    """Where the log is; it holds no speech, no picture and no text of a conversation."""
    return Path(platformdirs.user_log_path("parley")) / "parley.log"


def start_log() -> None:
    """Send all logging of this process to the log file, and nothing to the terminal."""
    root = logging.getLogger()
    if any(isinstance(handler, RotatingFileHandler | logging.NullHandler) for handler in root.handlers):
        return
    try:
        log_file().parent.mkdir(parents=True, exist_ok=True)
        handler: logging.Handler = RotatingFileHandler(
            log_file(), maxBytes=MAX_BYTES, backupCount=NUM_OLD_FILES, encoding="utf-8", delay=True
        )
    except OSError:  # a home that cannot be written to must not keep anybody from talking
        handler = logging.NullHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)
    root.setLevel(logging.INFO)
