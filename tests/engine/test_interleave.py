import random
import types

import numpy as np
import pytest
import torch
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor

from engine.interleave import AudioRun, Cursor, GridRun, order

PER_SECOND = 13
RATES = (0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 7, 25, 29.97)


def processor_order(num_audio, num_grids, seconds_per_grid):
    """What the checkpoint's processor builds of the whole clip: ("a", token) and ("g", grid), one token a grid."""
    merge = 2
    owner = types.SimpleNamespace(
        video_processor=types.SimpleNamespace(merge_size=merge),
        audio_bos_token="",
        audio_eos_token="",
        audio_token="a",
        video_token="g",
    )
    written = Qwen3OmniMoeProcessor.replace_video_with_audio_token(
        owner,
        {
            "video_grid_thw": torch.tensor([[num_grids, merge, merge]]).numpy(),
            "video_second_per_grid": [seconds_per_grid],
        },
        0,
        {"num_audio_tokens": np.array([num_audio])},
        0,
        position_id_per_seconds=PER_SECOND,
    )
    counts = {"a": 0, "g": 0}
    found = []
    for kind in written:
        found.append((kind, counts[kind]))
        counts[kind] += 1
    return found


def flat(runs):
    """The same form of what `order` returned."""
    found = []
    for run in runs:
        match run:
            case AudioRun(start, end):
                assert end > start, "an empty run"
                found += [("a", token) for token in range(start, end)]
            case GridRun(index):
                found.append(("g", index))
    return found


def at_once(num_audio, num_grids, seconds_per_grid):
    runs, cursor = order(Cursor(), num_audio, num_grids, seconds_per_grid, PER_SECOND, is_complete=True)
    assert cursor == Cursor(num_audio, num_grids)
    return flat(runs)


@pytest.mark.parametrize("fps", RATES)
@pytest.mark.parametrize("num_audio", [0, 1, 13, 14, 130, 400])
@pytest.mark.parametrize("num_grids", [0, 1, 2, 12, 60])
def test_the_order_is_the_processors(fps, num_audio, num_grids):
    seconds_per_grid = 2 / fps
    expected = processor_order(num_audio, num_grids, seconds_per_grid)
    assert at_once(num_audio, num_grids, seconds_per_grid) == expected


def test_a_grid_goes_before_the_audio_token_of_its_moment():
    runs, _ = order(Cursor(), 30, 3, 1.0, PER_SECOND, is_complete=True)
    assert list(runs) == [GridRun(0), AudioRun(0, 13), GridRun(1), AudioRun(13, 26), GridRun(2), AudioRun(26, 30)]
    runs, _ = order(Cursor(), 30, 3, 12.5 / PER_SECOND, PER_SECOND, is_complete=True)
    assert list(runs) == [GridRun(0), AudioRun(0, 13), GridRun(1), AudioRun(13, 25), GridRun(2), AudioRun(25, 30)]


def test_pictures_that_outlast_the_sound_follow_it_and_the_reverse():
    runs, _ = order(Cursor(), 5, 3, 1.0, PER_SECOND, is_complete=True)
    assert list(runs) == [GridRun(0), AudioRun(0, 5), GridRun(1), GridRun(2)]
    runs, _ = order(Cursor(), 40, 1, 1.0, PER_SECOND, is_complete=True)
    assert list(runs) == [GridRun(0), AudioRun(0, 40)]


def test_an_open_stream_waits_for_the_grid_that_belongs_before():
    runs, cursor = order(Cursor(), 20, 0, 1.0, PER_SECOND, is_complete=False)
    assert list(runs) == []  # grid 0 belongs before audio token 0
    runs, cursor = order(cursor, 20, 1, 1.0, PER_SECOND, is_complete=False)
    assert list(runs) == [GridRun(0), AudioRun(0, 13)]
    runs, cursor = order(cursor, 26, 1, 1.0, PER_SECOND, is_complete=False)
    assert list(runs) == []
    runs, cursor = order(cursor, 26, 1, 1.0, PER_SECOND, is_complete=True)
    assert list(runs) == [AudioRun(13, 26)]
    assert cursor == Cursor(26, 1)


def test_an_open_stream_does_not_let_a_picture_overtake_the_sound_before_it():
    runs, cursor = order(Cursor(), 5, 2, 1.0, PER_SECOND, is_complete=False)
    assert list(runs) == [GridRun(0), AudioRun(0, 5)]  # audio tokens 5 to 12 belong before grid 1
    runs, _ = order(cursor, 14, 2, 1.0, PER_SECOND, is_complete=False)
    assert list(runs) == [AudioRun(5, 13), GridRun(1), AudioRun(13, 14)]


def arrivals(chance, num_audio, num_grids):
    """Growing counts (audio, grids): one stream or both move on at random, at random speeds."""
    audio = grids = 0
    speeds = chance.choice([(9, 1), (40, 1), (2, 3), (1, 9)])
    while (audio, grids) != (num_audio, num_grids):
        audio = min(num_audio, audio + chance.randint(0, speeds[0]))
        grids = min(num_grids, grids + chance.randint(0, speeds[1]))
        yield audio, grids


@pytest.mark.parametrize("seed", range(60))
def test_the_order_does_not_depend_on_when_things_arrive(seed):
    chance = random.Random(seed)
    spg = 2 / chance.choice(RATES)
    num_audio, num_grids = chance.randint(0, 200), chance.randint(0, 20)
    cursor, emitted = Cursor(), []
    for audio, grids in arrivals(chance, num_audio, num_grids):
        before = cursor
        runs, cursor = order(cursor, audio, grids, spg, PER_SECOND, is_complete=False)
        new = flat(runs)
        assert cursor.num_audio <= audio
        assert cursor.num_grids <= grids
        assert cursor.num_audio - before.num_audio == sum(kind == "a" for kind, _ in new)
        assert cursor.num_grids - before.num_grids == sum(kind == "g" for kind, _ in new)
        emitted += new
        assert_no_sound_before_its_picture(emitted, spg)
    runs, cursor = order(cursor, num_audio, num_grids, spg, PER_SECOND, is_complete=True)
    emitted += flat(runs)
    assert cursor == Cursor(num_audio, num_grids)
    assert emitted == at_once(num_audio, num_grids, spg)


def assert_no_sound_before_its_picture(emitted, spg):
    """While more may come: audio token a stands behind every grid k with k * spg * PER_SECOND <= a."""
    num_grids = 0
    for kind, number in emitted:
        if kind == "g":
            num_grids += 1
        else:
            assert num_grids * spg * PER_SECOND > number, f"audio token {number} went before grid {num_grids}"


@pytest.mark.parametrize("seed", range(10))
def test_all_that_can_be_ordered_is_ordered_at_once(seed):
    """Waiting longer than needed would cost latency: a second call without news has nothing to add."""
    chance = random.Random(seed)
    cursor, spg = Cursor(), chance.choice((0.5, 0.6, 1.0))
    for audio, grids in arrivals(chance, 150, 12):
        runs, cursor = order(cursor, audio, grids, spg, PER_SECOND, is_complete=False)
        assert order(cursor, audio, grids, spg, PER_SECOND, is_complete=False) == ([], cursor)
        waits_for_grid = cursor.num_grids == grids and cursor.num_audio >= cursor.num_grids * spg * PER_SECOND
        assert waits_for_grid or cursor.num_audio == audio
