"""What the engine streams equals what stock transformers computes offline: text, codec frames, samples."""

import gc
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch

from engine.models import hf, host_step
from engine.reply import EndReason, ReplyLimits, TextToken
from engine.user_turn import TurnPolicy, UserTurn
from tests.harness import LIMITS, Driver, Made, load, noise, offline, picture, stages_of
from tests.offline import Offline

TOLERANCE = 1e-6  # of samples that both sides hand out in float32


@pytest.fixture(scope="module")
def loaded(tiny_folder):
    return load(tiny_folder)


@pytest.fixture(scope="module")
def stages(loaded):
    return stages_of(loaded)


def assert_equal(made: Made, expected: Offline) -> None:
    assert made.text_ids == expected.text_ids[: len(made.text_ids)]
    assert len(set(made.text_ids)) > 1, "a reply of one token repeated proves little"
    np.testing.assert_array_equal(made.codes, expected.codes)
    assert made.samples.shape == expected.samples.shape
    assert np.abs(made.samples - expected.samples).max() < TOLERANCE


@pytest.mark.parametrize(("piece", "seconds"), [(1, 0.4), (7, 1.3), (1280, 3.21), (16000, 3.21)])
def test_a_spoken_turn_equals_generate_for_every_cut_of_the_sound(loaded, stages, piece, seconds):
    driver = Driver(stages)
    driver.say(noise(seconds), piece)
    made = driver.reply()
    assert_equal(made, offline(loaded, driver, made))


@pytest.mark.parametrize("window_ms", [1000, 2000, 4000, 8000])
def test_it_does_for_every_encoder_window(loaded, window_ms):
    driver = Driver(stages_of(loaded, window_ms))
    driver.say(noise(9.3))
    made = driver.reply()
    assert_equal(made, offline(loaded, driver, made))


def test_it_does_when_the_loudest_moment_comes_last(loaded):
    driver = Driver(stages_of(loaded, 1000))
    quiet = np.zeros(32000, np.float32)
    driver.say(np.concatenate([quiet, noise(1.0, level=0.001), noise(1.5, level=0.3)]))
    made = driver.reply()
    assert driver.stages.metrics.counter("mel_floor_revisions") > 0, "the case was not reached"
    assert_equal(made, offline(loaded, driver, made))


@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_it_does_for_every_cut_of_the_prefill(loaded, stages, rows):
    driver = Driver(stages, prefill_rows=rows)
    driver.say(noise(1.1))
    made = driver.reply()
    assert_equal(made, offline(loaded, driver, made))


def test_provisional_prefill_leaves_no_trace(loaded, stages):
    audio = noise(2.7)
    results = []
    for policy in (TurnPolicy(is_provisional=False), TurnPolicy(), TurnPolicy(True, 1, 1)):
        before = stages.metrics.counter("provisional_passes")
        driver = Driver(stages, policy)
        driver.say(audio)
        made = driver.reply()
        results.append((made, stages.metrics.counter("provisional_passes") - before))
    assert [passes for _, passes in results] == [0, 15, 33]
    for made, _ in results[1:]:
        assert made.text_ids == results[0][0].text_ids
        np.testing.assert_array_equal(made.codes, results[0][0].codes)


def test_a_late_thinker_changes_nothing(loaded, stages, monkeypatch):
    driver = Driver(stages)
    driver.say(noise(1.5))
    step = type(stages.thinker).step

    def slow(*arguments, **options):
        time.sleep(0.02)
        return step(*arguments, **options)

    monkeypatch.setattr(type(stages.thinker), "step", slow)
    made = driver.reply()
    monkeypatch.undo()
    assert_equal(made, offline(loaded, driver, made))


def test_later_turns_equal_a_fresh_run_on_the_whole_transcript(loaded, stages):
    driver = Driver(stages)
    for turn, seconds in enumerate((1.4, 2.2, 1.05)):
        driver.say(noise(seconds, seed=turn))
        made = driver.reply()
        assert_equal(made, offline(loaded, driver, made))
        driver.conversation.end_reply(made.text_ids)


@pytest.mark.parametrize("num_heard", [0, 1, 5, 11])
def test_an_interrupted_turn_is_cut_to_what_was_heard(loaded, stages, num_heard):
    driver = Driver(stages)
    driver.say(noise(1.4, seed=1))
    first = driver.reply()
    driver.conversation.end_reply(first.text_ids[:num_heard])
    driver.say(noise(1.2, seed=2))
    made = driver.reply()
    assert list(made.prompt[len(first.prompt) :][:num_heard]) == first.text_ids[:num_heard]
    assert made.prompt[len(first.prompt) + num_heard] == loaded.model.config.im_end_token_id
    assert_equal(made, offline(loaded, driver, made))


