"""Conversations drawn at random, against stock transformers: what nobody thought of to write down as a case."""

import random

import numpy as np
import pytest

from engine.reply import ReplyLimits
from engine.user_turn import TurnPolicy
from tests.harness import Driver, load, noise, offline, picture, stages_of

WINDOWS_MS = (1000, 2000, 4000, 8000)
SECONDS = (1.0, 1.3, 2.0, 2.7, 4.1, 8.0, 9.2)
SHORT_SECONDS = (0.09, 0.2, 0.5, 0.93)  # after a longer one only: stock encodes earlier short ones anew (README)
TEXTS = ("hello there", "what is the capital of france", "one")


@pytest.fixture(scope="module")
def loaded(tiny_folder):
    return load(tiny_folder)


@pytest.fixture(scope="module")
def stages(loaded):
    return {window_ms: stages_of(loaded, window_ms) for window_ms in WINDOWS_MS}


def add_turn(driver: Driver, chance: random.Random, seed: int) -> bool:
    """Say, show or type something; return whether the answer is spoken."""
    kind = chance.choice(("sound", "sound", "sound and picture", "typed", "typed, answered in text"))
    driver.conversation.eager_talker = kind != "typed, answered in text"
    seconds = chance.choice(SECONDS + (SHORT_SECONDS if driver.audios else ()))
    sound = noise(seconds, seed, chance.choice((0.001, 0.1, 0.5)))
    if kind == "sound":
        driver.say(sound, chance.choice((160, 1280, 5000)))
    elif kind == "sound and picture":
        num_pictures = max(1, chance.choice((int(2 * seconds), int(2 * seconds) + 1, 1, 2)))
        driver.say_and_show(sound, [picture(seed + index) for index in range(num_pictures)])
    else:
        driver.type(chance.choice(TEXTS))
    return driver.conversation.eager_talker


@pytest.mark.parametrize("seed", range(12))
def test_a_random_conversation_equals_stock(loaded, stages, seed):
    chance = random.Random(seed)
    window_ms = chance.choice(WINDOWS_MS)
    policy = TurnPolicy(chance.random() < 0.7, chance.choice((1, 2, 4)), chance.choice((1, 2)))
    limits = ReplyLimits(chance.choice((2, 6, 12)), chance.choice((1, 4, 8)), chance.choice((1, 3, 8)))
    driver = Driver(stages[window_ms], policy, limits, prefill_rows=chance.choice((3, 17, 64, 256)))
    thinker = loaded.model.config.thinker_config
    placeholders = {thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id}
    for turn in range(chance.choice((2, 3, 4))):
        is_spoken = add_turn(driver, chance, 100 * seed + turn)
        made = driver.reply(is_spoken=is_spoken)
        expected = offline(loaded, driver, made)
        assert made.text_ids == expected.text_ids[: len(made.text_ids)], f"turn {turn}"
        if is_spoken:
            np.testing.assert_array_equal(made.codes, expected.codes, err_msg=f"turn {turn}")
        if placeholders & set(made.text_ids):  # an untrained Thinker wrote one; stock cannot read such a prompt
            return
        num_heard = chance.choice((0, 1, len(made.text_ids), len(made.text_ids)))
        driver.conversation.end_reply(made.text_ids[:num_heard])
