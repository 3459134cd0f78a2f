"""Encoding pair by pair is encoding the clip, and what comes later changes nothing earlier."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.models import hf
from engine.models.pictures import PictureConfig, patchify, smart_resize
from engine.models.vision_encoder import VisionEncoder, VisionFeatures
from engine.tiny import build_tiny_checkpoint

TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def config(checkpoint: Path) -> PictureConfig:
    return PictureConfig.from_checkpoint(json.loads((checkpoint / "preprocessor_config.json").read_text()))


@pytest.fixture(scope="module")
def encoder(checkpoint: Path, config: PictureConfig) -> VisionEncoder:
    return VisionEncoder(hf.vision_tower(hf.OmniModel.from_pretrained(checkpoint, dtype=torch.float64)), config)


def pictures(count: int, height: int = 64, width: int = 96) -> list[NDArray[np.uint8]]:
    return list(np.random.default_rng(count).integers(0, 256, (count, height, width, 3), np.uint8))


def stream(encoder: VisionEncoder, clip: list[NDArray[np.uint8]]) -> list[VisionFeatures]:
    state = encoder.init_state()
    features = [encoder.step(picture, state) for picture in clip]
    assert [feature is None for feature in features] == [index % 2 == 0 for index in range(len(clip))]
    assert state.num_pairs == len(clip) // 2
    return [feature for feature in (*features, encoder.finish(state)) if feature is not None]


@torch.no_grad()
def encode_clip(encoder: VisionEncoder, pixels: Tensor, grid: tuple[int, int, int]) -> tuple[Tensor, list[Tensor]]:
    return hf.encode_vision(encoder._tower, pixels, torch.tensor([grid]))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_pair_by_pair_is_the_whole_clip(encoder, config, count):
    clip = pictures(count)
    features = stream(encoder, clip)
    pixels, grid = patchify(clip, config)
    tokens, deepstack = encode_clip(encoder, pixels, grid)
    assert len(features) == grid[0] == (count + 1) // 2
    assert float((torch.cat([feature.tokens for feature in features]) - tokens).abs().max()) <= TOLERANCE
    for layer, expected in enumerate(deepstack):
        streamed = torch.cat([feature.deepstack[layer] for feature in features])
        assert float((streamed - expected).abs().max()) <= TOLERANCE
    assert torch.equal(torch.cat([feature.pixels for feature in features]), pixels)
    assert all(feature.grid == (1, *grid[1:]) for feature in features)
    assert len(deepstack) == 3


def test_a_picture_of_another_size_is_resized_to_the_first(encoder, config):
    clip = [*pictures(3), *pictures(1, 200, 50)]
    features = stream(encoder, clip)
    pixels, grid = patchify(clip, config, smart_resize(64, 96, config))
    tokens, _ = encode_clip(encoder, pixels, grid)
    assert float((torch.cat([feature.tokens for feature in features]) - tokens).abs().max()) <= TOLERANCE


def test_segments_of_different_size_take_turns(encoder, config):
    wide, high = pictures(4), pictures(4, 96, 32)
    states = encoder.init_state(), encoder.init_state()
    turns: tuple[list[VisionFeatures], list[VisionFeatures]] = ([], [])
    for pair in zip(wide, high, strict=True):
        for picture, state, out in zip(pair, states, turns, strict=True):
            feature = encoder.step(picture, state)
            if feature is not None:
                out.append(feature)
    for clip, out in zip((wide, high), turns, strict=True):
        for alone, feature in zip(stream(encoder, clip), out, strict=True):
            assert torch.equal(alone.tokens, feature.tokens)


def test_later_pictures_change_nothing_earlier(encoder):
    clip = pictures(6)
    before = stream(encoder, clip)
    after = stream(encoder, [*clip[:4], 255 - clip[4], 255 - clip[5]])
    for index in range(2):
        assert torch.equal(before[index].tokens, after[index].tokens)
    assert not torch.equal(before[2].tokens, after[2].tokens)


def test_the_waiting_picture_is_kept_when_the_caller_reuses_its_buffer(encoder):
    clip = pictures(2)
    expected = stream(encoder, clip)[0]
    state, buffer = encoder.init_state(), clip[0].copy()
    assert encoder.step(buffer, state) is None
    assert state.nbytes == clip[0].nbytes
    buffer[:] = 0
    assert torch.equal(encoder.step(clip[1], state).tokens, expected.tokens)


def test_reset_and_finish_leave_nothing_behind(encoder):
    state = encoder.init_state()
    assert encoder.finish(state) is None
    encoder.step(pictures(1)[0], state)
    assert encoder.finish(state) is not None
    assert encoder.finish(state) is None
    encoder.step(pictures(1)[0], state)
    state.reset()
    assert state == encoder.init_state()


def test_more_than_one_patch_at_a_time_is_refused(encoder, config):
    pixels, grid = patchify(pictures(4), config)
    with pytest.raises(ValueError, match=r"\(2, 4, 6\)"):
        encoder.encode_pair(pixels, grid)
