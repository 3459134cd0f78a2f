import os

import numpy as np
import pytest
import soundfile

from engine.clock import SPEAKER_RATE_HZ
from engine.io.media import MediaError
from engine.io.speaker import FileSpeaker

CAPACITY = SPEAKER_RATE_HZ  # one second
STEP = 1 / 32768  # of a 16-bit file


class Clock:
    """Time that moves when told to. Whole 1/8000 s are exact, so that no sample is lost to rounding."""

    def __init__(self):
        self.now_s = 64.0

    def __call__(self):
        return self.now_s

    def advance(self, num_samples):
        self.now_s += num_samples / SPEAKER_RATE_HZ


@pytest.fixture
def clock():
    return Clock()


def ramp(start, num_samples):
    """Every sample of a second has its own 16-bit value."""
    return (np.arange(start, start + num_samples) % 30_000 * STEP).astype(np.float32)


def saved(path):
    samples, rate_hz = soundfile.read(path, dtype="float32")
    assert rate_hz == SPEAKER_RATE_HZ
    return samples


def about(num_samples):
    """Time is a float: one sample more or less is rounding."""
    return pytest.approx(num_samples, abs=1)


def test_without_a_clock_all_is_heard_at_once(tmp_path):
    with FileSpeaker(tmp_path / "out.wav", CAPACITY, None) as speaker:
        for start in range(0, 10 * 1920, 1920):
            assert speaker.room == CAPACITY
            speaker.write(ramp(start, 1920))
            assert speaker.num_heard() == start + 1920
        assert speaker.backlog_ms() is None
        assert speaker.cut() == 0
        assert speaker.num_underrun_samples == 0
    np.testing.assert_array_equal(saved(tmp_path / "out.wav"), ramp(0, 19200))


def test_the_playhead_follows_the_clock(clock):
    speaker = FileSpeaker(None, CAPACITY, clock)
    clock.advance(5000)  # before the first sample nothing plays
    assert speaker.num_heard() == 0
    speaker.write(ramp(0, 4800))
    assert speaker.num_heard() == 0
    for heard in (1200, 2400, 3600):
        clock.advance(1200)
        assert speaker.num_heard() == about(heard)
        assert speaker.backlog_ms() == pytest.approx((4800 - heard) / 24, abs=0.05)
        assert speaker.room == about(CAPACITY - 4800 + heard)
    clock.advance(5000)
    assert speaker.num_heard() == 4800
    assert speaker.backlog_ms() == 0.0


def test_samples_written_in_time_play_without_a_gap(clock):
    speaker = FileSpeaker(None, CAPACITY, clock)
    for block in range(50):
        speaker.write(ramp(1920 * block, 1920))
        clock.advance(1900)
    assert speaker.num_heard() == about(50 * 1900)
    assert speaker.num_underrun_samples == 0


def test_running_dry_is_counted_and_makes_the_rest_late(clock):
    speaker = FileSpeaker(None, CAPACITY, clock)
    speaker.write(ramp(0, 2400))
    clock.advance(3000)
    speaker.write(ramp(2400, 2400))  # 600 too late
    assert speaker.num_underrun_samples == about(600)
    assert speaker.num_heard() == 2400
    clock.advance(1000)
    assert speaker.num_heard() == about(3400)  # not 4000: what was missed is not skipped
    clock.advance(1400)
    assert speaker.num_heard() == about(4800)
    assert speaker.num_underrun_samples == about(600)


def test_cut_drops_what_waits_and_says_how_much(tmp_path, clock):
    with FileSpeaker(tmp_path / "out.wav", CAPACITY, clock) as speaker:
        speaker.write(ramp(0, 9600))
        clock.advance(2400)
        heard = speaker.num_heard()
        assert heard == about(2400)
        assert speaker.cut() == 9600 - heard
        assert speaker.backlog_ms() == 0.0
        clock.advance(9600)
        assert speaker.num_heard() == heard
        assert speaker.cut() == 0
    np.testing.assert_array_equal(saved(tmp_path / "out.wav"), ramp(0, heard))


def test_cut_counts_what_was_played_up_to_that_moment(clock):
    speaker = FileSpeaker(None, CAPACITY, clock)
    speaker.write(ramp(0, 9600))
    clock.advance(4800)  # nobody looked since
    assert speaker.cut() == about(4800)
    assert speaker.num_heard() == about(4800)


