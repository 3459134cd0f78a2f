from fractions import Fraction

import av
import numpy as np
import pytest
import soundfile
from PIL import Image

from engine.clock import MIC_RATE_HZ, MIC_STEP, STEP_MS
from engine.io.media import MediaError, Picture
from engine.io.sources import PictureSampler, ScriptSource, ScriptTurn, TurnOpening, audible_peak

MILLISECOND = Fraction(1, 1000)
STEP_S = STEP_MS / 1000


def tone(num_samples):
    return (0.5 * np.sin(2 * np.pi * 440 * np.arange(num_samples) / MIC_RATE_HZ)).astype(np.float32)


def write_wav(path, num_samples):
    soundfile.write(path, tone(num_samples), MIC_RATE_HZ, subtype="FLOAT")
    return path


def write_video(path, times_ms, sound_s=0.0):
    """Pictures that grow brighter, at `times_ms`, with a tone of `sound_s` beside them."""
    with av.open(path, "w") as out:
        video = out.add_stream("libx264", rate=25, width=64, height=48)
        video.pix_fmt, video.codec_context.time_base = "yuv420p", MILLISECOND
        sound = out.add_stream("aac", rate=MIC_RATE_HZ, layout="mono") if sound_s else None
        for index, time_ms in enumerate(times_ms):
            rgb = np.full((48, 64, 3), 20 + 200 * index // len(times_ms), np.uint8)
            frame = av.VideoFrame.from_ndarray(rgb, format="rgb24")
            frame.pts, frame.time_base = time_ms, MILLISECOND
            out.mux(video.encode(frame))
        out.mux(video.encode())
        if sound is not None:
            frame = av.AudioFrame.from_ndarray(tone(int(sound_s * MIC_RATE_HZ))[None], format="fltp", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = MIC_RATE_HZ, 0, Fraction(1, MIC_RATE_HZ)
            out.mux(sound.encode(frame))
            out.mux(sound.encode())
    return path


def write_picture(path):
    Image.fromarray(np.full((48, 64, 3), 90, np.uint8)).save(path)
    return path


def steps(*turns):
    """All steps of a script."""
    source = ScriptSource(turns)
    try:
        found = []
        while (step := source.read()) is not None:
            found.append(step)
        assert source.read() is None
        return found
    finally:
        source.close()


def by_turn(found):
    """Steps of each turn; every turn opens with its first step, ends with its last, and neither happens elsewhere."""
    turns = []
    for step in found:
        if step.opening is not None:
            turns.append([])
        turns[-1].append(step)
    for turn in turns:
        assert [step.ends_turn for step in turn] == [False] * (len(turn) - 1) + [True]
        assert all(not step.text and not step.notices for step in turn[:-1])
    return turns


def num_pictures(turn):
    return sum(len(step.pictures) for step in turn)


@pytest.mark.parametrize("num_samples", [1, 1279, 1280, 1281, 5000, 16000])
def test_sound_comes_in_steps_and_only_the_last_is_shorter(tmp_path, num_samples):
    (turn,) = by_turn(steps(ScriptTurn(mic=write_wav(tmp_path / "a.wav", num_samples))))
    lengths = [len(step.samples) for step in turn]
    assert lengths == [MIC_STEP] * (num_samples // MIC_STEP) + [num_samples % MIC_STEP]
    np.testing.assert_allclose(np.concatenate([step.samples for step in turn]), tone(num_samples), atol=1e-6)
    assert turn[0].opening == TurnOpening(has_audio=True, has_video=False, is_still=False, needs_speech=True)
    assert num_pictures(turn) == 0


def test_turns_follow_each_other_in_their_order(tmp_path):
    first, third = write_wav(tmp_path / "1.wav", 2000), write_wav(tmp_path / "3.wav", 700)
    turns = by_turn(steps(ScriptTurn(mic=first), ScriptTurn(text="hello"), ScriptTurn(mic=third, text="and this")))
    assert [sum(len(step.samples) for step in turn) for turn in turns] == [2000, 0, 700]
    assert [turn[-1].text for turn in turns] == ["", "hello", "and this"]
    assert [len(turn) for turn in turns] == [2, 1, 1]


def test_typed_text_alone_is_one_step():
    ((step,),) = by_turn(steps(ScriptTurn(text="hello")))
    assert step.opening == TurnOpening(has_audio=False, has_video=False, is_still=False, needs_speech=False)
    assert step.text == "hello"
    assert len(step.samples) == 0


@pytest.mark.parametrize("sound_s", [0.5, 2.0])
def test_pictures_come_in_the_step_of_their_time(tmp_path, sound_s):
    times_ms = [0, 40, 79, 80, 300, 310, 960, 961]
    camera = write_video(tmp_path / "clip.mp4", times_ms)
    (turn,) = by_turn(steps(ScriptTurn(mic=write_wav(tmp_path / "a.wav", int(sound_s * MIC_RATE_HZ)), camera=camera)))
    found = [(number, picture.time_s) for number, step in enumerate(turn) for picture in step.pictures]
    assert [time_s for _, time_s in found] == pytest.approx([time_ms / 1000 for time_ms in times_ms], abs=1e-3)
    for number, time_s in found:
        assert number * STEP_S <= time_s < (number + 1) * STEP_S
    brightness = [picture.rgb.mean() for step in turn for picture in step.pictures]
    assert brightness == sorted(brightness)
    assert sum(len(step.samples) for step in turn) == int(sound_s * MIC_RATE_HZ)


def test_a_turn_lasts_as_long_as_its_longest_stream(tmp_path):
    camera = write_video(tmp_path / "clip.mp4", [0, 1000])
    long, short = write_wav(tmp_path / "long.wav", 32_000), write_wav(tmp_path / "short.wav", 3_200)
    turns = by_turn(steps(ScriptTurn(mic=long, camera=camera), ScriptTurn(mic=short, camera=camera)))
    assert [len(turn) for turn in turns] == [26, 13]  # 2 s of sound end in a 26th, empty step; 1.0 s is in the 13th
    assert [num_pictures(turn) for turn in turns] == [2, 2]
    assert [len(step.samples) for step in turns[1]] == [1280, 1280, 640] + [0] * 10


def test_a_clip_brings_its_own_sound(tmp_path):
    camera = write_video(tmp_path / "clip.mp4", [0, 500], sound_s=0.6)
    (turn,) = by_turn(steps(ScriptTurn(camera=camera)))
    assert turn[0].opening == TurnOpening(has_audio=True, has_video=True, is_still=False, needs_speech=False)
    assert turn[-1].notices == ()
    heard = np.concatenate([step.samples for step in turn])
    assert len(heard) / MIC_RATE_HZ == pytest.approx(0.6, abs=0.1)  # AAC pads to its blocks
    assert audible_peak(heard) > 0.3


def test_a_sound_file_takes_the_place_of_the_clips_own_sound(tmp_path):
    camera = write_video(tmp_path / "clip.mp4", [0, 500], sound_s=1.0)
    (turn,) = by_turn(steps(ScriptTurn(mic=write_wav(tmp_path / "a.wav", 4000), camera=camera)))
    assert sum(len(step.samples) for step in turn) == 4000
    assert turn[0].opening.needs_speech


def test_a_silent_clip_says_once_that_it_was_only_watched(tmp_path):
    camera = write_video(tmp_path / "silent.mp4", [0, 500])
    (turn,) = by_turn(steps(ScriptTurn(camera=camera)))
    assert turn[0].opening == TurnOpening(has_audio=False, has_video=True, is_still=False, needs_speech=False)
    (notice,) = turn[-1].notices
    assert "silent.mp4" in notice
    assert "no sound" in notice
    assert num_pictures(turn) == 2


def test_a_still_picture_needs_no_sound(tmp_path):
    ((step,),) = by_turn(steps(ScriptTurn(camera=write_picture(tmp_path / "a.png"), text="what is it?")))
    assert step.opening == TurnOpening(has_audio=False, has_video=True, is_still=True, needs_speech=False)
    assert (len(step.pictures), step.text, step.notices) == (1, "what is it?", ())


def test_what_was_wrong_with_a_file_is_said_at_its_end(tmp_path):
    samples = tone(3000)
    samples[100] = np.nan
    soundfile.write(tmp_path / "bad.wav", samples, MIC_RATE_HZ, subtype="FLOAT")
    (turn,) = by_turn(steps(ScriptTurn(mic=tmp_path / "bad.wav")))
    (notice,) = turn[-1].notices
    assert "not numbers" in notice


def test_a_missing_file_is_named_before_anything_starts(tmp_path):
    good = write_wav(tmp_path / "good.wav", 2000)
    for turn in (ScriptTurn(mic=tmp_path / "gone.wav"), ScriptTurn(camera=tmp_path / "gone.wav")):
        with pytest.raises(MediaError, match=r"gone\.wav: there is no such file"):
            ScriptSource([ScriptTurn(mic=good), turn])
    with pytest.raises(MediaError, match=r"gone\.wav"):
        ScriptSource([ScriptTurn(mic=tmp_path / "gone.wav", camera=write_picture(tmp_path / "a.png"))])


def test_the_first_file_that_cannot_be_read_is_the_one_named(tmp_path):
    (tmp_path / "empty.wav").touch()
    (tmp_path / "text.mp4").write_text("this is not a video")
    with pytest.raises(MediaError, match=r"empty\.wav"):
        ScriptSource([ScriptTurn(mic=tmp_path / "empty.wav"), ScriptTurn(camera=tmp_path / "text.mp4")])
    with pytest.raises(MediaError, match=r"text\.mp4"):
        ScriptSource([ScriptTurn(text="hi"), ScriptTurn(camera=tmp_path / "text.mp4")])


@pytest.mark.parametrize("text", [None, "", " \n"])
def test_a_turn_that_holds_nothing_is_refused(text):
    with pytest.raises(ValueError, match="needs a sound file, a camera file or a text"):
        ScriptTurn(text=text)


def test_an_interruption_belongs_to_the_turn_that_was_read_last():
    source = ScriptSource([ScriptTurn(text="a", interrupts_after_s=1.5), ScriptTurn(text="b")])
    assert source.interrupts_after_s is None
    source.read()
    assert source.interrupts_after_s == 1.5
    source.read()
    assert source.interrupts_after_s is None


def test_a_source_can_be_closed_in_the_middle_of_a_turn(tmp_path):
    source = ScriptSource(
        [ScriptTurn(mic=write_wav(tmp_path / "a.wav", 9000), camera=write_picture(tmp_path / "a.png"))]
    )
    source.read()
    source.close()
    source.close()
    (tmp_path / "a.wav").unlink()


def test_an_empty_script_has_no_steps():
    assert steps() == []


def picture(time_s):
    """Its one pixel says which one it is."""
    return Picture(np.full((1, 1, 3), round(100 * time_s) % 256, np.uint8), time_s)


def sampled(times_s, end_s, fps=2.0):
    """Times of the pictures shown at each tick."""
    sampler, shown = PictureSampler(fps), []
    for time_s in times_s:
        shown += [due.time_s for due in sampler.push(picture(time_s))]
    return shown + [due.time_s for due in sampler.advance(end_s)]


def expected_at_ticks(times_s, end_s, fps=2.0):
    """The newest picture at each tick; before the first there is only the first."""
    ticks = [tick / fps for tick in range(1000) if tick / fps < max(end_s, times_s[-1])]
    return [max((time_s for time_s in times_s if time_s <= tick), default=times_s[0]) for tick in ticks]


@pytest.mark.parametrize(
    ("times_s", "end_s"),
    [
        ([0.0], 0.1),
        ([0.0, 0.5, 1.0, 1.5], 2.0),  # exactly at the ticks
        ([0.04 * index for index in range(100)], 4.0),  # 25 a second
        ([0.0, 0.1, 0.11, 0.12, 1.7, 1.71, 2.6], 3.0),  # as they come
        ([1.7, 1.8, 2.3], 3.0),  # a camera that starts late
        ([0.0, 0.3], 5.0),  # and one that stops early
        ([0.499, 0.501], 0.6),
    ],
)
def test_ticks_are_uniform_and_show_the_newest_picture(times_s, end_s):
    assert sampled(times_s, end_s) == expected_at_ticks(times_s, end_s)


@pytest.mark.parametrize("fps", [0.5, 1.0, 2.0, 3.0, 7.0])
@pytest.mark.parametrize("seed", range(4))
def test_any_timestamps_give_one_picture_a_tick(fps, seed):
    times_s = np.cumsum(np.random.default_rng(seed).exponential(0.3, 40)).round(3).tolist()
    end_s = times_s[-1] + 2.0
    assert sampled(times_s, end_s, fps) == expected_at_ticks(times_s, end_s, fps)


def test_a_late_first_picture_stands_for_the_time_before_it():
    assert sampled([1.2], 2.0) == [1.2] * 4  # ticks 0, 0.5, 1.0 and 1.5


def test_the_last_picture_is_shown_again_until_the_end():
    assert sampled([0.0, 0.2], 2.1) == [0.0, 0.2, 0.2, 0.2, 0.2]


def test_time_without_a_picture_shows_nothing():
    assert list(PictureSampler(2.0).advance(10.0)) == []


def test_how_often_time_is_told_does_not_matter():
    often, shown = PictureSampler(3.0), []
    for hundredth in range(301):
        time_s = hundredth / 100
        shown += [due.time_s for due in often.advance(time_s)]
        if hundredth % 70 == 0:
            shown += [due.time_s for due in often.push(picture(time_s))]
    assert shown == sampled([0.0, 0.7, 1.4, 2.1, 2.8], 3.0, fps=3.0)


@pytest.mark.parametrize(("samples", "peak"), [([], 0.0), ([0.0, 0.0], 0.0), ([0.1, -0.4, 0.2], 0.4), ([-1.0], 1.0)])
def test_the_peak_is_the_largest_magnitude(samples, peak):
    assert audible_peak(np.array(samples, dtype=np.float32)) == pytest.approx(peak)
