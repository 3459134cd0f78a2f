"""Pure parts of a reply: when to decode, and when speech is no speech."""

import pytest

from engine.reply import LoopGuard, codec_sha256, frames_per_decode


@pytest.mark.parametrize(
    ("num_decoded", "backlog_ms", "expected"),
    [(0, None, 1), (0, 5000.0, 1), (1, None, 8), (1, 0.0, 1), (1, 200.0, 1), (1, 330.0, 2), (9, 800.0, 5), (9, 9e9, 8)],
)
def test_sound_that_is_urgent_is_decoded_frame_by_frame(num_decoded, backlog_ms, expected):
    assert frames_per_decode(num_decoded, backlog_ms, most=8) == expected


@pytest.mark.parametrize("period", [1, 7, 20, 25])
def test_speech_that_repeats_itself_is_noticed_after_six_seconds(period):
    guard = LoopGuard()
    noticed = [guard.is_loop(frame % period) for frame in range(200)]
    assert noticed.index(True) == 75 + period - 1


def test_speech_that_varies_is_no_loop():
    guard = LoopGuard()
    assert not any(guard.is_loop(frame * frame % 97) for frame in range(2000))


def test_a_loop_that_is_broken_in_time_is_none():
    guard = LoopGuard()
    codes = ([1, 2, 3, 4, 5] * 14 + [9]) * 10
    assert not any(guard.is_loop(code) for code in codes)


def test_the_hash_is_over_int32_in_c_order():
    import hashlib

    import numpy as np

    codes = np.arange(32, dtype=np.int32).reshape(2, 16)
    assert codec_sha256(np.asfortranarray(codes)) == hashlib.sha256(codes.tobytes()).hexdigest()
