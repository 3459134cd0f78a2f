"""Turns a checkpoint's folder into a model that is ready to run, or says exactly why it cannot.

The order: check the files, choose the device (a GPU is tried in a child process first, because a broken driver can
kill the process that touches it), state the memory it takes, load, check that every weight found its place.
"""

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import torch

from engine.checkpoint import CheckpointError, CheckpointInfo, Problem, check_checkpoint, read_document
from engine.layout import CHAT_TEMPLATE
from engine.models.hf import OmniModel, load_pretrained, load_tokenizer, use_eager_experts

log = logging.getLogger(__name__)

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,  # for exact comparison
}
# What the rest of the machine needs to stay usable.
MAX_MEMORY_SHARE: Final = 0.95
PROBE_TIMEOUT_S: Final = 60.0
GIB: Final = 1 << 30

# Where the progress of a load stands when the weights begin and when they are in.
_CHECKED: Final = 0.05
_LOADED: Final = 0.90

# A kernel must really run: a driver may list a card that it cannot compute on.
_PROBE: Final = """
import json, torch
if not torch.cuda.is_available():
    raise SystemExit("no usable GPU: " + ("none found" if torch.version.cuda or torch.version.hip else "CPU build"))
a = torch.ones(64, 64, device="cuda")
assert float((a @ a).sum()) == 64.0**3, "wrong result of a matrix product"
free, total = torch.cuda.mem_get_info()
print(json.dumps({"name": torch.cuda.get_device_name(), "free_bytes": free, "total_bytes": total}))
"""


class DeviceError(Exception):
    """The device that was asked for cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class CudaProbe:
    """What a child process found out about the GPU; `reason` says what is wrong where it is not usable."""

    is_usable: bool
    reason: str
    name: str = ""
    free_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready: on its device, in eval mode, without gradients.

    `preprocessor` and `generation` are the checkpoint's own files; `device_reason` says why this device was taken.
    """

    model: OmniModel
    tokenizer: Any
    preprocessor: dict[str, Any]
    generation: dict[str, Any]
    device: torch.device
    dtype: torch.dtype
    info: CheckpointInfo
    device_reason: str


def load_model(
    folder: Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    on_progress: Callable[[float, str], None],
) -> LoadedModel:
    """Load the checkpoint in `folder`; never uses the network.

    `device` is auto, cpu, cuda or cuda:N; `dtype` is auto or one of `DTYPES`. `on_progress` gets a share from 0 to 1
    that never falls, and what is being done. Raises `CheckpointError`, `DeviceError` or `ValueError`.
    """
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"dtype is {dtype!r}; choose one of auto, {', '.join(DTYPES)}")
    on_progress(0.0, "Checking the files")
    info = check_checkpoint(folder)
    chosen, reason = choose_device(device)
    chosen_dtype = _choose_dtype(dtype, chosen, info)
    need_bytes = bytes_needed(info, chosen_dtype)
    _check_memory(info, chosen, chosen_dtype, need_bytes)

    doing = f"Loading {in_words(need_bytes)} of weights"
    on_progress(_CHECKED, doing)
    model, misfits = load_pretrained(
        folder, chosen_dtype, lambda share: on_progress(_CHECKED + share * (_LOADED - _CHECKED), doing)
    )
    _check_fit(model, misfits)
    on_progress(_LOADED, f"Moving the model to {chosen}")
    if chosen.type == "cpu":
        use_eager_experts(model)
    model.to(chosen).eval().requires_grad_(False)
    loaded = LoadedModel(
        model=model,
        tokenizer=_tokenizer(folder),
        preprocessor=read_document(folder / "preprocessor_config.json"),
        generation=read_document(folder / "generation_config.json"),
        device=chosen,
        dtype=chosen_dtype,
        info=info,
        device_reason=reason,
    )
    log.info("loaded %s: %d parameters, %s on %s (%s)", folder, info.num_parameters, chosen_dtype, chosen, reason)
    on_progress(1.0, "Ready")
    return loaded


