import struct
from fractions import Fraction

import av
import numpy as np
import pytest
import soundfile

from engine.io.audio_file import AudioReader, read_audio, to_float
from engine.io.media import MediaError

PCM, FLOAT, ALAW, MULAW, EXTENSIBLE = 1, 3, 6, 7, 0xFFFE
GUID_TAIL = bytes.fromhex("000000001000800000aa00389b71")


def sine(num_samples=16000, rate_hz=16000, frequency_hz=440.0):
    return 0.5 * np.sin(2 * np.pi * frequency_hz * np.arange(num_samples) / rate_hz)


def ulaw(samples):
    """The textbook G.711 coder, as an oracle for the file formats."""
    pcm = np.minimum(np.abs(np.round(samples * 32768)), 32635).astype(int) + 132
    exponent = np.log2(pcm).astype(int) - 7
    mantissa = (pcm >> (exponent + 3)) & 15
    return (~((samples < 0) * 128 | exponent << 4 | mantissa) & 255).astype(np.uint8).tobytes()


def alaw(samples):
    pcm = np.minimum(np.abs(np.round(samples * 32768)), 32767).astype(int) >> 4
    exponent = np.where(pcm >= 16, np.log2(np.maximum(pcm, 1)).astype(int) - 3, 1)
    coded = np.where(pcm < 16, pcm, 0)
    large = pcm >= 16
    coded = np.where(large, (exponent << 4) | ((pcm >> np.maximum(exponent - 1, 0)) & 15), coded)
    return ((coded | (samples >= 0) * 128) ^ 0x55).astype(np.uint8).tobytes()