def test_a_reply_cut_in_the_middle_of_its_making_leaves_no_trace(loaded, stages):
    driver = Driver(stages)
    driver.say(noise(1.4, seed=1))
    from engine.reply import Reply

    parts = Reply(driver.conversation, stages, LIMITS, lambda: None, is_spoken=True).run()
    ids = [part.token_id for part in (next(parts) for _ in range(9)) if isinstance(part, TextToken)]
    parts.close()
    driver.conversation.end_reply(ids[:2])
    driver.say(noise(1.2, seed=2))
    made = driver.reply()
    assert_equal(made, offline(loaded, driver, made))


def test_a_typed_turn_without_speech_keeps_the_talker_exact_for_later(loaded, stages):
    driver = Driver(stages)
    driver.say(noise(1.4, seed=1))
    driver.conversation.end_reply(driver.reply().text_ids)
    driver.conversation.eager_talker = False
    driver.type("what is the capital of france")
    silent = driver.reply(is_spoken=False)
    assert silent.codes.shape == (0, 0) or silent.codes.shape[0] == 0
    assert_text_equal(silent, offline(loaded, driver, silent))
    driver.conversation.end_reply(silent.text_ids)
    driver.conversation.eager_talker = True
    driver.say(noise(1.2, seed=2))
    made = driver.reply()
    assert_equal(made, offline(loaded, driver, made))


def test_a_typed_turn_may_be_spoken_after_it_was_prefilled_without_the_talker(loaded, stages):
    driver = Driver(stages)
    driver.conversation.eager_talker = False
    driver.type("hello there")
    made = driver.reply()
    assert_equal(made, offline(loaded, driver, made))
    driver.conversation.end_reply(made.text_ids)
    driver.type("one two three")
    made = driver.reply()
    assert_equal(made, offline(loaded, driver, made))


def assert_text_equal(made: Made, expected: Offline) -> None:
    assert made.text_ids == expected.text_ids[: len(made.text_ids)]


@pytest.mark.parametrize(("seconds", "num_pictures"), [(4.0, 8), (2.6, 3), (1.2, 5), (3.0, 1)])
def test_sound_and_picture_through_the_whole_chain(loaded, stages, seconds, num_pictures):
    driver = Driver(stages)
    driver.say_and_show(noise(seconds), [picture(i) for i in range(num_pictures)])
    made = driver.reply()
    assert_equal(made, offline(loaded, driver, made))


def test_sound_and_picture_with_closed_windows_between(loaded):
    driver = Driver(stages_of(loaded, 1000))
    driver.say_and_show(noise(5.3), [picture(i) for i in range(11)])
    made = driver.reply()
    assert_equal(made, offline(loaded, driver, made))


def test_a_silent_video_with_typed_text(loaded, stages):
    driver = Driver(stages)
    driver.say_and_show(None, [picture(i) for i in range(5)], "what is it")
    made = driver.reply()
    assert_equal(made, offline(loaded, driver, made))


def test_stills_speech_and_text_in_one_conversation(loaded, stages):
    driver = Driver(stages)
    driver.show_still(picture(1), "is it a red circle")
    first = driver.reply()
    assert_equal(first, offline(loaded, driver, first))
    driver.conversation.end_reply(first.text_ids[:4])
    driver.say(noise(1.3))
    second = driver.reply()
    assert_equal(second, offline(loaded, driver, second))
    driver.conversation.end_reply(second.text_ids)
    driver.show_still(picture(2, 96, 64), "and now")
    third = driver.reply()
    assert_equal(third, offline(loaded, driver, third))


def test_two_turns_of_sound_and_picture_the_first_interrupted(loaded, stages):
    driver = Driver(stages)
    driver.say_and_show(noise(2.2, seed=3), [picture(i) for i in range(4)])
    driver.conversation.end_reply(driver.reply().text_ids[:3])
    driver.say_and_show(noise(1.7, seed=4), [picture(i + 9) for i in range(3)])
    made = driver.reply()
    assert_equal(made, offline(loaded, driver, made))


