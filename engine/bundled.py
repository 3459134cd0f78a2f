"""The model that comes with Parley: the trained one in `assets/`, or an untrained stand-in where there is none.

The stand-in has the real topology at a size that two cores run in real time, and random weights. It is built once
into the user's cache folder, and whoever uses it is told that what it says is noise.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from engine.checkpoint import find_checkpoint
from engine.config import ModelConfig

BUNDLED: Final = Path(__file__).resolve().parent.parent / "assets" / "models" / "mini"
STAND_IN_NAME: Final = "untrained-1"  # the number changes when the builder does


def bundled_checkpoint(on_progress: Callable[[float, str], None]) -> Path:
    """The folder of the bundled model; the stand-in is built if it is not there yet."""
    if has_trained_model():
        return BUNDLED
    folder = _cache_folder() / STAND_IN_NAME
    if not (folder / "config.json").is_file():
        on_progress(0.0, "building an untrained stand-in model")
        _build(folder)
    return folder


def locate(model: ModelConfig, on_progress: Callable[[float, str], None]) -> Path:
    """The folder of the checkpoint that `model` names; the bundled one where it names none."""
    if model.name_or_path is None:
        return bundled_checkpoint(on_progress)
    return find_checkpoint(model.name_or_path, allow_hub=model.allow_hub)


def has_trained_model() -> bool:
    """Whether a trained model comes with this build."""
    return (BUNDLED / "config.json").is_file()


def is_untrained(folder: Path) -> bool:
    """Whether `folder` is the stand-in."""
    return folder.name == STAND_IN_NAME


def _cache_folder() -> Path:
    import platformdirs

    return Path(platformdirs.user_cache_path("parley"))


def _build(folder: Path) -> None:
    """Build beside `folder` and move it there whole: another Parley never sees half a checkpoint."""
    from engine.tiny import DESKTOP, build_tiny_checkpoint

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as temporary:
        built = build_tiny_checkpoint(Path(temporary) / "checkpoint", DESKTOP)
        try:
            os.replace(built, folder)
        except OSError:  # another process was first
            shutil.rmtree(built)
