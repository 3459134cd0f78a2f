"""Makes the sound and video that come with Parley, from nothing but a synthesiser: no recording of anybody.

Needs `flite` on the PATH (Debian: apt install flite). Run: python packaging/media/make_media.py
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import av
import numpy as np
import soundfile

MEDIA = Path(__file__).resolve().parent.parent.parent / "assets" / "media"
VOICE = "slt"
QUESTION = "Hello there. What can you do for me today?"
SCENE_QUESTION = "What do you see, and what colour is it?"
WIDTH, HEIGHT, FPS, SECONDS = 320, 240, 10, 4
RADIUS = 40
BACKGROUND, CIRCLE, SQUARE = (40, 60, 140), (220, 40, 40), (240, 210, 60)


def speak(text: str) -> tuple[np.ndarray, int]:
    """Speech of `text`, [T] float32, and its rate."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "speech.wav"
        subprocess.run(["flite", "-voice", VOICE, "-t", text, "-o", str(path)], check=True)
        samples, rate_hz = soundfile.read(path, dtype="float32")
    return samples, rate_hz


def picture(index: int) -> np.ndarray:
    """The scene at picture `index`: a red circle crosses a blue field, and becomes a yellow square half-way."""
    rgb = np.empty((HEIGHT, WIDTH, 3), dtype=np.uint8)
    rgb[:] = BACKGROUND
    rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH]
    x = 60 + index * (WIDTH - 120) // (FPS * SECONDS - 1)
    across, down = np.abs(columns - x), np.abs(rows - HEIGHT // 2)
    if index < FPS * SECONDS // 2:
        rgb[across**2 + down**2 <= RADIUS**2] = CIRCLE
    else:
        rgb[(across <= RADIUS) & (down <= RADIUS)] = SQUARE
    return rgb


def make_scene(path: Path) -> None:
    """Write the scene with a spoken question as its sound."""
    samples, rate_hz = speak(SCENE_QUESTION)
    with av.open(str(path), "w") as container:
        video = container.add_stream("libx264", rate=FPS)
        video.width, video.height, video.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        video.options = {"crf": "28"}
        sound = container.add_stream("aac", rate=rate_hz)
        sound.bit_rate = 48_000
        sound.layout = "mono"
        for index in range(FPS * SECONDS):
            for packet in video.encode(av.VideoFrame.from_ndarray(picture(index), format="rgb24")):
                container.mux(packet)
        padded = np.zeros(SECONDS * rate_hz, dtype=np.float32)
        padded[: len(samples)] = samples[: len(padded)]
        frame = av.AudioFrame.from_ndarray(padded[None], format="fltp", layout="mono")
        frame.rate = rate_hz
        frame.pts = 0
        for packet in sound.encode(frame):
            container.mux(packet)
        for stream in (video, sound):
            for packet in stream.encode(None):
                container.mux(packet)


def main() -> None:
    """Write all media."""
    MEDIA.mkdir(parents=True, exist_ok=True)
    samples, rate_hz = speak(QUESTION)
    soundfile.write(MEDIA / "question.wav", samples, rate_hz, subtype="PCM_16")
    make_scene(MEDIA / "scene.mp4")
    for path in sorted(MEDIA.iterdir()):
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB", file=sys.stderr)


if __name__ == "__main__":
    main()