def test_positions_are_those_of_get_rope_index(loaded, stages):
    driver = Driver(stages)
    driver.say_and_show(noise(2.2, seed=3), [picture(i) for i in range(4)])
    driver.conversation.end_reply(driver.reply().text_ids[:3])
    driver.say_and_show(noise(1.7, seed=4), [picture(i + 9) for i in range(3)])
    driver.conversation.begin_reply()
    timeline = driver.conversation.timeline
    ids = torch.tensor([timeline.token_ids])
    expected, _ = loaded.model.thinker.get_rope_index(
        ids,
        video_grid_thw=torch.tensor(np.array([grid for _, _, grid in driver.pictures])),
        attention_mask=torch.ones_like(ids),
        use_audio_in_video=True,
        audio_seqlens=torch.tensor([len(audio) // 160 for audio in driver.audios]),
        second_per_grids=torch.full((2,), stages.seconds_per_grid),
    )
    assert torch.equal(timeline.positions, expected[:, 0])


def test_every_decode_schedule_gives_the_same_samples(loaded, stages):
    results = []
    for most in (1, 2, 4):
        driver = Driver(stages, limits=replace(LIMITS, decode_frames=most))
        driver.say(noise(1.4))
        results.append(driver.reply().samples)
    for samples in results[1:]:
        assert np.abs(samples - results[0]).max() < TOLERANCE


def test_float32_makes_the_same_tokens_and_frames(tiny_folder):
    loaded = load(tiny_folder, "float32")
    driver = Driver(stages_of(loaded))
    driver.say(noise(3.21))
    made = driver.reply()
    expected = offline(loaded, driver, made)
    assert made.text_ids == expected.text_ids[: len(made.text_ids)]
    np.testing.assert_array_equal(made.codes, expected.codes)


def test_captured_calls_make_the_same_reply(loaded):
    from pathlib import Path

    from engine.config import EngineConfig, SpeechConfig
    from engine.metrics import Metrics
    from engine.stages import build_stages

    config = EngineConfig(speech=SpeechConfig(is_greedy=True), use_graphs=True, trace=Path("kept"))
    driver = Driver(build_stages(loaded, config, Metrics()))
    for seed in (1, 2):
        driver.say(noise(1.4, seed=seed))
        made = driver.reply()
        assert_equal(made, offline(loaded, driver, made))
        driver.conversation.end_reply(made.text_ids)


# -- replies that are empty, short, or never end


def with_end_after(stages, num_tokens: int):
    """The same stages whose Thinker ends its reply after `num_tokens` tokens."""

    class Ending:
        def __init__(self) -> None:
            self._inner = stages.thinker_sampler
            self._left = num_tokens

        def reset(self, seen=()):
            self._inner.reset(seen)
            self._left = num_tokens

        def __call__(self, logits):
            if self._left == 0:
                return torch.tensor(stages.scribe.end_of_reply)
            self._left -= 1
            logits = logits.clone()
            logits[stages.scribe.end_of_reply] = -torch.inf
            return self._inner(logits)

    return replace(stages, thinker_sampler=Ending())


def test_an_empty_reply_says_nothing_and_the_next_turn_goes_on(loaded, stages):
    driver = Driver(with_end_after(stages, 0))
    driver.say(noise(1.2))
    made = driver.reply()
    assert made.reply.end_reason is EndReason.EMPTY
    assert made.text_ids == []
    assert len(made.samples) == 0
    driver.conversation.end_reply([])
    driver.stages = stages
    driver.say(noise(1.1, seed=5))
    made = driver.reply()
    assert_equal(made, offline(loaded, driver, made))


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_a_short_reply_tells_the_talker_once_that_the_text_ended(loaded, stages, num_tokens):
    driver = Driver(with_end_after(stages, num_tokens))
    driver.say(noise(1.2))
    made = driver.reply()
    assert len(made.text_ids) == num_tokens
    model = loaded.model
    forced = [*made.text_ids, model.config.im_end_token_id]
    original = model.thinker.generate

    def forced_generate(**options):
        steps = iter(forced)

        def only_the_next(batch, ids):
            return [forced[ids.shape[0] - len(made.prompt)]]

        del steps
        return original(**options, prefix_allowed_tokens_fn=only_the_next)

    model.thinker.generate = forced_generate
    try:
        expected = offline(loaded, driver, made)
    finally:
        del model.thinker.generate
    assert expected.text_ids == forced
    np.testing.assert_array_equal(made.codes, expected.codes)


def test_text_and_speech_that_never_end_are_bounded(stages):
    driver = Driver(stages, limits=ReplyLimits(5, 7, 4))
    driver.say(noise(1.2))
    made = driver.reply()
    assert len(made.text_ids) == 5
    assert made.codes.shape == (7, 16)
    assert made.reply.end_reason is EndReason.SPEECH_LIMIT


# -- properties of the whole chain


def test_turn_ten_prefills_no_more_than_turn_two(stages):
    driver = Driver(stages, TurnPolicy(is_provisional=False), limits=ReplyLimits(3, 2, 1))
    computed = []
    for turn in range(10):
        before = stages.metrics.counter("thinker_prefill_tokens")
        driver.say(noise(1.2, seed=turn))
        made = driver.reply()
        computed.append(stages.metrics.counter("thinker_prefill_tokens") - before)
        driver.conversation.end_reply(made.text_ids)
    assert computed[9] == computed[1]


def test_nothing_but_token_ids_goes_to_the_host_between_stages(tiny_folder, monkeypatch):
    # As on a device: no step in numpy, no expert that is looked up by the host.
    monkeypatch.setattr(host_step, "runs_on_host", lambda dtype, device: False)
    loaded = load(tiny_folder, "float32")
    loaded.model.set_experts_implementation("batched_mm")
    stages = stages_of(loaded)
    driver = Driver(stages)
    driver.say(noise(1.4))
    driver.conversation.flush()

    taken: list[str] = []
    for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"):
        original = getattr(torch.Tensor, name)

        def counted(self, *arguments, _name=name, _original=original, **options):
            taken.append(_name)
            return _original(self, *arguments, **options)

        monkeypatch.setattr(torch.Tensor, name, counted)
    from engine.reply import Reply, Sound

    reply = Reply(driver.conversation, stages, LIMITS, lambda: None, is_spoken=True)
    num_sounds = sum(isinstance(part, Sound) for part in reply.run())
    monkeypatch.undo()
    num_ids = len(reply.token_ids) + reply.num_frames
    assert num_ids == 12 + 10
    # a token id is copied (cpu) and read (int); samples leave the device (cpu) and become an array (numpy)
    assert taken.count("__int__") == num_ids
    assert taken.count("cpu") == num_ids + num_sounds
    assert taken.count("numpy") == num_sounds
    assert not {"tolist", "__bool__", "__float__"} & set(taken)


@pytest.mark.slow
def test_ten_thousand_chunks_with_a_fixed_context_leave_memory_flat(tiny_folder):
    stages = replace(stages_of(load(tiny_folder, "float32"), 1000), keeps_media=False)
    driver = Driver(stages, TurnPolicy(is_provisional=False))
    conversation = driver.conversation
    start = conversation.mark()
    chunk = torch.from_numpy(noise(0.08))
    process = psutil.Process()
    sizes = []
    for turn in range(100):
        conversation.rollback(start)
        user = UserTurn(conversation, stages, driver.policy, has_audio=True, has_video=False)
        for _ in range(100):
            user.hear(chunk)
        user.end()
        conversation.flush()
        if turn % 20 == 19:
            gc.collect()
            sizes.append(process.memory_info().rss / 2**20)
    assert sizes[-1] - sizes[0] < 4, f"MiB after 2000, 4000, ... chunks: {sizes}"


def test_audio_token_counts_are_the_processors():
    assert [hf.audio_token_count(n) for n in (0, 1, 8, 99, 100, 101, 800)] == [0, 1, 1, 13, 13, 14, 104]


@pytest.mark.parametrize("kind", ["sound", "silent video", "sound and picture"])
def test_at_the_end_of_a_turn_only_the_open_window_is_left_to_prefill(loaded, kind):
    driver = Driver(stages_of(loaded, 1000), TurnPolicy(is_provisional=False))
    metrics = driver.stages.metrics
    seen = []
    end = UserTurn.end

    def watched(turn, text=""):
        seen.append(metrics.counter("thinker_prefill_tokens"))
        end(turn, text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UserTurn, "end", watched)
        pictures = [picture(i) for i in range(10)]
        if kind == "sound":
            driver.say(noise(5.2))
        else:
            driver.say_and_show(noise(5.2) if kind == "sound and picture" else None, pictures)
    driver.conversation.begin_reply()
    left = metrics.counter("thinker_prefill_tokens") - seen[0]
    one_second = 13 + driver.stages.spatial_merge * 3  # of sound, and a grid of 2 x 3 tokens
    assert left <= one_second + 10, f"{left} of {driver.conversation.num_prefilled} rows came after the turn's end"


@pytest.mark.parametrize("seconds", [(2.1, 0.5), (0.7, 0.5), (0.5, 0.45, 0.3), (1.2, 0.9, 2.0, 0.35)])
def test_a_short_sound_after_longer_ones_equals_a_fresh_run(loaded, stages, seconds):
    driver = Driver(stages)
    for turn, length in enumerate(seconds):
        driver.say(noise(length, seed=turn))
        made = driver.reply()
        assert_equal(made, offline(loaded, driver, made))
        driver.conversation.end_reply(made.text_ids[:5])