def choose_device(wanted: str, probe: Callable[[], CudaProbe] | None = None) -> tuple[torch.device, str]:
    """Return the device that `wanted` means on this machine, and why; `probe` stands in for `probe_cuda`."""
    if wanted == "cpu":
        return torch.device("cpu"), "the CPU was asked for"
    if wanted not in ("auto", "cuda") and not (wanted.startswith("cuda:") and wanted[5:].isdecimal()):
        raise ValueError(f"device is {wanted!r}; choose one of auto, cpu, cuda, cuda:N")
    found = (probe or probe_cuda)()
    if found.is_usable and torch.cuda.is_available():
        device = torch.device("cuda" if wanted == "auto" else wanted)
        if (device.index or 0) >= torch.cuda.device_count():
            raise DeviceError(f"{wanted} was asked for, and there are {torch.cuda.device_count()} GPUs")
        return device, found.reason
    if wanted != "auto":
        raise DeviceError(f"{wanted} was asked for, and the GPU cannot be used: {found.reason}")
    return torch.device("cpu"), found.reason


def probe_cuda(command: Sequence[str] | None = None, timeout_s: float = PROBE_TIMEOUT_S) -> CudaProbe:
    """Compute something on the GPU in a child process, which may die or hang without harm.

    `command` stands in for the real probe: it prints the card's name and memory as JSON, or a reason on stderr.
    """
    if command is None:
        if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
            return CudaProbe(False, "this PyTorch is built for the CPU only")
        command = (sys.executable, "-c", _PROBE)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return CudaProbe(False, f"the GPU did not answer within {timeout_s:g} s")
    except OSError as error:
        return CudaProbe(False, f"the GPU could not be examined: {error}")
    if done.returncode < 0:
        return CudaProbe(False, f"the GPU's driver crashes (a first computation died by signal {-done.returncode})")
    if done.returncode > 0:
        lines = done.stderr.strip().splitlines()
        return CudaProbe(False, lines[-1] if lines else f"the GPU check ended with code {done.returncode}")
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    reason = f"{answer['name']}, {in_words(answer['total_bytes'])}"
    return CudaProbe(True, reason, answer["name"], answer["free_bytes"], answer["total_bytes"])


def bytes_needed(info: CheckpointInfo, dtype: torch.dtype) -> int:
    """Memory that the weights take in `dtype`."""
    return info.num_parameters * dtype.itemsize


def in_words(num_bytes: int) -> str:
    """Spell an amount of memory: `3.4 MiB`, `65.7 GiB`."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / (1 << 20):.1f} MiB"


def _choose_dtype(wanted: str, device: torch.device, info: CheckpointInfo) -> torch.dtype:
    if wanted != "auto":
        return DTYPES[wanted]
    if device.type == "cpu":
        return torch.float32
    stored = info.config.get("dtype") or info.config.get("torch_dtype")
    return DTYPES.get(str(stored), torch.bfloat16)


def _check_memory(info: CheckpointInfo, device: torch.device, dtype: torch.dtype, need_bytes: int) -> None:
    """Raise before anything is allocated; the weights pass through the computer's memory on their way to a GPU."""
    free = {"the computer": psutil.virtual_memory().available}
    if device.type == "cuda":
        free["the GPU"] = torch.cuda.mem_get_info(device)[0]
    name = str(dtype).removeprefix("torch.")
    problems = [
        Problem(
            str(info.folder),
            f"the weights take {in_words(need_bytes)} in {name}, and {place} has {in_words(bytes_free)} free",
            "close other programs, choose a smaller dtype or a smaller model",
        )
        for place, bytes_free in free.items()
        if need_bytes > MAX_MEMORY_SHARE * bytes_free
    ]
    if problems:
        raise CheckpointError(problems)


def _check_fit(model: OmniModel, misfits: Sequence[str]) -> None:
    problems = [Problem("weights", misfit, "fetch config.json and the weights again") for misfit in misfits]
    problems += [
        Problem("weights", f"{name} holds no values", "fetch the weights again")
        for name, parameter in model.named_parameters()
        if parameter.is_meta or parameter.numel() == 0
    ]
    if problems:
        raise CheckpointError(problems)


def _tokenizer(folder: Path) -> Any:
    """The tokenizer with its chat template, which lies in one of three files, or in none."""
    tokenizer = load_tokenizer(folder)
    if tokenizer.chat_template is None:
        template = read_document(folder / "chat_template.json").get("chat_template")
        tokenizer.chat_template = template or CHAT_TEMPLATE
    return tokenizer
