"""The doctor finds what is missing, says what to do, and never falls over."""

import importlib
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from engine import doctor
from engine.doctor import Check, examine


@pytest.fixture
def by_name() -> dict[str, Check]:
    return {check.name: check for check in examine(None)}


def test_a_line_says_ok_or_what_to_do() -> None:
    assert str(Check("thing", True, "1.0")) == "ok    thing: 1.0"
    assert str(Check("thing", False, "absent", "get it")) == "FIX   thing: absent; get it"


@pytest.mark.usefixtures("no_network")
def test_this_machine_can_run_the_engine(by_name: dict[str, Check]) -> None:
    for name in ("Python", "torch", "device", "numpy", "transformers", "soundfile", "soxr", "av", "psutil"):
        assert name == "psutil" or by_name[name].ok, by_name[name]
    assert "CPU threads" in by_name["torch"].detail
    assert "GiB free" in by_name["memory"].detail
    assert "GiB free" in by_name["disk"].detail
    assert {"sound devices", "cameras", "PySide6-Essentials"} <= by_name.keys()
    assert all(check.ok or check.remedy for check in by_name.values())


@pytest.mark.usefixtures("no_network")
def test_a_sound_model_is_described(tiny_folder: Path) -> None:
    check = examine(str(tiny_folder))[-1]
    assert check.ok
    assert "voices: " in check.detail


def test_each_fault_of_a_model_is_a_line(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "copy"))
    (folder / "vocab.json").unlink()
    (folder / "preprocessor_config.json").unlink()
    faults = [check for check in examine(str(folder)) if check.name == "model"]
    assert [check.ok for check in faults] == [False, False]
    assert {check.detail for check in faults} == {"vocab.json: missing", "preprocessor_config.json: missing"}


def test_missing_system_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without_libraries(name: str) -> ModuleType:
        if name == "sounddevice":
            raise OSError("PortAudio library not found")
        if name.startswith("PySide6"):
            raise ImportError("libGL.so.1: cannot open shared object file")
        return real(name)

    monkeypatch.setattr(importlib, "import_module", without_libraries)
    by_name = {check.name: check for check in examine(None)}
    assert not by_name["sounddevice"].ok
    assert "libportaudio2" in by_name["sounddevice"].remedy
    assert not by_name["PySide6-Essentials"].ok
    assert "libGL.so.1" in by_name["PySide6-Essentials"].detail


def test_another_minor_version_of_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TRANSFORMERS", "4.0")
    check = {check.name: check for check in examine(None)}["transformers"]
    assert not check.ok
    assert "Parley follows 4.0" in check.detail


def test_the_doctor_expects_the_pinned_transformers() -> None:
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert f'"transformers=={doctor.TRANSFORMERS}.*"' in text


@pytest.mark.parametrize(("names", "ok"), [([], False), (["tty", "videocard"], False)])
def test_a_machine_without_a_camera_is_told(names: list[str], ok: bool) -> None:
    assert doctor._cameras(lambda: names).ok == ok
