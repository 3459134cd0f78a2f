"""The streamed log-mel against WhisperFeatureExtractor over the whole utterance."""

import math

import pytest
import torch
from torch import Tensor
from transformers import WhisperFeatureExtractor

from engine.models.log_mel import FLOOR_BELOW_MAXIMUM, Floor, LogMel, LogMelState, normalize

TOLERANCE = 1e-6
RATE_HZ = 16_000


@pytest.fixture(scope="module")
def mel() -> LogMel:
    return LogMel()


@pytest.fixture(scope="module")
def extractor() -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor(
        feature_size=128, sampling_rate=RATE_HZ, hop_length=160, n_fft=400, chunk_length=300, return_attention_mask=True
    )


def speech_like(num_samples: int, seed: int = 0) -> Tensor:
    """Noise and a gliding tone under a slow envelope, about 40 dB from quiet to loud; [T]."""
    generator = torch.Generator().manual_seed(seed)
    t = torch.arange(num_samples) / RATE_HZ
    envelope = 10 ** (torch.sin(t * 5.0 + seed) - 1.5)
    return envelope * (
        0.3 * torch.randn(num_samples, generator=generator) + torch.sin(2 * math.pi * (200 + 60 * t) * t)
    )


def offline_mel(extractor: WhisperFeatureExtractor, samples: Tensor) -> Tensor:
    out = extractor(samples.numpy(), padding=True, truncation=False, sampling_rate=RATE_HZ, return_attention_mask=True)
    assert out["attention_mask"].sum() == out["input_features"].shape[-1]
    return torch.as_tensor(out["input_features"][0])


def stream(mel: LogMel, samples: Tensor, num_per_piece: int, state: LogMelState) -> Tensor:
    """Raw frames of `samples` cut into pieces, without the tail."""
    return torch.cat([mel.step(piece, state) for piece in samples.split(num_per_piece)], dim=1)


def whole(mel: LogMel, samples: Tensor, num_per_piece: int, state: LogMelState | None = None) -> Tensor:
    """Normalised frames of `samples` cut into pieces, with the tail."""
    state = state or mel.init_state()
    raw = torch.cat([stream(mel, samples, num_per_piece, state), mel.tail(state)], dim=1)
    return normalize(raw, float(raw.max()))