def pcm(samples, bits):
    full = np.clip(np.round(samples * 2 ** (bits - 1)), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1).astype(np.int64)
    if bits == 8:
        return (full + 128).astype(np.uint8).tobytes()
    return full.astype("<i8").view(np.uint8).reshape(-1, 8)[:, : bits // 8].tobytes()


def chunk(name, body, size=None, pad=True):
    return name + struct.pack("<I", len(body) if size is None else size) + body + b"\0" * (len(body) % 2 and pad)


def wav(data, tag=PCM, bits=16, channels=1, rate_hz=16000, *, sub=None, size=None, riff=None, before=b"", after=b""):
    """A WAV file by hand; `size` and `riff` are what the header claims, true or not."""
    align = channels * bits // 8
    fmt = struct.pack("<HHIIHH", tag, channels, rate_hz, rate_hz * align, align, bits)
    if sub is not None:
        fmt += struct.pack("<HHIH", 22, bits, 0, sub) + GUID_TAIL
    body = b"WAVE" + chunk(b"fmt ", fmt) + before + chunk(b"data", data, size, pad=bool(after) or size is None) + after
    return b"RIFF" + struct.pack("<I", len(body) if riff is None else riff) + body


def put(tmp_path, content, name="clip.wav"):
    path = tmp_path / name
    path.write_bytes(content)
    return path


SINE16 = pcm(sine(), 16)
LIST = chunk(b"LIST", b"INFOISFT" + struct.pack("<I", 6) + b"Parley")
ODD_LIST = chunk(b"LIST", b"INFOx")

FORMATS = {
    "8-bit unsigned": (wav(pcm(sine(), 8), bits=8), 2**-7),
    "16-bit": (wav(SINE16), 2**-15),
    "24-bit": (wav(pcm(sine(), 24), bits=24), 2**-23),
    "32-bit integer": (wav(pcm(sine(), 32), bits=32), 2**-23),  # float32 keeps 24 of the 32 bits
    "32-bit float": (wav(sine().astype("<f4").tobytes(), FLOAT, 32), 2**-23),
    "64-bit float": (wav(sine().astype("<f8").tobytes(), FLOAT, 64), 2**-23),
    "extensible 16-bit": (wav(SINE16, EXTENSIBLE, 16, sub=PCM), 2**-15),
    "extensible 24-bit": (wav(pcm(sine(), 24), EXTENSIBLE, 24, sub=PCM), 2**-23),
    "extensible float": (wav(sine().astype("<f4").tobytes(), EXTENSIBLE, 32, sub=FLOAT), 2**-23),
    "A-law": (wav(alaw(sine()), ALAW, 8), 0.02),  # its steps near half scale are 1/64
    "mu-law": (wav(ulaw(sine()), MULAW, 8), 0.02),
    "LIST before the sound": (wav(SINE16, before=LIST), 2**-15),
    "odd chunk with its pad byte": (wav(SINE16, before=ODD_LIST), 2**-15),
    "LIST after the sound": (wav(SINE16, after=LIST), 2**-15),
    "RF64": (
        b"RF64" + struct.pack("<I", 0xFFFFFFFF) + b"WAVE"
        + chunk(b"ds64", struct.pack("<QQQI", len(SINE16) + 72, len(SINE16), 16000, 0))
        + wav(SINE16, size=0xFFFFFFFF)[12:], 2**-15,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_every_kind_of_wav_gives_the_same_sine(tmp_path, name):
    content, tolerance = FORMATS[name]
    clip = read_audio(put(tmp_path, content))
    assert (len(clip.samples), clip.source_rate_hz, clip.num_channels) == (16000, 16000, 1)
    assert clip.samples.dtype == np.float32
    assert np.max(np.abs(clip.samples - sine())) <= tolerance * 1.01
    assert clip.warnings == ()


def test_mono_at_44100_hz_is_resampled(tmp_path):
    clip = read_audio(put(tmp_path, wav(pcm(sine(44100, 44100), 16), rate_hz=44100)))
    assert clip.source_rate_hz == 44100
    assert len(clip.samples) == 16000
    assert np.max(np.abs(clip.samples - sine())[200:-200]) < 1e-3


def test_six_channels_at_48000_hz_are_mixed_and_resampled(tmp_path):
    block = np.stack([sine(48000, 48000)] * 6, axis=1)
    content = wav(pcm(block.ravel(), 24), EXTENSIBLE, 24, 6, 48000, sub=PCM)
    with AudioReader(put(tmp_path, content)) as reader:
        samples = reader.read(20000)
        assert (reader.source_rate_hz, reader.num_channels, reader.container) == (48000, 6, "wavex")
    assert len(samples) == 16000
    assert np.max(np.abs(samples - sine())[200:-200]) < 1e-3


BROKEN_LENGTHS = {
    "0": (wav(SINE16, size=0, riff=0), 16000),
    "0 with a true RIFF size": (wav(SINE16, size=0), 16000),
    "0xFFFFFFFF": (wav(SINE16, size=0xFFFFFFFF, riff=0xFFFFFFFF), 16000),
    "0x7FFFFFFF": (wav(SINE16, size=0x7FFFFFFF), 16000),
    "larger than the file": (wav(SINE16, size=1_000_000), 16000),
    "smaller than the file": (wav(SINE16, size=16000), 8000),
    "odd": (wav(SINE16, size=31999), 15999),
    "cut in the middle of a sample": (wav(SINE16)[:-1001], 15499),
    "0 and 24-bit with six channels, cut": (wav(pcm(np.repeat(sine(), 6), 24), PCM, 24, 6, size=0)[:-5], 15999),
    "0 and float": (wav(sine().astype("<f4").tobytes(), FLOAT, 32, size=0), 16000),
    "0 and A-law": (wav(alaw(sine()), ALAW, 8, size=0), 16000),
}


@pytest.mark.parametrize("name", BROKEN_LENGTHS)
def test_a_wrong_length_in_the_header_gives_the_real_samples_and_a_warning(tmp_path, name):
    content, num_samples = BROKEN_LENGTHS[name]
    clip = read_audio(put(tmp_path, content))
    assert len(clip.samples) == num_samples
    assert np.max(np.abs(clip.samples - sine()[:num_samples])) < (0.02 if "A-law" in name else 1e-4)
    assert clip.warnings


@pytest.mark.parametrize("content", [wav(b""), wav(b"", after=LIST), wav(b"", FLOAT, 32), wav(b"", rate_hz=48000)])
def test_a_wav_without_samples_is_no_error(tmp_path, content):
    clip = read_audio(put(tmp_path, content))
    assert len(clip.samples) == 0
    assert clip.warnings == ()


@pytest.mark.parametrize("rate_hz", [16000, 48000])
@pytest.mark.parametrize("num_samples", [0, 1, 159, 1279, 1280, 1281])
def test_short_clips_keep_their_length(tmp_path, num_samples, rate_hz):
    num_source = num_samples * rate_hz // 16000
    clip = read_audio(put(tmp_path, wav(pcm(sine(num_source, rate_hz), 16), rate_hz=rate_hz)))
    assert len(clip.samples) == num_samples


ALWAYS_BROKEN = {
    "empty": b"",
    "text": b"this is not a sound file, whatever its name says\n" * 50,
    "text with colour codes": b"\x1b[1mhello\x1b[0m\n" * 50,
    "four bytes": b"RIFF",
    "no chunks": wav(SINE16)[:12],
    "cut in fmt": wav(SINE16)[:30],
    "cut in the last field": wav(b"")[:43],
    "no channels": wav(SINE16, channels=0),
    "no rate": wav(SINE16, rate_hz=0),
    "unknown coding": wav(SINE16, tag=0x99),
    "a chunk that runs past the end": wav(SINE16, before=chunk(b"LIST", b"x" * 25, pad=False)),
    "zeros after the first twelve bytes": wav(b"")[:12] + b"\0" * 5000,
}


@pytest.mark.parametrize("suffix", [".wav", ".mp3", ".au", ".raw", ".gsm", ".txt", ".m4a", ""])
@pytest.mark.parametrize("name", ALWAYS_BROKEN)
def test_a_file_that_is_no_sound_is_one_clear_message_whatever_its_name(tmp_path, name, suffix, capfd):
    path = put(tmp_path, ALWAYS_BROKEN[name], f"clip{suffix}")
    with pytest.raises(MediaError) as caught:
        read_audio(path)
    message = str(caught.value)
    assert str(path) in message
    assert message.endswith(".")
    assert "Errno" not in message
    assert "0x" not in message
    assert capfd.readouterr() == ("", "")  # no decoder complains behind our back


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(MediaError, match="no such file"):
        AudioReader(tmp_path / "absent.wav")
    with pytest.raises(MediaError, match="folder"):
        AudioReader(str(tmp_path))


def test_a_device_is_refused_without_opening_it():
    with pytest.raises(MediaError, match="device or a pipe"):
        AudioReader("/dev/zero")


@pytest.mark.parametrize("rate_hz", [16000, 44100])
def test_nan_and_infinity_are_read_as_silence_and_reported(tmp_path, rate_hz):
    samples = np.zeros(rate_hz, "<f4")
    samples[[10, 20, 30]] = np.nan, np.inf, -np.inf
    with AudioReader(put(tmp_path, wav(samples.tobytes(), FLOAT, 32, rate_hz=rate_hz))) as reader:
        np.testing.assert_array_equal(reader.read(20000), 0)
        assert reader.num_bad_samples == 3
        assert reader.warnings == ("3 samples are not numbers: read as silence",)


def test_doubles_too_large_for_a_float_are_bad_samples_by_either_decoder(tmp_path):
    data = np.array([0.25, 1e300, -0.25], "<f8").tobytes()
    for size in (None, 0):
        clip = read_audio(put(tmp_path, wav(data, FLOAT, 64, size=size)))
        np.testing.assert_array_equal(clip.samples, [0.25, 0, -0.25])


def test_floats_beyond_full_scale_are_kept(tmp_path):
    data = np.array([1.5, -3.0, 0.5], "<f4")
    np.testing.assert_array_equal(read_audio(put(tmp_path, wav(data.tobytes(), FLOAT, 32))).samples, data)


def test_reading_in_pieces_equals_reading_at_once(tmp_path):
    path = put(tmp_path, wav(pcm(sine(100_000, 44100), 16), rate_hz=44100))
    whole = read_audio(path).samples
    with AudioReader(path) as reader:
        pieces = []
        for size in [1, 159, 1280, 1281, 20000] * 10:
            pieces.append(reader.read(size))
            assert len(pieces[-1]) == size or reader.read(1).size == 0
    np.testing.assert_array_equal(np.concatenate(pieces), whole)


def test_reading_is_lazy(tmp_path):
    path = put(tmp_path, wav(np.full(400_000, np.nan, "<f4").tobytes(), FLOAT, 32))
    with AudioReader(path) as reader:
        reader.read(10)
        assert reader.num_bad_samples < 400_000


def test_the_reader_refuses_wrong_calls(tmp_path):
    with AudioReader(put(tmp_path, wav(SINE16))) as reader, pytest.raises(ValueError, match="num_samples is 0"):
        reader.read(0)
    with pytest.raises(ValueError, match="closed"):
        reader.read(1)
    reader.close()


SNDFILE_FORMATS = [
    ("flac", "FLAC", "PCM_16", 48000), ("ogg", "OGG", "VORBIS", 44100), ("opus", "OGG", "OPUS", 48000),
    ("mp3", "MP3", "MPEG_LAYER_III", 44100), ("aiff", "AIFF", "PCM_24", 22050), ("au", "AU", "PCM_16", 8000),
    ("caf", "CAF", "PCM_16", 96000), ("w64", "W64", "PCM_16", 16000),
]  # fmt: skip


@pytest.mark.parametrize(("suffix", "container", "subtype", "rate_hz"), SNDFILE_FORMATS)
def test_the_formats_of_libsndfile_are_read(tmp_path, suffix, container, subtype, rate_hz):
    path = tmp_path / f"clip.{suffix}"
    soundfile.write(path, sine(3 * rate_hz, rate_hz), rate_hz, format=container, subtype=subtype)
    clip = read_audio(path)
    assert abs(len(clip.samples) - 48000) <= 1
    assert clip.source_rate_hz == rate_hz
    assert np.max(np.abs(clip.samples[:47000] - sine(47000))[500:]) < 0.03  # also where two blocks meet
    assert clip.warnings == ()


def write_sound(path, codec, rate_hz, samples=None):
    samples = sine(rate_hz, rate_hz) if samples is None else samples
    with av.open(path, "w") as out:
        stream = out.add_stream(codec, rate=rate_hz, layout="mono", bit_rate=128_000)
        frame = av.AudioFrame.from_ndarray(samples.astype(np.float32)[None], format="fltp", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = rate_hz, 0, Fraction(1, rate_hz)
        resampler = av.AudioResampler(stream.format.name, "mono", rate_hz, frame_size=2048 if codec == "wmav2" else 0)
        for piece in resampler.resample(frame):
            out.mux(stream.encode(piece))
        out.mux(stream.encode())
    return path


FFMPEG_FORMATS = [
    ("m4a", "aac", 16000), ("m4a", "aac", 44100), ("aac", "aac", 44100), ("mka", "aac", 48000), ("mp4", "aac", 48000),
    ("webm", "libopus", 48000), ("wma", "wmav2", 44100), ("mov", "pcm_s16le", 22050), ("mkv", "flac", 44100),
    ("ac3", "ac3", 48000), ("mkv", "pcm_u8", 8000), ("mkv", "pcm_s32le", 96000), ("mkv", "pcm_f64le", 16000),
]  # fmt: skip


@pytest.mark.parametrize(("suffix", "codec", "rate_hz"), FFMPEG_FORMATS)
def test_the_containers_of_ffmpeg_are_read(tmp_path, suffix, codec, rate_hz):
    clip = read_audio(write_sound(tmp_path / f"clip.{suffix}", codec, rate_hz))
    assert clip.source_rate_hz == rate_hz
    assert 15999 <= len(clip.samples) <= 16000 + 2 * 2048 * 16000 // rate_hz  # some formats keep the coder's padding
    longest = 4096 * 16000 // rate_hz if suffix in ("aac", "wma", "ac3") else 0  # these do not say what it is
    start = np.argmax(np.correlate(clip.samples[: 8000 + longest], sine(8000), "valid"))
    assert np.max(np.abs(clip.samples[start : start + 14000] - sine(14000))[2000:]) < 0.05
    assert clip.warnings == ()


def test_a_name_that_ffmpeg_would_take_for_a_pattern_or_protocol_is_only_a_name(tmp_path):
    for name in ("100%d.m4a", "concat:a|b.m4a"):
        write_sound(tmp_path / "plain.m4a", "aac", 16000).rename(tmp_path / name)
        assert len(read_audio(tmp_path / name).samples) >= 16000


def test_a_playlist_opens_no_other_file(tmp_path):
    write_sound(tmp_path / "secret.mka", "aac", 16000)
    path = put(tmp_path, f"ffconcat version 1.0\nfile {tmp_path}/secret.mka\n".encode(), "list.ffconcat")
    with pytest.raises(MediaError):
        read_audio(path)


def test_the_cut_end_of_a_compressed_file_is_a_warning(tmp_path):
    rate_hz = 48000
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 5 * rate_hz)
    flac = tmp_path / "clip.flac"
    soundfile.write(flac, noise, rate_hz)
    flac.write_bytes(flac.read_bytes()[: flac.stat().st_size // 2])
    mka = write_sound(tmp_path / "clip.mka", "flac", rate_hz, noise)
    mka.write_bytes(mka.read_bytes()[: mka.stat().st_size // 2])
    for path in (flac, mka):
        clip = read_audio(path)
        assert 1.5 * 16000 < len(clip.samples) < 3 * 16000
        assert clip.warnings


def test_damage_in_the_middle_becomes_silence_of_the_same_length(tmp_path):
    path = write_sound(tmp_path / "clip.mkv", "flac", 16000, sine(80000))
    with av.open(path) as container:
        packets = [(packet.pos, packet.size) for packet in container.demux() if packet.size]
    content = bytearray(path.read_bytes())
    position, size = packets[len(packets) // 2]
    content[position + 12 : position + 12 + size // 2] = b"\xff" * (size // 2)
    path.write_bytes(content)
    clip = read_audio(path)
    assert len(clip.samples) == 80000
    assert np.max(np.abs(clip.samples[60000:] - sine(80000)[60000:])) < 1e-3
    assert clip.warnings


def write_timed(path, starts_s):
    """A track of one FLAC block of 0.256 s per start."""
    with av.open(path, "w") as out:
        stream = out.add_stream("pcm_s16le", rate=16000, layout="mono")
        for start_s in starts_s:
            frame = av.AudioFrame.from_ndarray(np.full((1, 4096), 8192, np.int16), format="s16", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = 16000, round(start_s * 16000), Fraction(1, 16000)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return path


def test_a_gap_in_the_timestamps_is_filled_and_an_overlap_cut(tmp_path):
    clip = read_audio(write_timed(tmp_path / "gap.mkv", [0, 1.0]))
    assert len(clip.samples) == 16000 + 4096
    assert not clip.samples[4200:15900].any()
    np.testing.assert_array_equal(clip.samples[16000:], 0.25)
    assert len(read_audio(write_timed(tmp_path / "overlap.mkv", [0, 0.156])).samples) == 2496 + 4096


def test_a_jump_of_the_timestamps_by_hours_is_left_out_with_a_warning(tmp_path):
    clip = read_audio(write_timed(tmp_path / "jump.mkv", [0, 0.256, 9000, 9000.256]))
    assert len(clip.samples) == pytest.approx(4 * 4096, abs=32)
    assert any("jump" in warning for warning in clip.warnings)


@pytest.mark.parametrize("name", ["u8", "s16", "s32", "flt", "dbl", "u8p", "s16p", "s32p", "fltp", "dblp"])
def test_every_sample_format_of_ffmpeg_has_the_same_scale(name):
    source = av.AudioFrame.from_ndarray(np.array([[0.5, 0, -0.25], [0, 0, 1 / 128]], np.float32), "fltp", "stereo")
    source.sample_rate = 16000
    (frame,) = av.AudioResampler(name, "stereo", 16000).resample(source)
    np.testing.assert_allclose(to_float(frame), [[0.5, 0], [0, 0], [-0.25, 1 / 128]], atol=1e-4)
