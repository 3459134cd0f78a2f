import numpy as np
import pytest

from engine.io.resample import LOUDEST_SAMPLE, StreamResampler

RATES_HZ = (8000, 11025, 16000, 22050, 44100, 48000, 96000, 192000)


def tone(rate_hz, seconds=1.0, frequency_hz=1000.0):
    return np.sin(2 * np.pi * frequency_hz * np.arange(int(rate_hz * seconds)) / rate_hz).astype(np.float32)[:, None]


def run(resampler, block, sizes):
    pieces, start = [], 0
    for size in sizes:
        pieces.append(resampler.step(block[start : start + size]))
        start += size
    pieces.append(resampler.step(block[start:]))
    return np.concatenate([*pieces, resampler.flush()])


@pytest.mark.parametrize("rate_hz", RATES_HZ)
def test_a_sine_of_1_khz_stays_1_khz(rate_hz):
    out = run(StreamResampler(rate_hz, 1), tone(rate_hz), [])
    assert abs(len(out) - 16000) <= 1
    spectrum = np.abs(np.fft.rfft(out[:16000] * np.hanning(len(out[:16000])), 16000))
    assert np.argmax(spectrum) == 1000  # bins of 1 Hz
    middle = slice(1000, 15000)
    assert np.max(np.abs(out[middle] - tone(16000)[: len(out), 0][middle])) < 1e-3  # neither shifted nor louder


@pytest.mark.parametrize("rate_hz", RATES_HZ)
@pytest.mark.parametrize("num_channels", [1, 2, 6])
def test_splitting_the_input_does_not_change_the_output(rate_hz, num_channels):
    rng = np.random.default_rng(rate_hz + num_channels)
    block = rng.uniform(-1, 1, (rate_hz // 4, num_channels)).astype(np.float32)
    whole = run(StreamResampler(rate_hz, num_channels), block, [])
    splits = ([1] * 50, [0, 7, 0, 1280], list(rng.integers(0, 500, 40)), [rate_hz // 50] * 10)
    for sizes in splits:
        np.testing.assert_allclose(run(StreamResampler(rate_hz, num_channels), block, sizes), whole, rtol=0, atol=1e-6)


def test_later_input_never_changes_earlier_output():
    one, other = StreamResampler(48000, 1), StreamResampler(48000, 1)
    first = one.step(tone(48000))
    np.testing.assert_array_equal(first, other.step(tone(48000)))
    kept = first.copy()
    one.step(np.ones((4800, 1), np.float32))
    np.testing.assert_array_equal(first, kept)


def test_channels_are_mixed_by_their_mean():
    block = np.stack([np.full(10, 0.5, np.float32), np.full(10, -0.1, np.float32)], axis=1)
    np.testing.assert_allclose(StreamResampler(16000, 2).step(block), 0.2, atol=1e-7)


def test_equal_rates_pass_samples_through_in_a_copy():
    block = tone(16000)
    out = StreamResampler(16000, 1).step(block)
    np.testing.assert_array_equal(out, block[:, 0])
    assert not np.shares_memory(out, block)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("rate_hz", [16000, 48000])
def test_a_sample_that_is_no_number_becomes_silence_and_is_counted(bad, rate_hz):
    block = np.zeros((rate_hz // 10, 2), np.float32)
    block[5, 1] = bad
    resampler = StreamResampler(rate_hz, 2)
    out = run(resampler, block, [3, 10])
    assert resampler.num_bad_samples == 1
    np.testing.assert_array_equal(out, 0)


def test_a_block_of_nothing_but_nan_is_silence():
    resampler = StreamResampler(48000, 1)
    out = run(resampler, np.full((1280, 1), np.nan, np.float32), [])
    assert resampler.num_bad_samples == 1280
    np.testing.assert_array_equal(out, 0)


def test_samples_beyond_full_scale_are_kept():
    block = np.full((10, 1), 40000.0, np.float32)
    np.testing.assert_array_equal(StreamResampler(16000, 1).step(block), 40000.0)
    assert np.isfinite(run(StreamResampler(48000, 1), np.full((4800, 1), LOUDEST_SAMPLE, np.float32), [])).all()


def test_after_a_flush_a_new_stream_begins():
    resampler = StreamResampler(44100, 1)
    first = run(resampler, tone(44100), [500])
    np.testing.assert_array_equal(run(resampler, tone(44100), [500]), first)


@pytest.mark.parametrize("rate_hz", [8000, 16000, 48000])
def test_no_input_gives_no_output(rate_hz):
    resampler = StreamResampler(rate_hz, 1)
    assert resampler.step(np.empty((0, 1), np.float32)).size == 0
    assert resampler.flush().size == 0


def test_the_time_spent_is_measured():
    resampler = StreamResampler(48000, 1)
    resampler.step(tone(48000))
    assert 0 < resampler.busy_s < 5


@pytest.mark.parametrize(("arguments", "named"), [((0, 1), "in_rate_hz"), ((8000, 0), "num_channels")])
def test_a_wrong_stream_is_refused_by_name(arguments, named):
    with pytest.raises(ValueError, match=named):
        StreamResampler(*arguments)


@pytest.mark.parametrize("shape", [(10,), (10, 1)])
def test_a_block_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"pass \[T, 2\]"):
        StreamResampler(16000, 2).step(np.zeros(shape, np.float32))
