import contextlib
import itertools
from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image, ImageOps

from engine.io.audio_file import read_audio
from engine.io.media import MediaError
from engine.io.video_file import VideoReader, to_rgb

RATE_HZ = 16000
MILLISECOND = Fraction(1, 1000)


def quarters(width=160, height=96):
    """Red, green, blue and white quarters: upright only one way."""
    rgb = np.empty((height, width, 3), np.uint8)
    rgb[: height // 2, : width // 2] = 220, 20, 20
    rgb[: height // 2, width // 2 :] = 20, 200, 20
    rgb[height // 2 :, : width // 2] = 20, 20, 220
    rgb[height // 2 :, width // 2 :] = 230, 230, 230
    return rgb


def shades(num_pictures):
    """Grey pictures, each brighter than the last."""
    return [np.full((96, 160, 3), 20 + 200 * index // max(num_pictures, 1), np.uint8) for index in range(num_pictures)]


def write_video(path, pictures, times_ms=None, *, sound_s=0.0, sound_start_s=0.0, codec="libx264", turn=0, **options):
    """Write `pictures` [H, W, 3] at `times_ms`, and a sound track where `sound_s` is not 0."""
    times_ms = [40 * index for index in range(len(pictures))] if times_ms is None else times_ms
    with av.open(path, "w", options=options) as out:
        video = sound = None
        if len(pictures):
            height, width = pictures[0].shape[:2]
            video = out.add_stream(codec, rate=25, width=width, height=height)
            # Odd sizes need a format without halved colour
            video.pix_fmt = "yuv420p" if width % 2 == 0 == height % 2 else "yuv444p"
            video.codec_context.time_base = MILLISECOND
            if codec == "png":
                video.pix_fmt = "rgb24"
            if turn:
                video.set_display_rotation(turn)
        if sound_s:
            sound = out.add_stream("aac", rate=RATE_HZ, layout="mono", bit_rate=64_000)
        for rgb, time_ms in zip(pictures, times_ms, strict=True):
            frame = av.VideoFrame.from_ndarray(rgb, format="rgb24")
            frame.pts, frame.time_base = time_ms, MILLISECOND
            out.mux(video.encode(frame))
        if video is not None:
            out.mux(video.encode())
        if sound is not None:
            tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(int(sound_s * RATE_HZ)) / RATE_HZ)
            frame = av.AudioFrame.from_ndarray(tone.astype(np.float32)[None], format="fltp", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = RATE_HZ, int(sound_start_s * RATE_HZ), Fraction(1, RATE_HZ)
            out.mux(sound.encode(frame))
            out.mux(sound.encode())
    return path


def read(path):
    """All pictures, and the reader, closed."""
    with VideoReader(path) as reader:
        return list(reader), reader


def assert_alike(one, other, tolerance=30):
    """Equal but for what coding does at edges."""
    assert one.shape == other.shape
    assert np.median(np.abs(one.astype(int) - other)) <= tolerance / 3
    for y, x in itertools.product((0.2, 0.8), repeat=2):
        spot = int(y * one.shape[0]), int(x * one.shape[1])
        assert np.max(np.abs(one[spot].astype(int) - other[spot])) <= tolerance


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "mov", "ts"])
def test_pictures_come_in_order_with_their_times(tmp_path, suffix):
    pictures, reader = read(write_video(tmp_path / f"clip.{suffix}", shades(50)))  # x264 reorders by default
    assert [picture.time_s for picture in pictures] == pytest.approx([0.04 * index for index in range(50)], abs=2e-3)
    brightness = [picture.rgb.mean() for picture in pictures]
    assert brightness == sorted(brightness)
    assert (reader.width, reader.height, reader.has_sound) == (160, 96, False)
    assert reader.duration_s == pytest.approx(2.0, abs=0.05)
    assert reader.warnings == ()


def test_a_variable_rate_keeps_its_times(tmp_path):
    times_ms = [0, 40, 80, 500, 510, 1700, 1740, 3000]
    for suffix in ("mp4", "mkv"):
        pictures, _ = read(write_video(tmp_path / f"clip.{suffix}", shades(8), times_ms))
        assert [picture.time_s for picture in pictures] == pytest.approx([time / 1000 for time in times_ms], abs=1e-3)


@pytest.mark.parametrize(("turn", "quarter_turns"), [(0, 0), (90, 1), (180, 2), (-90, 3), (270, 3)])
def test_a_turned_video_is_shown_upright(tmp_path, turn, quarter_turns):
    pictures, reader = read(write_video(tmp_path / "clip.mp4", [quarters()] * 3, turn=turn))
    upright = np.rot90(quarters(), quarter_turns)  # counterclockwise, as FFmpeg counts
    assert (reader.height, reader.width) == upright.shape[:2]
    for picture in pictures:
        assert_alike(picture.rgb, upright)
        assert picture.rgb.flags.c_contiguous


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [
        ((1, 0, 0, 1), lambda rgb: rgb),
        ((-1, 0, 0, 1), lambda rgb: rgb[:, ::-1]),
        ((1, 0, 0, -1), lambda rgb: rgb[::-1]),
        ((0, 1, 1, 0), lambda rgb: rgb.transpose(1, 0, 2)),
        ((0, 1, -1, 0), lambda rgb: np.rot90(rgb, -1)),  # what a phone held upright writes
        ((0, -1, 1, 0), np.rot90),
    ],
)
def test_mirrored_video_is_shown_as_the_camera_asked(tmp_path, matrix, expected):
    path = write_video(tmp_path / "clip.mp4", [quarters()])
    content = bytearray(path.read_bytes())
    start = content.index(b"tkhd") + 4 + 40
    fixed = [65536 * value for value in (*matrix[:2], 0, *matrix[2:], 0, 0, 0)] + [1 << 30]
    content[start : start + 36] = np.array([*fixed[:2], 0, *fixed[3:5], 0, 0, 0, 1 << 30], ">i4").tobytes()
    path.write_bytes(content)
    (picture,), _ = read(path)
    assert_alike(picture.rgb, expected(quarters()))


@pytest.mark.parametrize("num_pictures", [1, 2, 3, 5])
def test_a_few_pictures_are_a_video(tmp_path, num_pictures):
    pictures, _ = read(write_video(tmp_path / "clip.mp4", shades(num_pictures)))
    assert len(pictures) == num_pictures


@pytest.mark.parametrize(("width", "height"), [(161, 91), (27, 27), (160, 90), (1280, 20)])
def test_odd_sizes_are_not_sheared(tmp_path, width, height):
    (picture,), reader = read(write_video(tmp_path / "clip.mkv", [quarters(width, height)], codec="ffv1"))
    assert (reader.width, reader.height) == (width, height)
    assert_alike(picture.rgb, quarters(width, height))


PIXEL_FORMATS = ["gray", "gray16le", "yuv420p", "yuv422p10le", "yuva420p", "gbrp", "bgra", "rgb48le", "pal8", "monow"]


@pytest.mark.parametrize("name", PIXEL_FORMATS)
def test_every_pixel_format_becomes_rgb(name):
    frame = av.VideoFrame.from_ndarray(np.full((91, 161, 3), 255, np.uint8), format="rgb24")
    if name == "pal8":
        frame = av.VideoFrame.from_ndarray(np.zeros((91, 161), np.uint8), format="gray8").reformat(format="rgb8")
    else:
        frame = frame.reformat(format=name, threads=1)
    rgb = to_rgb(frame)
    assert (rgb.shape, rgb.dtype) == ((91, 161, 3), np.uint8)
    assert np.ptp(rgb) <= 2


def test_sound_shorter_or_longer_than_the_pictures_is_no_fault(tmp_path):
    for sound_s in (0.5, 3.0):
        path = write_video(tmp_path / "clip.mp4", shades(50), sound_s=sound_s)
        pictures, reader = read(path)
        clip = read_audio(path)
        assert (len(pictures), reader.has_sound, reader.sound_offset_s) == (50, True, 0.0)
        assert len(clip.samples) == pytest.approx(sound_s * RATE_HZ, abs=1024)
        assert reader.warnings == clip.warnings == ()


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_a_sound_track_that_starts_late_begins_with_silence(tmp_path, suffix):
    path = write_video(tmp_path / f"clip.{suffix}", shades(50), sound_s=1.0, sound_start_s=0.5)
    _, reader = read(path)
    samples = read_audio(path).samples
    assert reader.sound_offset_s == pytest.approx(0.5, abs=0.07)  # MP4 counts the coder's padding
    assert np.abs(samples[:7500]).max() < 0.02
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(8000) / RATE_HZ)
    shift = int(
        np.argmax(np.correlate(samples[7990:16010], tone, "valid"))
    )  # less than a period of the tone either way
    assert abs(shift - 10) <= 1
    assert np.abs(samples[8000:8100]).max() > 0.3


def test_pictures_that_start_late_keep_the_clock_of_the_sound(tmp_path):
    path = write_video(tmp_path / "clip.mkv", shades(10), range(500, 900, 40), sound_s=1.0)
    pictures, reader = read(path)
    assert pictures[0].time_s == pytest.approx(0.5, abs=0.03)
    assert reader.sound_offset_s == 0.0
    assert np.abs(read_audio(path).samples[1000:2000]).max() > 0.4


def test_a_clock_that_does_not_start_at_zero_is_brought_to_zero(tmp_path):
    path = write_video(tmp_path / "clip.mkv", shades(10), range(60_000, 60_400, 40), sound_s=1.0, sound_start_s=60.0)
    pictures, reader = read(path)
    assert pictures[0].time_s < 0.07
    assert reader.sound_offset_s < 0.07
    assert len(read_audio(path).samples) < 1.2 * RATE_HZ


def test_sound_alone_is_no_video_but_is_sound(tmp_path):
    path = write_video(tmp_path / "clip.mp4", [], sound_s=1.0)
    with pytest.raises(MediaError, match=r"clip\.mp4.*no picture track"):
        VideoReader(path)
    assert len(read_audio(path).samples) >= RATE_HZ


def test_a_silent_video_is_no_sound_but_is_a_video(tmp_path):
    path = write_video(tmp_path / "clip.mp4", shades(50))
    with pytest.raises(MediaError, match=r"clip\.mp4.*no sound track"):
        read_audio(path)
    assert len(read(path)[0]) == 50


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp", "gif", "tif"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_still_image_is_a_video_of_one_picture(tmp_path, suffix, mode):
    path = tmp_path / f"100%d.{suffix}"
    image = Image.fromarray(quarters(161, 91)).convert(mode)
    image.save(path)
    (picture,), reader = read(path)
    assert picture.time_s == 0.0
    assert (reader.duration_s, reader.has_sound, reader.warnings) == (None, False, ())
    assert_alike(picture.rgb, np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "1", "I;16"])
def test_an_image_with_transparency_palette_or_16_bits_is_read(tmp_path, mode):
    image = Image.new("L", (27, 27), 255).convert(mode) if mode != "I;16" else Image.new(mode, (27, 27), 65535)
    image.save(tmp_path / "clip.png")
    (picture,), _ = read(tmp_path / "clip.png")
    np.testing.assert_array_equal(picture.rgb, 255)


def test_the_smallest_image_is_read(tmp_path):
    Image.new("RGB", (1, 1), (9, 8, 7)).save(tmp_path / "clip.png")
    (picture,), _ = read(tmp_path / "clip.png")
    assert picture.rgb.tolist() == [[[9, 8, 7]]]


@pytest.mark.parametrize("orientation", [1, 2, 3, 4, 5, 6, 7, 8, 0, 9])
@pytest.mark.parametrize("name", ["clip.jpg", "clip.png"])
def test_a_photograph_is_turned_and_mirrored_as_its_exif_says(tmp_path, orientation, name):
    exif = Image.Exif()
    exif[0x112] = orientation
    Image.fromarray(quarters()).save(tmp_path / name, exif=exif, quality=95)
    (picture,), _ = read(tmp_path / name)
    assert_alike(picture.rgb, np.asarray(ImageOps.exif_transpose(Image.open(tmp_path / name))))


def test_a_photograph_whose_exif_says_nothing_of_its_turn_is_read(tmp_path):
    exif = Image.Exif()
    exif[0x10F] = "a camera"
    Image.fromarray(quarters()).save(tmp_path / "clip.jpg", exif=exif, quality=95)
    (picture,), _ = read(tmp_path / "clip.jpg")
    assert_alike(picture.rgb, quarters())


def test_a_cover_in_a_sound_file_is_no_video(tmp_path):
    path = tmp_path / "clip.mp3"
    Image.fromarray(quarters()).save(tmp_path / "cover.png")
    with av.open(path, "w") as out:
        sound = out.add_stream("libmp3lame", rate=RATE_HZ, layout="mono")
        cover = out.add_stream("png", width=160, height=96, pix_fmt="rgb24")
        cover.disposition = av.stream.Disposition.attached_pic
        out.mux(cover.encode(av.VideoFrame.from_ndarray(quarters(), format="rgb24")))
        frame = av.AudioFrame.from_ndarray(np.zeros((1, RATE_HZ), np.float32), format="fltp", layout="mono")
        frame.sample_rate, frame.time_base, frame.pts = RATE_HZ, Fraction(1, RATE_HZ), 0
        out.mux(sound.encode(frame))
        out.mux(sound.encode())
    with pytest.raises(MediaError, match="no picture track"):
        VideoReader(path)
    assert len(read_audio(path).samples) > 15000


BROKEN = {
    "empty": b"",
    "text": b"this is no video, whatever its name says\n" * 50,
    "coloured text": b"\x1b[1mhello\x1b[0m\n" * 50,
    "a header and nothing else": b"\0\0\0\x20ftypisom\0\0\x02\0isomiso2avc1mp41",
    "noise": np.random.default_rng(0).bytes(20_000),
}


@pytest.mark.parametrize("suffix", [".mp4", ".txt", ".png", ".jpg", ".raw", ".yuv", ""])
@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_no_video_is_one_clear_message_whatever_its_name(tmp_path, name, suffix, capfd):
    path = tmp_path / f"clip{suffix}"
    path.write_bytes(BROKEN[name])
    with pytest.raises(MediaError) as caught:
        VideoReader(path)
    assert str(path) in str(caught.value)
    assert "Errno" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(MediaError, match="no such file"):
        VideoReader(tmp_path / "absent.mp4")
    with pytest.raises(MediaError, match="folder"):
        VideoReader(str(tmp_path))


def cut(path, share):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    return path


def test_an_mp4_cut_before_its_index_is_refused(tmp_path):
    path = cut(write_video(tmp_path / "clip.mp4", shades(50)), 0.6)
    with pytest.raises(MediaError, match=r"clip\.mp4.*(damaged|cut off)"):
        VideoReader(path)


@pytest.mark.parametrize(("suffix", "options"), [("mp4", {"movflags": "faststart"}), ("mkv", {})])
def test_a_video_cut_short_gives_what_is_there_and_a_warning(tmp_path, suffix, options):
    noise = np.random.default_rng(0).integers(0, 255, (50, 96, 160, 3), np.uint8)
    pictures, reader = read(cut(write_video(tmp_path / f"clip.{suffix}", list(noise), **options), 0.6))
    assert 20 < len(pictures) < 40
    assert any("cut short" in warning for warning in reader.warnings)


def test_every_length_of_a_cut_file_is_pictures_or_one_message(tmp_path):
    content = write_video(tmp_path / "whole.mp4", shades(10), sound_s=0.4, movflags="faststart").read_bytes()
    path = tmp_path / "clip.mp4"
    for num_bytes in range(1, len(content), 101):
        path.write_bytes(content[:num_bytes])
        for reading in (read, read_audio):
            with contextlib.suppress(MediaError):
                reading(path)


def test_damage_in_the_middle_is_passed_over_with_a_warning(tmp_path):
    path = write_video(tmp_path / "clip.mov", [quarters()] * 50, codec="png")
    content = bytearray(path.read_bytes())
    with av.open(path) as container:
        packets = [(packet.pos, packet.size) for packet in container.demux() if packet.size]
    for position, size in packets[20:25]:
        content[position + 8 : position + size - 8] = b"\xff" * (size - 16)
    path.write_bytes(content)
    pictures, reader = read(path)
    assert len(pictures) == 45
    assert pictures[-1].time_s == pytest.approx(1.96, abs=2e-3)
    assert any("damaged" in warning for warning in reader.warnings)


def test_tracks_in_an_unknown_coding_are_one_clear_message(tmp_path):
    path = write_video(tmp_path / "clip.mp4", shades(5), sound_s=0.5)
    content = path.read_bytes()
    for name in (b"avc1", b"avcC", b"mp4a", b"esds"):
        content = content.replace(name, b"zzzz")
    path.write_bytes(content)
    for reading in (VideoReader, read_audio):
        with pytest.raises(MediaError, match=r"clip\.mp4: .*decoded"):
            reading(path)


def test_iterating_again_goes_on_and_a_closed_reader_has_no_more(tmp_path):
    with VideoReader(write_video(tmp_path / "clip.mp4", shades(5))) as reader:
        assert next(iter(reader)).time_s == 0.0
        assert next(iter(reader)).time_s == pytest.approx(0.04)
    assert list(reader) == []
    reader.close()
