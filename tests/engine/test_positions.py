"""Positions built segment by segment against those that transformers reads back out of the finished prompt."""

import types
from dataclasses import dataclass, field

import pytest
import torch
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as stock

from engine.interleave import AudioRun, Cursor, GridRun, order
from engine.models.hf import audio_token_count
from engine.positions import Grid, grid_time, linear, spatial
from engine.timeline import Modality, Role, Timeline

TEXT, VISION_START, VISION_END, AUDIO_START, AUDIO_END, IMAGE, VIDEO, AUDIO = 1, 52, 53, 69, 70, 55, 56, 75
PER_SECOND = 13
MERGE = 2


def get_rope_index(token_ids, *, images=(), videos=(), audios=(), seconds_per_grid=1.0, audio_in_video=False):
    """What transformers computes from the whole prompt, [3, T]; grids [t, h, w] in patches, audios in mel frames."""
    owner = stock.Qwen3OmniMoePreTrainedModelForConditionalGeneration
    config = types.SimpleNamespace(
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_token_id=AUDIO,
        vision_start_token_id=VISION_START,
        audio_start_token_id=AUDIO_START,
        position_id_per_seconds=PER_SECOND,
        audio_config=types.SimpleNamespace(n_window=50),
    )
    model = types.SimpleNamespace(spatial_merge_size=MERGE, config=config)
    model.get_llm_pos_ids_for_vision = types.MethodType(owner.get_llm_pos_ids_for_vision, model)
    positions, _ = owner.get_rope_index(
        model,
        torch.tensor([token_ids]),
        attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
        image_grid_thw=torch.tensor(images) if images else None,
        # Without a picture it would not look at the tokens at all.
        video_grid_thw=torch.tensor(videos) if videos else (None if images else torch.zeros(0, 3, dtype=torch.long)),
        audio_seqlens=torch.tensor(audios) if audios else None,
        second_per_grids=torch.tensor([seconds_per_grid] * len(videos)) if videos else None,
        use_audio_in_video=audio_in_video,
    )
    return positions[:, 0]


@dataclass
class Prompt:
    """A prompt that grows as the engine grows it, and the arguments that transformers wants for the whole."""

    seconds_per_grid: float = 1.0
    timeline: Timeline = field(default_factory=Timeline)
    stock: dict = field(default_factory=lambda: {"images": [], "videos": [], "audios": []})

    def text(self, *token_ids):
        self.timeline.open_segment(Role.USER, Modality.TEXT)
        self.timeline.append(token_ids, linear(len(token_ids)))
        self.timeline.close_segment(len(token_ids))
        return self

    def audio(self, num_mel_frames, piece=None):
        num_tokens = audio_token_count(num_mel_frames)
        self.text(AUDIO_START)
        self.timeline.open_segment(Role.USER, Modality.AUDIO)
        piece = piece or num_tokens
        for start in range(0, num_tokens, piece):
            num_new = min(piece, num_tokens - start)
            self.timeline.append([AUDIO] * num_new, linear(num_new, start))
        self.timeline.close_segment(num_tokens)
        self.stock["audios"].append(num_mel_frames)
        return self.text(AUDIO_END)

    def image(self, rows, columns):
        self.text(VISION_START)
        self.timeline.open_segment(Role.USER, Modality.PICTURE)
        grid = Grid(rows // MERGE, columns // MERGE, 0.0)
        self.timeline.append([IMAGE] * grid.num_tokens, spatial(grid))
        self.timeline.close_segment(grid.last + 1)
        self.stock["images"].append([1, rows, columns])
        return self.text(VISION_END)

    def grid(self, index, rows, columns):
        return Grid(rows // MERGE, columns // MERGE, grid_time(index, self.seconds_per_grid, PER_SECOND))

    def video(self, num_grids, rows, columns):
        self.text(VISION_START)
        self.timeline.open_segment(Role.USER, Modality.VIDEO)
        grids = [self.grid(index, rows, columns) for index in range(num_grids)]
        for grid in grids:
            self.timeline.append([VIDEO] * grid.num_tokens, spatial(grid))
        self.timeline.close_segment(grids[-1].last + 1)
        self.stock["videos"].append([num_grids, rows, columns])
        return self.text(VISION_END)

    def audio_in_video(self, num_mel_frames, num_grids, rows, columns):
        num_audio = audio_token_count(num_mel_frames)
        self.text(VISION_START, AUDIO_START)
        self.timeline.open_segment(Role.USER, Modality.AUDIO_VIDEO)
        span = 0.0
        for run in order(Cursor(), num_audio, num_grids, self.seconds_per_grid, PER_SECOND, is_complete=True)[0]:
            match run:
                case AudioRun(start, end):
                    self.timeline.append([AUDIO] * (end - start), linear(end - start, start))
                    span = end
                case GridRun(index):
                    grid = self.grid(index, rows, columns)
                    self.timeline.append([VIDEO] * grid.num_tokens, spatial(grid))
                    span = grid.last + 1
        self.timeline.close_segment(span)
        self.stock["audios"].append(num_mel_frames)
        self.stock["videos"].append([num_grids, rows, columns])
        self.stock["audio_in_video"] = True
        return self.text(AUDIO_END, VISION_END)

    def assert_equals_stock(self):
        expected = get_rope_index(list(self.timeline.token_ids), seconds_per_grid=self.seconds_per_grid, **self.stock)
        assert self.timeline.positions.shape == expected.shape
        assert torch.equal(self.timeline.positions, expected)


def test_text_counts_on_through_all_segments():
    Prompt().text(1, 2, 3).text(4).text(*range(5, 15)).assert_equals_stock()


@pytest.mark.parametrize("num_mel_frames", [1, 7, 99, 100, 101, 149, 800, 1234])
def test_audio_of_any_length_equals_stock(num_mel_frames):
    Prompt().text(1, 2, 3).audio(num_mel_frames).text(4, 5).assert_equals_stock()


@pytest.mark.parametrize("piece", [1, 5, 13, 52])
def test_audio_that_comes_in_pieces_has_the_same_positions(piece):
    Prompt().text(1, 2).audio(800, piece).text(4).assert_equals_stock()


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (4, 10), (10, 4), (2, 20), (20, 2), (12, 12)])
def test_a_picture_equals_stock(rows, columns):
    Prompt().text(1, 2, 3).image(rows, columns).text(4, 5).assert_equals_stock()


