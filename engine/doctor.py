"""Examines the machine: what Parley needs, what of it is there, and what to do about the rest."""

import importlib
import importlib.metadata
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

from engine.bundled import BUNDLED, has_trained_model
from engine.checkpoint import CheckpointError, check_checkpoint, find_checkpoint

MIN_PYTHON: Final = (3, 11)
TRANSFORMERS: Final = "5.24"  # the minor version that engine/models/hf.py follows; pyproject.toml pins it
MIN_FREE_MEMORY_GIB: Final = 2.0
MIN_FREE_DISK_GIB: Final = 1.0
GIB: Final = 1 << 30

_SETUP: Final = "run ./packaging/setup.sh"

# The module that is imported, the package that brings it, and what to do where a system library is missing.
_LIBRARIES: Final = (
    ("numpy", "numpy", _SETUP),
    ("transformers", "transformers", _SETUP),
    ("tokenizers", "tokenizers", _SETUP),
    ("safetensors", "safetensors", _SETUP),
    ("PIL", "pillow", _SETUP),
    ("soundfile", "soundfile", _SETUP),
    ("soxr", "soxr", _SETUP),
    ("av", "av", _SETUP),
    ("cv2", "opencv-python-headless", _SETUP),
    ("sounddevice", "sounddevice", "install PortAudio (Debian and Ubuntu: apt install libportaudio2)"),
    ("PySide6.QtWidgets", "PySide6-Essentials", "install the GUI libraries (Debian: apt install libgl1 libegl1)"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the examination; `remedy` is empty where `ok`."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"ok    {self.name}: {self.detail}" if self.ok else f"FIX   {self.name}: {self.detail}; {self.remedy}"


def examine(model: str | None) -> tuple[Check, ...]:
    """Examine the machine, and the files of `model` (a folder, or the id of a model in the hub's local cache)."""
    return tuple(_checks(model))


def _checks(model: str | None) -> Iterator[Check]:
    yield _python()
    yield _torch()
    yield _device()
    yield _memory()
    yield _disk()
    for module, package, remedy in _LIBRARIES:
        yield _library(module, package, remedy)
    yield _sound_devices()
    yield _cameras()
    if model is not None:
        yield from _model(model)
    elif has_trained_model():
        yield from _model(str(BUNDLED))
    else:
        yield Check("model", True, "none comes with this build; an untrained stand-in is built at first start")


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    wanted = ".".join(map(str, MIN_PYTHON))
    return Check("Python", sys.version_info >= MIN_PYTHON, version, f"Parley needs Python {wanted} or newer")


def _import(module: str) -> ModuleType | str:
    """The module, or one line that says why it cannot be imported."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: sounddevice without PortAudio
        return " ".join(str(error).split()) or type(error).__name__


def _library(module: str, package: str, remedy: str) -> Check:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return Check(package, False, "not installed", _SETUP)
    found = _import(module)
    if isinstance(found, str):
        return Check(package, False, f"{version} is installed and cannot be imported: {found}", remedy)
    if package == "transformers" and not version.startswith(f"{TRANSFORMERS}."):
        return Check(package, False, f"{version}, and Parley follows {TRANSFORMERS}", _SETUP)
    return Check(package, True, version)


def _torch() -> Check:
    torch = _import("torch")
    if isinstance(torch, str):
        return Check("torch", False, torch, _SETUP)
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Check("torch", True, f"{torch.__version__}, {build}, {torch.get_num_threads()} CPU threads")


def _device() -> Check:
    try:
        from engine.loader import choose_device  # imports torch, which may be missing
    except (ImportError, OSError) as error:
        return Check("device", False, f"cannot be examined: {error}", _SETUP)
    device, reason = choose_device("auto")
    # No GPU is no fault: Parley runs on the CPU, and the reason tells the one who expected more.
    return Check("device", True, f"{device} ({reason})")


def _memory() -> Check:
    psutil = _import("psutil")
    if isinstance(psutil, str):
        return Check("memory", False, psutil, _SETUP)
    memory = psutil.virtual_memory()
    detail = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    return Check("memory", memory.available >= MIN_FREE_MEMORY_GIB * GIB, detail, "close other programs")


def _disk() -> Check:
    home = Path.home()
    usage = shutil.disk_usage(home if home.exists() else "/")
    detail = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    return Check("disk", usage.free >= MIN_FREE_DISK_GIB * GIB, detail, "make room for recordings")


def _sound_devices() -> Check:
    try:
        from engine.io.devices import list_audio_devices
    except (ImportError, OSError) as error:
        return Check("sound devices", False, str(error), _SETUP)
    found = list_audio_devices()
    if found.problem is not None:
        return Check("sound devices", False, "not complete", found.problem)
    return Check("sound devices", True, f"{len(found.inputs)} inputs, {len(found.outputs)} outputs")


def _cameras(devices: Callable[[], list[str]] | None = None) -> Check:
    if sys.platform != "linux":
        return Check("cameras", True, "asked for when the camera is opened")
    names = (devices or (lambda: sorted(os.listdir("/dev"))))()
    found = [f"/dev/{name}" for name in names if re.fullmatch(r"video\d+", name)]
    if not found:
        return Check("cameras", False, "none found", "connect one; without it Parley hears and does not see")
    barred = [path for path in found if not os.access(path, os.R_OK | os.W_OK)]
    if barred == found:
        return Check("cameras", False, f"no access to {', '.join(barred)}", "join the group video and log in again")
    return Check("cameras", True, ", ".join(found))


def _model(model: str) -> Iterator[Check]:
    """One line for a sound model, and one for each thing that is wrong with a broken one."""
    try:
        info = check_checkpoint(find_checkpoint(model, allow_hub=False))
    except CheckpointError as error:
        for problem in error.problems:
            yield Check("model", False, f"{problem.file}: {problem.what}", problem.remedy)
        return
    size = f"{info.num_parameters / 1e6:.1f} million parameters in {len(info.shards)} files"
    yield Check("model", True, f"{info.folder}: {size}, voices: {', '.join(info.speakers) or 'none'}")