@pytest.mark.parametrize("num_per_piece", [1, 7, 1279, 1280, 1281, 16_000])
@pytest.mark.parametrize("num_samples", [201, 240, 241, 401, 1279, 1281, 1680, 16_000, 2 * 16_000 + 159])
def test_streamed_frames_equal_the_feature_extractor(mel, extractor, num_samples, num_per_piece):
    samples = speech_like(num_samples)
    expected = offline_mel(extractor, samples)
    streamed = whole(mel, samples, num_per_piece)
    assert streamed.shape == expected.shape == (128, num_samples // 160)
    assert (streamed - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("num_samples", range(201, 201 + 160, 13))
def test_every_remainder_of_a_frame_ends_as_in_the_feature_extractor(mel, extractor, num_samples):
    samples = speech_like(1600 + num_samples, seed=num_samples)
    assert (whole(mel, samples, 100) - offline_mel(extractor, samples)).abs().max() < TOLERANCE


@pytest.mark.parametrize("num_per_piece", [1, 333, 1280])
def test_frames_are_the_same_to_the_bit_however_the_samples_are_cut(mel, num_per_piece):
    samples = speech_like(20_000)
    assert torch.equal(whole(mel, samples, num_per_piece), whole(mel, samples, 20_000))


@pytest.mark.parametrize("num_samples", [0, 1, 160, 200])
def test_audio_shorter_than_its_reflection_has_no_frames(mel, num_samples):
    state = mel.init_state()
    assert stream(mel, speech_like(num_samples), 7, state).shape == (128, 0)
    assert mel.tail(state).shape == (128, 0)
    assert state.num_samples == num_samples


def test_an_empty_piece_changes_nothing(mel):
    samples = speech_like(3000)
    state = mel.init_state()
    first = mel.step(samples[:1000], state)
    assert mel.step(samples[:0], state).shape == (128, 0)
    raw = torch.cat([first, mel.step(samples[1000:], state)], dim=1)
    assert torch.allclose(raw, mel.step(samples, mel.init_state()), atol=TOLERANCE)


def test_the_tail_leaves_the_state_as_it_was(mel, extractor):
    samples = speech_like(8000)
    state = mel.init_state()
    raw = []
    for piece in samples.split(333):
        raw.append(mel.step(piece, state))
        mel.tail(state)
    raw.append(mel.tail(state))
    frames = torch.cat(raw, dim=1)
    assert torch.equal(mel.tail(state), raw[-1])
    assert (normalize(frames, float(frames.max())) - offline_mel(extractor, samples)).abs().max() < TOLERANCE


@pytest.mark.parametrize("num_frames", [1, 2, 9, 100])
def test_a_frame_is_final_with_exactly_the_samples_announced(mel, num_frames):
    needed = mel.num_samples_for(num_frames)
    state = mel.init_state()
    mel.step(speech_like(needed - 1), state)
    assert state.num_frames == num_frames - 1
    mel.step(torch.zeros(1), state)
    assert state.num_frames == num_frames


def test_the_maximum_is_that_of_the_final_frames(mel):
    samples = speech_like(16_000)
    state = mel.init_state()
    raw = [mel.step(piece, state) for piece in samples[:9000].split(700)]
    assert state.maximum == float(torch.cat(raw, dim=1).max())
    louder = mel.step(samples[:5000] * 10, state)
    assert state.maximum == float(louder.max())


def test_digital_silence_is_floored_by_what_follows_it(mel, extractor):
    samples = torch.cat([torch.zeros(16_000), speech_like(16_000)])
    expected = offline_mel(extractor, samples)
    assert (whole(mel, samples, 1280) - expected).abs().max() < TOLERANCE
    alone = whole(mel, samples[:16_000], 1280)
    assert (alone[:, :90] - expected[:, :90]).abs().min() > 0.1  # the floor really moved


def test_the_state_does_not_grow(mel):
    state = mel.init_state()
    before = state.nbytes
    stream(mel, speech_like(50_000), 16_000, state)
    assert state.nbytes == before == (400 + 7 * 160) * 4


def test_a_reset_state_is_a_fresh_state(mel):
    state = mel.init_state()
    mel.step(speech_like(5000), state)
    state.reset()
    fresh = mel.init_state()
    assert torch.equal(state.samples, fresh.samples)
    assert (state.num_buffered, state.num_samples, state.num_frames, state.maximum) == (200, 0, 0, -math.inf)
    samples = speech_like(3000, seed=2)
    assert torch.equal(whole(mel, samples, 500, state), whole(mel, samples, 500, fresh))


@pytest.mark.parametrize("samples", [torch.zeros(1, 100), torch.zeros(100, dtype=torch.int16)])
def test_samples_of_another_form_are_refused(mel, samples):
    with pytest.raises(ValueError, match="pass one channel"):
        mel.step(samples, mel.init_state())


@pytest.mark.parametrize(
    ("lowest", "used", "now", "holds"),
    [
        (-9.0, 1.0, 1.0, True),  # the same maximum
        (-3.0, 1.0, 4.0, True),  # nothing is below either floor
        (-3.0, 1.0, 6.0, False),  # the higher floor lifts the lowest value
        (-9.0, -1.5, 1.0, False),  # floored before, floored higher now
        (-9.0, 1.0, -1.5, False),  # floored before, less so now
    ],
)
def test_a_floor_holds_while_it_gives_the_same_values(lowest, used, now, holds):
    raw = torch.tensor([lowest, used])
    assert Floor(lowest, used).holds_for(now) is holds
    assert torch.equal(normalize(raw, used), normalize(raw, now)) is holds
    assert float(normalize(raw, used).min()) >= (used - FLOOR_BELOW_MAXIMUM + 4) / 4