@pytest.mark.parametrize("fps", [0.5, 1, 1.5, 2, 3, 7, 29.97])
@pytest.mark.parametrize(("num_grids", "rows", "columns"), [(1, 4, 6), (1, 2, 60), (5, 8, 12), (9, 2, 40)])
def test_a_video_at_any_rate_equals_stock(fps, num_grids, rows, columns):
    Prompt(2 / fps).text(1, 2).video(num_grids, rows, columns).text(4, 5, 6).assert_equals_stock()


@pytest.mark.parametrize("fps", [0.5, 1, 1.5, 2, 2.5, 3, 4])
@pytest.mark.parametrize(
    ("seconds", "num_grids"),
    [(4.0, 4), (4.0, 1), (1.0, 6), (0.2, 9), (9.3, 5), (12.0, 12)],
    ids=["even", "one grid", "audio shorter", "audio much shorter", "audio longer", "long"],
)
def test_audio_in_video_equals_stock(fps, seconds, num_grids):
    prompt = Prompt(2 / fps).text(1, 2, 3)
    prompt.audio_in_video(int(100 * seconds), num_grids, 4, 6).text(7, 8).assert_equals_stock()


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (2, 80), (80, 2)])
@pytest.mark.parametrize(("num_mel_frames", "num_grids"), [(100, 1), (400, 2), (120, 4)])
def test_a_picture_wider_than_the_clip_is_long_equals_stock(rows, columns, num_mel_frames, num_grids):
    prompt = Prompt(1.0).text(1).audio_in_video(num_mel_frames, num_grids, rows, columns)
    prompt.text(2, 3).assert_equals_stock()


def test_a_whole_conversation_equals_stock():
    prompt = Prompt(1.0).text(1, 2, 3, 4)
    prompt.text(5).audio(333).text(6).image(8, 12).text(7, 8, 9).video(3, 8, 12).text(2)
    prompt.audio(100).text(3, 3).image(4, 4).image(2, 30).text(1)
    prompt.assert_equals_stock()


def test_several_clips_with_sound_equal_stock():
    prompt = Prompt(2 / 3).text(1, 2, 3)
    prompt.audio_in_video(250, 5, 4, 8).text(5, 6).audio(90).text(7).audio_in_video(701, 3, 8, 4).image(6, 6).text(9)
    prompt.assert_equals_stock()


def test_random_conversations_equal_stock():
    generator = torch.Generator().manual_seed(0)

    def pick(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    for _ in range(25):
        has_sound_in_video = bool(pick(0, 2))
        prompt = Prompt(2 / (1, 2, 3, 4, 1.5)[pick(0, 5)])
        for _ in range(pick(1, 7)):
            prompt.text(*[TEXT] * pick(1, 6))
            rows, columns = 2 * pick(1, 8), 2 * pick(1, 8)
            match pick(0, 4):
                case 0:
                    prompt.audio(pick(1, 900))
                case 1:
                    prompt.image(rows, columns)
                case 2 if has_sound_in_video:
                    prompt.audio_in_video(pick(1, 900), pick(1, 9), rows, columns)
                case 2:
                    prompt.video(pick(1, 9), rows, columns)
        prompt.text(TEXT, TEXT).assert_equals_stock()


def test_linear_counts_all_rows_together_from_its_start():
    assert linear(3, 5.0).tolist() == [[5.0, 6.0, 7.0]] * 3
    assert linear(0).shape == (3, 0)


def test_a_grid_is_constant_in_time_and_read_line_by_line():
    grid = Grid(height=2, width=3, time=26.0)
    assert spatial(grid).tolist() == [[26.0] * 6, [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]]
    assert grid.num_tokens == 6
    assert grid.last == 26.0
    assert Grid(4, 9, 0.0).last == 8
    assert Grid(9, 4, 0.0).last == 8


def test_a_grid_stands_at_its_own_time_however_far_from_the_start():
    times = torch.arange(5000) * torch.tensor(2 / 3) * PER_SECOND  # an hour; stock multiplies in float32, in this order
    for index in (0, 1, 3, 100, 1801, 4999):
        assert grid_time(index, 2 / 3, PER_SECOND) == times[index]
