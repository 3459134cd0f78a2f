"""`parley talk` from the outside: what it prints, writes and returns, and what the trace is good for."""

import hashlib
import json

import numpy as np
import pytest
import soundfile

from app.__main__ import main
from tests.harness import load, noise
from tests.offline import generate

SHORT = ["--max-tokens", "12", "--max-frames", "10", "--greedy"]


@pytest.fixture
def question(tmp_path):
    path = tmp_path / "question.wav"
    soundfile.write(path, noise(1.3), 16000, subtype="FLOAT")
    return str(path)


def test_a_report_holds_what_is_documented(tiny_folder, question, tmp_path, capsys):
    report_file, wav = tmp_path / "report.json", tmp_path / "reply.wav"
    code = main(
        ["talk", "--mic", question, "--text", "hello there", "--model", str(tiny_folder)]
        + ["--json", str(report_file), "--out", str(wav), *SHORT]
    )
    assert code == 0
    report = json.loads(report_file.read_text())
    assert {"turns", "stages", "rtf", "model", "device"} <= set(report)
    spoken, typed = report["turns"]
    assert spoken["user"] == {"start_s": 0.0, "end_s": pytest.approx(1.3)}
    assert typed["user"]["text"] == "hello there"
    assert {
        "text", "token_ids", "num_codec_frames", "codec_sha256", "audio_s", "first_token_ms", "first_audio_ms",
        "interrupted",
    } <= set(spoken["reply"])  # fmt: skip
    assert spoken["reply"]["num_codec_frames"] == 10
    samples, rate_hz = soundfile.read(wav)
    assert rate_hz == 24000
    assert len(samples) == 10 * 1920 - 555
    assert np.abs(samples).max() > 0
    out = capsys.readouterr().out
    assert "thinker_prefill" in out
    assert "hello there" in out


def test_a_trace_is_enough_to_recompute_the_replies_with_stock_transformers(tiny_folder, question, tmp_path):
    trace_file, report_file = tmp_path / "trace.npz", tmp_path / "report.json"
    scene = make_scene(tmp_path / "scene.mp4")
    code = main(
        ["talk", "--mic", question, "--interrupt-after", "0.3", "--camera", scene, "--model", str(tiny_folder)]
        + ["--dtype", "float64", "--trace", str(trace_file), "--json", str(report_file), *SHORT]
    )
    assert code == 0
    trace = np.load(trace_file)
    replies = [turn["reply"] for turn in json.loads(report_file.read_text())["turns"]]
    model = load(tiny_folder).model
    assert replies[0]["interrupted"]
    for n, reply in enumerate(replies):
        expected = generate(
            model,
            trace[f"input_ids_{n}"],
            audios=series(trace, f"audio_{n}_"),
            pictures=[
                (str(trace[f"kind_{n}_{k}"]), pixels, trace[f"grid_{n}_{k}"])
                for k, pixels in enumerate(series(trace, f"pixels_{n}_"))
            ],
            seconds_per_grid=float(trace["seconds_per_grid"]),
            use_audio_in_video=bool(trace[f"use_audio_in_video_{n}"]),
            window_ms=int(trace["window_ms"]),
            max_tokens=12,
            max_frames=10,
        )
        text_ids, codes, samples = trace[f"text_ids_{n}"], trace[f"codes_{n}"], trace[f"samples_{n}"]
        assert text_ids.tolist() == expected.text_ids[: len(text_ids)]
        assert codes.dtype == np.int32
        np.testing.assert_array_equal(codes, expected.codes[: len(codes)])
        assert np.abs(samples - expected.samples[: len(samples)]).max() < 1e-6
        assert reply["codec_sha256"] == hashlib.sha256(codes.tobytes()).hexdigest()
    assert "pixels_1_0" in trace
    assert trace["use_audio_in_video_1"]


def series(trace, prefix: str) -> list[np.ndarray]:
    out = []
    while f"{prefix}{len(out)}" in trace:
        out.append(trace[f"{prefix}{len(out)}"])
    return out


def make_scene(path) -> str:
    """Two seconds of changing colour with sound."""
    import av

    with av.open(str(path), "w") as container:
        video = container.add_stream("mpeg4", rate=10)
        video.width, video.height, video.pix_fmt = 96, 64, "yuv420p"
        sound = container.add_stream("aac", rate=16000, layout="mono")
        for index in range(20):
            frame = av.VideoFrame.from_ndarray(np.full((64, 96, 3), 12 * index, np.uint8), format="rgb24")
            container.mux(video.encode(frame))
        frame = av.AudioFrame.from_ndarray(noise(2.0)[None], format="fltp", layout="mono")
        frame.rate, frame.pts = 16000, 0
        container.mux(sound.encode(frame))
        for stream in (video, sound):
            container.mux(stream.encode(None))
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--mic", "/nowhere/a.wav"], "/nowhere/a.wav"),
        (["--camera", "/nowhere/a.mp4"], "/nowhere/a.mp4"),
        ([], "--mic"),
        (["--text", "  "], "--text"),
        (["--interrupt-after", "1", "--text", "x"], "--interrupt-after"),
        (["--text", "x", "--fps", "0"], "video_fps"),
    ],
)
def test_bad_input_is_named_in_one_line(arguments, said, capsys):
    assert main(["talk", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_a_broken_model_is_described_and_the_exit_code_is_one(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert main(["talk", "--text", "hello", "--model", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "config.json" in error
    assert "Traceback" not in error


def test_files_that_cannot_be_written_are_named(tiny_folder, question, capsys):
    options = ["talk", "--mic", question, "--model", str(tiny_folder), *SHORT]
    for option in ("--out", "--trace", "--json"):
        assert main([*options, option, "/nowhere/file"]) == 2
        assert "/nowhere/file" in capsys.readouterr().err
