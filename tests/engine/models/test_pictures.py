"""Patches are the ones that transformers' own image processor makes, and odd pictures are refused with a reason."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from engine.models.pictures import PictureConfig, PictureError, patchify, smart_resize, to_rgb

PREPROCESSOR = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 32 * 32,
    "max_pixels": 160 * 160,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.25, 0.2],
}


@pytest.fixture
def config() -> PictureConfig:
    return PictureConfig.from_checkpoint(PREPROCESSOR)


@pytest.fixture(scope="module")
def processor() -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(**PREPROCESSOR)


def noise(*shape: int, dtype: type = np.uint8) -> NDArray[np.generic]:
    return np.random.default_rng(0).integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


@pytest.mark.parametrize(
    ("height", "width"),
    [(91, 161), (27, 27), (1, 1), (480, 640), (20, 4000), (64, 64), (3, 400), (15, 2000)],
)
def test_patches_are_those_of_the_image_processor(config, processor, height, width):
    picture = noise(height, width, 3)
    expected = processor(Image.fromarray(picture), return_tensors="pt")
    pixels, grid = patchify([picture], config)
    assert [list(grid)] == expected["image_grid_thw"].tolist()
    assert pixels.dtype == torch.float32
    assert torch.equal(pixels, expected["pixel_values"])


@pytest.mark.parametrize("shape", [(91, 161), (91, 161, 1), (91, 161, 4)])
def test_grey_and_transparent_pictures_become_what_the_processor_makes_of_them(config, processor, shape):
    picture = noise(*shape)
    expected = processor(Image.fromarray(picture.squeeze()), return_tensors="pt")["pixel_values"]
    pixels, _ = patchify([to_rgb(picture)], config)
    assert torch.equal(pixels, expected)


def test_16_bits_are_scaled_to_8():
    levels = np.array([[0, 128, 129, 257, 32768, 65406, 65535]], np.uint16)
    assert to_rgb(levels)[0, :, 0].tolist() == [0, 0, 1, 1, 128, 254, 255]
    assert to_rgb(noise(5, 7, 4, dtype=np.uint16)).shape == (5, 7, 3)


def test_an_rgb_picture_is_passed_on_unchanged():
    picture = noise(5, 7, 3)
    assert np.array_equal(to_rgb(picture), picture)


@pytest.mark.parametrize(
    ("picture", "reason"),
    [
        (np.zeros((4, 4, 3), np.float32), "type float32"),
        (np.zeros((4, 4, 2), np.uint8), r"shape \[4, 4, 2\]"),
        (np.zeros((4,), np.uint8), r"shape \[4\]"),
        (np.zeros((0, 4, 3), np.uint8), r"shape \[0, 4, 3\]"),
    ],
)
def test_what_is_no_picture_is_refused_by_name(picture, reason):
    with pytest.raises(PictureError, match=reason):
        to_rgb(picture)


@pytest.mark.parametrize(("height", "width", "reason"), [(20, 8001, r"8001x20.*400\.1 times"), (0, 20, "no pixels")])
def test_an_impossible_size_is_refused(config, height, width, reason):
    with pytest.raises(PictureError, match=reason):
        smart_resize(height, width, config)


def test_a_ratio_of_200_is_still_possible(config):
    assert smart_resize(20, 4000, config)[0] == 32


def test_a_size_off_the_grid_is_refused(config):
    with pytest.raises(PictureError, match="multiple of 32"):
        patchify([noise(64, 64, 3)], config, (64, 65))


def test_no_pictures_are_refused(config):
    with pytest.raises(PictureError, match="at least one"):
        patchify([], config)


def test_a_clip_is_cut_in_pairs_and_its_odd_picture_repeated(config):
    pictures = [noise(64, 96, 3), noise(64, 96, 3) // 2, noise(64, 96, 3) // 3]
    pixels, grid = patchify(pictures, config)
    assert grid == (2, 4, 6)
    first, _ = patchify(pictures[:2], config)
    last, _ = patchify([pictures[2], pictures[2]], config)
    assert torch.equal(pixels, torch.cat((first, last)))
    # within a patch the two pictures follow each other per channel
    halves = first.unflatten(1, (3, 2, -1))
    alone, _ = patchify(pictures[1:2], config)
    assert torch.equal(halves[:, :, 1], alone.unflatten(1, (3, 2, -1))[:, :, 0])


def test_later_pictures_take_the_size_asked_for(config):
    _, grid = patchify([noise(64, 96, 3), noise(200, 30, 3)], config)
    assert grid == (1, 4, 6)
    _, grid = patchify([noise(200, 30, 3)], config, (32, 64))
    assert grid == (1, 2, 4)


def test_newer_preprocessor_files_are_read_too(config):
    newer = {key: value for key, value in PREPROCESSOR.items() if "pixels" not in key}
    newer["size"] = {"shortest_edge": 32 * 32, "longest_edge": 160 * 160}
    assert PictureConfig.from_checkpoint(newer) == config
