import sys
from types import SimpleNamespace

import pytest

from engine.io.devices import NO_LIBRARY, AudioDevices, list_audio_devices


class FakePortAudioError(Exception):
    """Stands in for the error of sounddevice, which cannot be imported without PortAudio."""


def device(name, host, num_inputs, num_outputs):
    return {"name": name, "hostapi": host, "max_input_channels": num_inputs, "max_output_channels": num_outputs}


@pytest.fixture
def connect(monkeypatch):
    def connect(*devices, error=None):
        def query_devices():
            if error is not None:
                raise error
            return devices

        fake = SimpleNamespace(
            PortAudioError=FakePortAudioError,
            query_hostapis=lambda: ({"name": "ALSA"}, {"name": "JACK"}),
            query_devices=query_devices,
        )
        monkeypatch.setitem(sys.modules, "sounddevice", fake)

    return connect


def test_inputs_and_outputs_are_named_with_their_host(connect):
    connect(device("USB Mic", 0, 1, 0), device("Speakers", 1, 0, 2), device("Headset", 0, 1, 2))
    assert list_audio_devices() == AudioDevices(
        ("USB Mic, ALSA", "Headset, ALSA"), ("Speakers, JACK", "Headset, ALSA"), None
    )


def test_no_device_at_all_is_a_sentence_and_no_error(connect):
    connect()
    found = list_audio_devices()
    assert (found.inputs, found.outputs) == ((), ())
    assert found.problem.startswith("No microphone and no speaker was found")


def test_a_missing_microphone_is_said_and_the_speakers_are_still_listed(connect):
    connect(device("Speakers", 0, 0, 2))
    found = list_audio_devices()
    assert found.outputs == ("Speakers, ALSA",)
    assert found.problem.startswith("No microphone was found")


def test_a_sound_system_that_fails_is_a_sentence(connect):
    connect(error=FakePortAudioError("host error"))
    found = list_audio_devices()
    assert (found.inputs, found.outputs) == ((), ())
    assert "host error" in found.problem


def test_a_missing_library_is_named_with_the_package_to_install(monkeypatch):
    class Refusing:
        def find_spec(self, name, path=None, target=None):
            if name == "sounddevice":
                raise OSError("PortAudio library not found")

    monkeypatch.delitem(sys.modules, "sounddevice", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Refusing(), *sys.meta_path])
    assert list_audio_devices() == AudioDevices((), (), NO_LIBRARY)
    assert "apt install libportaudio2" in NO_LIBRARY


def test_the_real_library_never_raises():
    found = list_audio_devices()
    assert found.problem or (found.inputs and found.outputs)
