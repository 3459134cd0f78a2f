"""Lists microphones and speakers, or says in one sentence why there are none."""

from dataclasses import dataclass

NO_LIBRARY = (
    "The PortAudio library is missing, so no microphone or speaker can be used: install it "
    "(Debian and Ubuntu: apt install libportaudio2) and start again."
)


@dataclass(frozen=True, slots=True)
class AudioDevices:
    """Names as `name, host API`, which PortAudio takes back; `problem` is a sentence for the user, or None."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    problem: str | None


def list_audio_devices() -> AudioDevices:
    """Ask PortAudio what is connected; it answers from when it was started, so a device plugged in later is absent."""
    try:
        import sounddevice  # its import loads PortAudio, which may be missing
    except OSError:
        return AudioDevices((), (), NO_LIBRARY)
    try:
        hosts = [host["name"] for host in sounddevice.query_hostapis()]
        devices = list(sounddevice.query_devices())
    except sounddevice.PortAudioError as error:
        problem = f"The sound system does not answer ({error}): check that it is running and start again."
        return AudioDevices((), (), problem)
    inputs, outputs = (
        tuple(f"{device['name']}, {hosts[device['hostapi']]}" for device in devices if device[key] > 0)
        for key in ("max_input_channels", "max_output_channels")
    )
    return AudioDevices(inputs, outputs, _problem(inputs, outputs))


def _problem(inputs: tuple[str, ...], outputs: tuple[str, ...]) -> str | None:
    missing = [name for name, found in (("microphone", inputs), ("speaker", outputs)) if not found]
    if not missing:
        return None
    return (
        f"No {' and no '.join(missing)} was found: connect one, allow its use in the system settings and start again."
    )
