import pytest
import torch

from engine.positions import Grid, linear, spatial
from engine.timeline import INITIAL_TOKENS, Modality, Role, Segment, Timeline


def write(timeline, *token_ids, role=Role.USER):
    timeline.open_segment(role, Modality.TEXT)
    positions = timeline.append(token_ids, linear(len(token_ids)))
    timeline.close_segment(len(token_ids))
    return positions


def test_an_empty_timeline_holds_nothing():
    timeline = Timeline()
    assert (len(timeline), timeline.token_ids, timeline.segments) == (0, (), ())
    assert timeline.positions.shape == (3, 0)


def test_segments_follow_each_other_without_a_gap():
    timeline = Timeline()
    assert write(timeline, 5, 6, role=Role.SYSTEM).tolist() == [[0, 1]] * 3
    assert write(timeline, 7).tolist() == [[2]] * 3
    assert timeline.token_ids == (5, 6, 7)
    assert timeline.positions.tolist() == [[0, 1, 2]] * 3
    assert timeline.segments == (
        Segment(Role.SYSTEM, Modality.TEXT, start=0, base=0.0),
        Segment(Role.USER, Modality.TEXT, start=2, base=2.0),
    )


def test_the_next_segment_begins_where_the_last_one_said():
    timeline = Timeline()
    write(timeline, 1)
    timeline.open_segment(Role.USER, Modality.VIDEO)
    grid = Grid(2, 2, 6.5)
    assert timeline.append([9] * 4, spatial(grid)).tolist() == [[7.5] * 4, [1, 1, 2, 2], [1, 2, 1, 2]]
    timeline.close_segment(grid.last + 1)
    assert write(timeline, 2).tolist() == [[8.5]] * 3  # more positions than tokens


def test_a_segment_grows_piece_by_piece_from_one_base():
    timeline = Timeline()
    write(timeline, 1, 2, 3)
    timeline.open_segment(Role.USER, Modality.AUDIO)
    for start in (0, 4, 5):
        timeline.append([8] * 2, linear(2, start))
    assert timeline.positions[0].tolist() == [0, 1, 2, 3, 4, 7, 8, 8, 9]
    assert timeline.segments[-1] == Segment(Role.USER, Modality.AUDIO, start=3, base=3.0)


def test_a_long_timeline_keeps_what_it_had():
    timeline, expected = Timeline(), []
    timeline.open_segment(Role.USER, Modality.AUDIO)
    pieces = (INITIAL_TOKENS - 1, 1, 1, 3 * INITIAL_TOKENS, 7)  # to the edge, over it, and over it twice at once
    for num_tokens in pieces:
        start = len(timeline)
        timeline.append(range(start, start + num_tokens), linear(num_tokens, start))
        expected += range(start, start + num_tokens)
    assert len(timeline) == sum(pieces)
    assert timeline.token_ids == tuple(expected)
    assert torch.equal(timeline.positions, torch.tensor([expected] * 3, dtype=torch.float32))


def test_truncate_forgets_what_came_after_the_mark():
    timeline = Timeline()
    write(timeline, 1, 2)
    mark = timeline.mark()
    before = timeline.positions.clone()
    write(timeline, 3, 4, 5)
    timeline.open_segment(Role.ASSISTANT, Modality.TEXT)
    timeline.append([6], linear(1))
    timeline.truncate(mark)
    assert (len(timeline), timeline.token_ids, len(timeline.segments)) == (2, (1, 2), 1)
    assert torch.equal(timeline.positions, before)
    assert timeline.mark() == mark
    assert write(timeline, 7).tolist() == [[2]] * 3
    assert timeline.token_ids == (1, 2, 7)


def test_truncate_inside_a_segment_keeps_the_segment_open():
    timeline = Timeline()
    write(timeline, 1)
    timeline.open_segment(Role.USER, Modality.AUDIO)
    timeline.append([8, 8], linear(2))
    mark = timeline.mark()
    timeline.append([9, 9, 9], linear(3, 2))
    timeline.close_segment(5)
    write(timeline, 4)
    timeline.truncate(mark)
    assert timeline.append([7], linear(1, 2)).tolist() == [[3]] * 3
    timeline.close_segment(3)
    assert write(timeline, 2).tolist() == [[4]] * 3
    assert timeline.token_ids == (1, 8, 8, 7, 2)


@pytest.mark.parametrize("num_rounds", [3])
def test_a_timeline_rolled_back_again_and_again_equals_one_that_never_was(num_rounds):
    rolled, straight = Timeline(), Timeline()
    for number in range(num_rounds):
        mark = rolled.mark()
        write(rolled, *[99] * (INITIAL_TOKENS + number))
        rolled.truncate(mark)
        for timeline in (rolled, straight):
            write(timeline, number, number + 1)
    assert rolled.token_ids == straight.token_ids
    assert torch.equal(rolled.positions, straight.positions)
    assert rolled.segments == straight.segments
