"""The streamed audio encoder against the tower run over the whole utterance, in float64."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from transformers import WhisperFeatureExtractor

from engine.models import hf
from engine.models.audio_encoder import AudioEncoder, AudioEncoderState, AudioEnd
from engine.models.log_mel import LogMel, normalize
from engine.tiny import TEST, build_tiny_checkpoint

TOLERANCE = 1e-10
RATE_HZ = 16_000
WINDOWS_MS = (1000, 2000, 4000, 8000)
LENGTHS = {"0.5 s": 8_000, "0.995 s": 15_920, "1 s": 16_000, "1.01 s": 16_160, "8 s": 128_000, "8.01 s": 128_160}


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    folder = build_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), TEST)
    tower = hf.audio_tower(hf.OmniModel.from_pretrained(folder, dtype=torch.float32)).double().eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in tower.named_parameters():
        if name.endswith("bias"):
            # Without biases a zero-padded chunk would equal an unpadded one, and no test could tell them apart.
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return tower.requires_grad_(False)


@dataclass(frozen=True)
class Streamed:
    """What came out of one utterance: by `step`, and at its end."""

    closed: Tensor
    end: AudioEnd

    @property
    def total(self) -> Tensor:
        return torch.cat([self.closed[: self.end.num_kept_tokens], self.end.features])


def speech_like(num_samples: int, seed: int = 0) -> Tensor:
    """Noise and a gliding tone whose level moves too little for any value to be 80 dB below the maximum; [T]."""
    generator = torch.Generator().manual_seed(seed)
    t = torch.arange(num_samples) / RATE_HZ
    level = 1 + 0.3 * torch.sin(t * 5.0 + seed)
    tone = torch.sin(2 * math.pi * (200 + 5 * t) * t)
    return level * (0.1 * torch.randn(num_samples, generator=generator) + 0.03 * tone)


def offline_mel(samples: Tensor) -> Tensor:
    """Normalised mel of a whole utterance, taken in one piece."""
    mel = LogMel()
    state = mel.init_state()
    raw = torch.cat([mel.step(samples, state), mel.tail(state)], dim=1)
    return normalize(raw, float(raw.max()))


def offline(tower: nn.Module, mel: Tensor, window_ms: int) -> Tensor:
    """Features [n, D] of the tower itself for the whole utterance `mel`."""
    tower.n_window_infer = window_ms // 10
    out = tower(input_features=mel.double(), feature_lens=torch.tensor([mel.shape[1]]))
    return out.last_hidden_state


def stream(encoder: AudioEncoder, samples: Tensor, num_per_piece: int, state: AudioEncoderState) -> Streamed:
    closed = [encoder.step(piece, state) for piece in samples.split(num_per_piece)]
    return Streamed(torch.cat(closed), encoder.finish(state))


def error(streamed: Tensor, expected: Tensor) -> float:
    assert streamed.shape == expected.shape
    return float((streamed - expected).abs().max())


@pytest.mark.parametrize("window_ms", WINDOWS_MS)
@pytest.mark.parametrize(("num_per_piece", "duration_ms"), [(7, 9300), (1280, 20_500), (16_000, 20_500)])
def test_a_streamed_utterance_equals_the_tower_over_all_of_it(tower, window_ms, num_per_piece, duration_ms):
    samples = speech_like(duration_ms * 16)
    encoder = AudioEncoder(tower, LogMel(), window_ms)
    state = encoder.init_state()
    streamed = stream(encoder, samples, num_per_piece, state)
    assert streamed.end.num_kept_tokens == state.num_closed_tokens == duration_ms // window_ms * window_ms // 1000 * 13
    assert error(streamed.total, offline(tower, offline_mel(samples), window_ms)) < TOLERANCE


@pytest.mark.parametrize("window_ms", WINDOWS_MS)
@pytest.mark.parametrize("num_samples", LENGTHS.values(), ids=LENGTHS.keys())
def test_every_kind_of_last_chunk_equals_the_tower(tower, window_ms, num_samples):
    samples = speech_like(num_samples, seed=3)
    encoder = AudioEncoder(tower, LogMel(), window_ms)
    streamed = stream(encoder, samples, 1280, encoder.init_state())
    assert streamed.total.shape[0] == encoder.num_tokens(num_samples // 160)
    assert error(streamed.total, offline(tower, offline_mel(samples), window_ms)) < TOLERANCE


def test_single_samples_make_the_same_features(tower):
    samples = speech_like(35_207)  # 2.2 s
    encoder = AudioEncoder(tower, LogMel(), 1000)
    streamed = stream(encoder, samples, 1, encoder.init_state())
    assert streamed.end.num_kept_tokens == 26
    assert error(streamed.total, offline(tower, offline_mel(samples), 1000)) < TOLERANCE


def test_features_equal_those_of_the_feature_extractors_mel(tower):
    samples = speech_like(160_123)
    extractor = WhisperFeatureExtractor(
        feature_size=128, sampling_rate=RATE_HZ, hop_length=160, n_fft=400, chunk_length=300, return_attention_mask=True
    )
    mel = extractor(samples.numpy(), padding=True, truncation=False, sampling_rate=RATE_HZ)["input_features"][0]
    encoder = AudioEncoder(tower, LogMel(), 4000)
    streamed = stream(encoder, samples, 1280, encoder.init_state())
    # The extractor's mel is float32: its rounding, not ours, sets this tolerance.
    assert error(streamed.total, offline(tower, torch.as_tensor(mel), 4000)) < 1e-5


@pytest.mark.parametrize("window_ms", [1000, 4000])
def test_provisional_features_are_those_of_the_prefix(tower, window_ms):
    samples = speech_like(150_000, seed=5)
    encoder = AudioEncoder(tower, LogMel(), window_ms)
    state = encoder.init_state()
    generator = torch.Generator().manual_seed(2)
    closed = []
    for _ in range(24):
        num_samples = int(torch.randint(1, 9000, (1,), generator=generator))
        begin = state.num_samples
        closed.append(encoder.step(samples[begin : begin + num_samples], state))
        streamed = torch.cat([*closed, encoder.provisional(state)])
        prefix = samples[: state.num_samples]
        if prefix.numel() > 200:
            assert error(streamed, offline(tower, offline_mel(prefix), window_ms)) < TOLERANCE
    assert state.num_closed_tokens > 0  # the walk passed the end of a window


def test_asking_for_provisional_features_changes_nothing_later(tower):
    samples = torch.cat([torch.zeros(20_000), speech_like(60_000)])
    encoder = AudioEncoder(tower, LogMel(), 4000)
    quiet, asked = encoder.init_state(), encoder.init_state()
    expected = stream(encoder, samples, 1280, quiet)
    closed = []
    for piece in samples.split(1280):
        closed.append(encoder.step(piece, asked))
        assert torch.equal(encoder.provisional(asked), encoder.provisional(asked))
    assert torch.equal(torch.cat(closed), expected.closed)
    assert torch.equal(encoder.finish(asked).features, expected.end.features)


def test_finish_can_be_asked_early_and_the_utterance_goes_on(tower):
    samples = speech_like(50_000)
    encoder = AudioEncoder(tower, LogMel(), 1000)
    state = encoder.init_state()
    first = encoder.step(samples[:30_000], state)
    early = encoder.finish(state)
    assert torch.equal(early.features, encoder.provisional(state))
    closed = torch.cat([first, encoder.step(samples[30_000:], state)])
    assert error(Streamed(closed, encoder.finish(state)).total, offline(tower, offline_mel(samples), 1000)) < TOLERANCE


def test_later_input_never_changes_a_closed_window(tower):
    endings = [speech_like(40_000, seed=8), speech_like(40_000, seed=9)]
    encoder = AudioEncoder(tower, LogMel(), 2000)
    results = [
        stream(encoder, torch.cat([speech_like(70_000), ending]), 1280, encoder.init_state()) for ending in endings
    ]
    assert torch.equal(results[0].closed[:52], results[1].closed[:52])
    assert not torch.equal(results[0].closed[52:], results[1].closed[52:])
    assert all(result.end.num_kept_tokens == 78 for result in results)


@pytest.mark.parametrize("num_per_piece", [1280, 48_000])
def test_a_window_closes_alike_however_the_samples_are_cut(tower, num_per_piece):
    samples = torch.cat([torch.zeros(9_000), speech_like(7_000) * 0.01, speech_like(80_000)])
    encoder = AudioEncoder(tower, LogMel(), 1000)
    expected = stream(encoder, samples, 7, encoder.init_state()).closed
    assert torch.equal(stream(encoder, samples, num_per_piece, encoder.init_state()).closed, expected)


@pytest.mark.parametrize("num_silent", [160_000, 304_000])
def test_a_late_maximum_takes_back_the_windows_it_floors(tower, num_silent):
    loud_first = speech_like(16_160 * 3) * 0.001  # three windows that only the last, loud part can floor
    hiss = torch.randn(num_silent - loud_first.numel(), generator=torch.Generator().manual_seed(4)) * 1e-5
    samples = torch.cat([loud_first, hiss, speech_like(320_000 - num_silent)])
    encoder = AudioEncoder(tower, LogMel(), 1000)
    state = encoder.init_state()
    streamed = stream(encoder, samples, 1280, state)
    expected = offline(tower, offline_mel(samples), 1000)
    assert streamed.end.num_kept_tokens < state.num_closed_tokens
    assert error(streamed.total, expected) < TOLERANCE
    assert error(streamed.closed, expected[: streamed.closed.shape[0]]) > 0.01  # the floor really matters


def test_windows_before_the_first_one_taken_back_stand(tower):
    noise = torch.randn(48_000, generator=torch.Generator().manual_seed(4)) * 0.01
    samples = torch.cat([noise, torch.zeros(32_000), noise * 3, noise * 10])
    encoder = AudioEncoder(tower, LogMel(), 1000)
    state = encoder.init_state()
    streamed = stream(encoder, samples, 1280, state)
    assert streamed.end.num_kept_tokens == 39  # the three windows of noise; the silence after them is taken back
    assert error(streamed.total, offline(tower, offline_mel(samples), 1000)) < TOLERANCE


def test_a_maximum_in_the_tail_counts(tower):
    samples = torch.cat([torch.zeros(39_900), torch.full((100,), 0.5)])  # past the last frame that is final
    encoder = AudioEncoder(tower, LogMel(), 1000)
    state = encoder.init_state()
    streamed = stream(encoder, samples, 1280, state)
    assert streamed.end.num_kept_tokens == 0
    assert error(streamed.total, offline(tower, offline_mel(samples), 1000)) < TOLERANCE


@pytest.mark.parametrize("num_samples", [0, 1, 159, 200])
def test_audio_too_short_for_a_frame_has_no_features(tower, num_samples):
    encoder = AudioEncoder(tower, LogMel(), 8000)
    state = encoder.init_state()
    assert encoder.step(speech_like(num_samples), state).shape == (0, TEST.hidden)
    assert encoder.provisional(state).shape == (0, TEST.hidden)
    assert encoder.finish(state).features.shape == (0, TEST.hidden)


def test_only_the_raw_mel_of_closed_windows_grows(tower):
    encoder = AudioEncoder(tower, LogMel(), 2000)
    state = encoder.init_state()
    before = state.nbytes
    encoder.step(speech_like(170_000), state)
    assert len(state.closed) == 5
    assert state.nbytes - before == 10 * 100 * 128 * 4  # 51 KB for each of 10 s
    encoder.provisional(state)
    assert state.nbytes - before == 10 * 100 * 128 * 4


def test_a_reset_state_is_a_fresh_state(tower):
    encoder = AudioEncoder(tower, LogMel(), 2000)
    state = encoder.init_state()
    fresh_bytes = state.nbytes
    encoder.step(speech_like(90_000) * 30, state)
    state.reset()
    assert (state.num_samples, state.num_closed_tokens, state.nbytes) == (0, 0, fresh_bytes)
    samples = speech_like(30_000, seed=6)  # ends in its first window, where a chunk left over would show
    again, expected = stream(encoder, samples, 1280, state), stream(encoder, samples, 1280, encoder.init_state())
    assert again.end.num_kept_tokens == 0
    assert torch.equal(again.end.features, expected.end.features)


def test_two_utterances_can_be_encoded_side_by_side(tower):
    encoder = AudioEncoder(tower, LogMel(), 1000)
    samples = [speech_like(40_000, seed=1), speech_like(40_000, seed=2)]
    states = [encoder.init_state(), encoder.init_state()]
    closed: list[list[Tensor]] = [[], []]
    for pair in zip(samples[0].split(1280), samples[1].split(1280), strict=True):
        for index, piece in enumerate(pair):
            closed[index].append(encoder.step(piece, states[index]))
    for index in range(2):
        streamed = Streamed(torch.cat(closed[index]), encoder.finish(states[index]))
        assert error(streamed.total, offline(tower, offline_mel(samples[index]), 1000)) < TOLERANCE


def test_features_keep_the_towers_dtype_and_carry_no_graph(tower):
    encoder = AudioEncoder(tower, LogMel(), 1000)
    state = encoder.init_state()
    for features in (encoder.step(speech_like(20_000), state), encoder.provisional(state)):
        assert features.dtype == torch.float64
        assert not features.requires_grad


def test_a_window_the_tower_was_not_trained_with_is_refused(tower):
    with pytest.raises(ValueError, match=r"window_ms is 3000: choose one of \(1000, 2000, 4000, 8000\)"):
        AudioEncoder(tower, LogMel(), 3000)
