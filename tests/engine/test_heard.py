import random

import pytest

from engine.heard import TYPICAL_CHARACTERS_PER_S, SpeechRate, num_heard_tokens

UNKNOWN = SpeechRate()


@pytest.mark.parametrize(
    ("lengths", "heard_s", "spoken_s", "expected"),
    [
        ([], 1.0, 1.0, 0),  # no text
        ([0, 0], 1.0, 1.0, 0),  # only tokens without a character
        ([4, 4], 0.0, 8.0, 0),  # nothing was heard
        ([4, 4], -0.1, 8.0, 0),
        ([4, 4], 8.0, 8.0, 2),  # all
        ([4, 4], 9.0, 8.0, 2),  # more than all: the speaker's own latency
        ([4, 4], 4.0, 8.0, 1),  # exactly one
        ([4, 4], 1.9, 8.0, 0),  # a token counts once half of it was heard
        ([4, 4], 2.0, 8.0, 1),
        ([4, 4], 5.9, 8.0, 1),
        ([4, 4], 6.1, 8.0, 2),
        ([1, 9], 2.0, 10.0, 1),  # by characters, not by tokens
        ([9, 1], 2.0, 10.0, 0),
        ([4, 0, 4], 4.0, 8.0, 2),  # what adds no character goes with the one before
    ],
)
def test_tokens_heard_of_speech_whose_length_is_known(lengths, heard_s, spoken_s, expected):
    assert num_heard_tokens(lengths, heard_s, spoken_s, UNKNOWN) == expected


@pytest.mark.parametrize(
    ("rate", "heard_s", "expected"),
    [
        (UNKNOWN, 1.0, 2),  # 14 characters
        (UNKNOWN, 0.2, 0),
        (UNKNOWN, 60.0, 10),
        (SpeechRate(characters=70, seconds=2.0), 1.0, 5),  # a voice twice and a half as fast
        (SpeechRate(characters=7, seconds=1.0), 1.0, 1),
    ],
)
def test_tokens_heard_of_speech_that_is_still_made_follow_the_rate(rate, heard_s, expected):
    assert num_heard_tokens([7] * 10, heard_s, None, rate) == expected


def test_the_rate_does_not_matter_once_the_length_is_known():
    fast = SpeechRate(characters=1000, seconds=1.0)
    assert num_heard_tokens([5] * 10, 2.0, 10.0, fast) == num_heard_tokens([5] * 10, 2.0, 10.0, UNKNOWN) == 2


def test_a_rate_is_typical_before_and_measured_after_the_first_reply():
    assert UNKNOWN.characters_per_s == TYPICAL_CHARACTERS_PER_S
    once = UNKNOWN.after(characters=20, seconds=2.0)
    assert once.characters_per_s == 10.0
    assert once.after(characters=40, seconds=1.0).characters_per_s == 20.0  # all seconds count alike


WORDS = ["Good", "morning,", "what", "can", "I", "do", "for", "you", "today?"] + ["Tell", "me"]


def word_lengths():
    return [len(word) + 1 for word in WORDS[:10]]


@pytest.mark.parametrize("is_length_known", [True, False])
def test_an_answer_cut_at_its_fourth_word_ends_there(is_length_known):
    """L18: ten words with known times, a voice that speaks at 14 characters a second."""
    lengths = word_lengths()
    assert len(lengths) == 10
    ends_s = [sum(lengths[: index + 1]) / TYPICAL_CHARACTERS_PER_S for index in range(10)]
    spoken_s = ends_s[-1] if is_length_known else None
    assert num_heard_tokens(lengths, ends_s[3], spoken_s, UNKNOWN) == 4


@pytest.mark.parametrize("seed", range(20))
def test_an_answer_with_uneven_words_is_cut_within_one_word(seed):
    """L18 with a voice that dwells: words take 0.8 to 1.2 of what their characters say."""
    chance, lengths = random.Random(seed), word_lengths()
    seconds = [length / TYPICAL_CHARACTERS_PER_S * chance.uniform(0.8, 1.2) for length in lengths]
    heard_s, spoken_s = sum(seconds[:4]), sum(seconds)
    assert abs(num_heard_tokens(lengths, heard_s, spoken_s, UNKNOWN) - 4) <= 1
    measured = UNKNOWN.after(sum(lengths), spoken_s)
    assert abs(num_heard_tokens(lengths, heard_s, None, measured) - 4) <= 1


@pytest.mark.parametrize("seed", range(10))
def test_who_listens_longer_never_hears_less(seed):
    chance = random.Random(seed)
    lengths = [chance.randint(0, 9) for _ in range(30)] + [1]
    for spoken_s in (12.0, None):
        heard = [num_heard_tokens(lengths, tenth / 10, spoken_s, UNKNOWN) for tenth in range(200)]
        assert heard == sorted(heard)
        assert (heard[0], heard[-1]) == (0, len(lengths))