def test_a_new_reply_is_counted_from_zero_and_goes_on_in_the_file(tmp_path, clock):
    with FileSpeaker(tmp_path / "out.wav", CAPACITY, clock) as speaker:
        speaker.write(ramp(0, 4800))
        clock.advance(2400)
        speaker.cut()
        first = speaker.num_heard()
        clock.advance(50_000)  # the user speaks
        speaker.begin()
        assert speaker.num_heard() == 0
        clock.advance(50_000)  # the model thinks
        assert speaker.num_heard() == 0
        speaker.write(ramp(10_000, 2400))
        clock.advance(1200)
        assert speaker.num_heard() == about(1200)
        clock.advance(1300)
        assert speaker.num_heard() == 2400
    np.testing.assert_array_equal(saved(tmp_path / "out.wav"), np.concatenate((ramp(0, first), ramp(10_000, 2400))))


def test_the_room_after_a_cut_can_be_used(tmp_path, clock):
    """A reply that begins right after a barge-in may fill the whole buffer, as `room` says."""
    with FileSpeaker(tmp_path / "out.wav", CAPACITY, clock) as speaker:
        speaker.write(ramp(0, CAPACITY))
        speaker.cut()
        speaker.begin()
        assert speaker.room == CAPACITY
        speaker.write(ramp(0, CAPACITY))
        clock.advance(CAPACITY + 1)
        assert speaker.num_heard() == CAPACITY
    np.testing.assert_array_equal(saved(tmp_path / "out.wav"), ramp(0, CAPACITY))


def test_silence_after_a_cut_is_no_underrun(clock):
    speaker = FileSpeaker(None, CAPACITY, clock)
    speaker.write(ramp(0, 4800))
    clock.advance(2400)
    speaker.cut()
    clock.advance(24_000)
    assert speaker.num_heard() == about(2400)
    assert speaker.num_underrun_samples == 0


@pytest.mark.parametrize("seed", range(5))
def test_the_file_is_what_was_heard_whatever_happens(tmp_path, clock, seed):
    chance = np.random.default_rng(seed)
    written, heard_before, expected = 0, 0, []
    with FileSpeaker(tmp_path / "out.wav", CAPACITY, clock) as speaker:
        reply = []
        for _ in range(300):
            match int(chance.integers(10)):
                case 0:
                    heard = speaker.num_heard()
                    speaker.cut()
                    expected.extend(reply[:heard])
                    heard_before += heard
                    speaker.begin()
                    clock.advance(480)
                    reply = []
                case 1 | 2 | 3 | 4:
                    block = ramp(written, int(chance.integers(1, 2000)))
                    if len(block) <= speaker.room:
                        speaker.write(block)
                        reply.extend(block)
                        written += len(block)
                case _:
                    clock.advance(int(chance.integers(0, 2000)))
        heard = speaker.num_heard()
        expected.extend(reply[:heard])
    np.testing.assert_array_equal(saved(tmp_path / "out.wav"), np.array(expected, dtype=np.float32))
    assert len(expected) == heard_before + heard


def test_more_than_fits_is_a_mistake_of_the_caller(clock):
    speaker = FileSpeaker(None, 100, clock)
    with pytest.raises(AssertionError, match="101 samples written, 100 fit"):
        speaker.write(ramp(0, 101))


def test_close_may_be_called_twice(tmp_path):
    speaker = FileSpeaker(tmp_path / "out.wav", CAPACITY, None)
    speaker.write(ramp(0, 10))
    speaker.close()
    speaker.close()
    assert len(saved(tmp_path / "out.wav")) == 10


@pytest.mark.parametrize("where", ["missing/out.wav", ".", "file.txt/out.wav"])
def test_a_path_that_cannot_be_written_is_named(tmp_path, where):
    (tmp_path / "file.txt").write_text("not a folder")
    path = tmp_path / where
    with pytest.raises(MediaError) as problem:
        FileSpeaker(path, CAPACITY, None)
    assert str(path) in str(problem.value)
    assert "cannot be written" in str(problem.value)
    assert "choose another file" in str(problem.value)


@pytest.mark.skipif(os.name == "nt", reason="a name that Windows writes to anyway")
def test_any_name_gives_a_wav_file(tmp_path):
    with FileSpeaker(tmp_path / "speech.out", CAPACITY, None) as speaker:
        speaker.write(ramp(0, 10))
    assert soundfile.info(tmp_path / "speech.out").format == "WAV"
