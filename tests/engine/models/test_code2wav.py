"""Streaming codec frames gives the samples of decoding all of them, however they are split."""

import copy
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engine.models import hf
from engine.models.code2wav import FRAMES_PER_ROTARY_BLOCK, Code2Wav, Code2WavState
from engine.tiny import build_tiny_checkpoint

SAMPLES_PER_FRAME, LOOKAHEAD = 1920, 555
NUM_CODEBOOKS, NUM_ENTRIES = 16, 64
NUM_FRAMES = 230  # the window of 72 frames slides out of both layers' sight
TOLERANCE = 1e-10  # of the RMS, in float64


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    folder: Path = build_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return hf.OmniModel.from_pretrained(folder, dtype=torch.float64).code2wav.eval()


@pytest.fixture(scope="module")
def decoder(module: nn.Module) -> Code2Wav:
    return Code2Wav(module)


@pytest.fixture(scope="module")
def codes() -> Tensor:
    return random_codes(NUM_FRAMES, seed=0)


@pytest.fixture(scope="module")
def whole(module: nn.Module, codes: Tensor) -> Tensor:
    return decode_whole(module, codes)


def random_codes(num_frames: int, seed: int) -> Tensor:
    return torch.randint(0, NUM_ENTRIES, (NUM_CODEBOOKS, num_frames), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def decode_whole(module: nn.Module, codes: Tensor) -> Tensor:
    return module(codes[None])[0, 0]


def stream(decoder: Code2Wav, codes: Tensor, sizes: Iterable[int], state: Code2WavState | None = None) -> list[Tensor]:
    """Decode `codes` in steps of `sizes`, the last size again and again."""
    state = state or decoder.init_state()
    pieces, start, sizes, size = [], 0, iter(sizes), 1
    while start < codes.shape[1]:
        size = next(sizes, size)
        pieces.append(decoder.step(codes[:, start : start + size], state))
        start += size
    return pieces


def relative_error(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape
    return float((got - expected).abs().max() / expected.square().mean().sqrt())


@pytest.mark.parametrize("sizes", [[1], [2], [4], [7], [25], [100], [3, 1, 1, 40, 2, 75, 6]])
def test_any_split_gives_what_all_frames_at_once_give(decoder, codes, whole, sizes):
    samples = torch.cat(stream(decoder, codes, sizes))
    assert samples.shape == (NUM_FRAMES * SAMPLES_PER_FRAME - LOOKAHEAD,)
    assert relative_error(samples, whole) <= TOLERANCE


def test_float32_keeps_to_its_own_rounding(module, codes):
    wide = decode_whole(module, codes[:, :60])
    narrow = copy.deepcopy(module).float()
    samples = torch.cat(stream(Code2Wav(narrow), codes[:, :60], [2]))
    assert samples.dtype == torch.float32
    assert relative_error(samples, decode_whole(narrow, codes[:, :60])) <= 1e-4
    assert relative_error(samples.double(), wide) <= 1e-3


def test_the_first_frame_waits_for_the_lookahead_and_the_others_do_not(decoder, codes):
    assert (decoder.samples_per_frame, decoder.lookahead_samples) == (SAMPLES_PER_FRAME, LOOKAHEAD)
    assert [piece.shape[0] for piece in stream(decoder, codes[:, :4], [1])] == [1365, 1920, 1920, 1920]
    assert [piece.shape[0] for piece in stream(decoder, codes[:, :6], [3])] == [3 * 1920 - 555, 3 * 1920]
    assert decoder.step(codes[:, :0], decoder.init_state()).shape == (0,)


def test_samples_stay_within_one(module, codes):
    loud = copy.deepcopy(module)
    with torch.no_grad():
        loud.decoder[-1].conv.weight.mul_(1e6)
    samples = torch.cat(stream(Code2Wav(loud), codes[:, :8], [2]))
    assert samples.abs().max() == 1
    assert relative_error(samples, decode_whole(loud, codes[:, :8])) <= TOLERANCE


def test_a_frame_changes_nothing_before_its_lookahead_and_nothing_after_the_window(decoder, codes, whole):
    frame = 40
    changed = codes.clone()
    changed[:, frame] = (changed[:, frame] + 7) % NUM_ENTRIES
    samples = torch.cat(stream(decoder, changed, [5]))
    differs = ((samples - whole).abs() > 1e-12 * whole.abs().max()).nonzero()
    assert int(differs[0]) == frame * SAMPLES_PER_FRAME - LOOKAHEAD
    # each layer looks 71 frames back, and the convolutions behind them a few more
    num_layers = len(decoder._layers)
    reach = int(differs[-1]) / SAMPLES_PER_FRAME - frame
    assert 71 <= reach <= num_layers * 71 + 12


def test_two_streams_in_turn_do_not_disturb_each_other(module, decoder):
    left, right = random_codes(30, seed=1), random_codes(30, seed=2)
    states = decoder.init_state(), decoder.init_state()
    pieces: tuple[list[Tensor], list[Tensor]] = ([], [])
    # The right one starts late: its window is still short when the left one's is longer.
    for start in range(0, 30, 3):
        pieces[0].append(decoder.step(left[:, start : start + 3], states[0]))
        if start >= 9:
            pieces[1].append(decoder.step(right[:, start - 9 : start - 6], states[1]))
    assert relative_error(torch.cat(pieces[0]), decode_whole(module, left)) <= TOLERANCE
    assert relative_error(torch.cat(pieces[1]), decode_whole(module, right[:, :21])) <= TOLERANCE


def test_samples_already_given_are_not_overwritten_by_the_next_step(decoder, codes):
    state = decoder.init_state()
    first = decoder.step(codes[:, :2], state)
    kept = first.clone()
    decoder.step(codes[:, 2:4], state)
    assert torch.equal(first, kept)


def test_a_reset_state_is_a_fresh_one(decoder, codes):
    state = decoder.init_state()
    stream(decoder, codes[:, :90], [4], state)
    state.reset()
    again = torch.cat(stream(decoder, codes[:, :20], [4], state))
    assert torch.equal(again, torch.cat(stream(decoder, codes[:, :20], [4])))


def test_the_state_does_not_grow(decoder):
    state = decoder.init_state()
    size = state.nbytes
    codes = random_codes(500, seed=3)
    for start in range(0, 500, 25):
        decoder.step(codes[:, start : start + 25], state)
        assert state.nbytes == size


def test_the_rotary_table_moves_on_with_the_stream(module, decoder):
    state = decoder.init_state()
    positions = torch.tensor([[0, FRAMES_PER_ROTARY_BLOCK - 1, FRAMES_PER_ROTARY_BLOCK + 1, 5000]])
    cos, _ = module.pre_transformer.rotary_emb(state.rotary, positions)
    for column, position in enumerate(positions[0].tolist()):
        state.num_frames = position
        assert torch.equal(decoder._rotary_rows(2, state)[0, 0, 0], cos[0, column])


@pytest.mark.parametrize("shape", [(15, 4), (1, 16, 4), (16,)])
def test_codes_of_another_shape_are_refused(decoder, shape):
    with pytest.raises(ValueError, match=r"\[16, T\]") as refused:
        decoder.step(torch.zeros(shape, dtype=torch.int64), decoder.init_state())
    assert str(list(shape)) in str(refused.value)
