import pytest
import torch

from engine.kvcache.store import KVStore

LAYERS, HEADS, WIDTH = 3, 2, 4


def new_store(capacity=4, dtype=torch.float32):
    return KVStore(LAYERS, HEADS, WIDTH, dtype=dtype, device=torch.device("cpu"), capacity=capacity)


def rows(num_tokens, seed):
    """Keys and values of every layer, [layers, 2, H, n, D]."""
    return torch.randn(LAYERS, 2, HEADS, num_tokens, WIDTH, generator=torch.Generator().manual_seed(seed))


def append(store, new):
    """Write `new` as a forward pass does; return what each layer saw, [layers, 2, H, T, D]."""
    store.reserve(new.shape[3])
    seen = torch.stack([torch.stack(store.write(layer, *new[layer])) for layer in range(LAYERS)])
    store.advance(new.shape[3])
    return seen


def held(store):
    """All rows, read by writing none."""
    return torch.stack([torch.stack(store.write(layer, *rows(0, 0)[layer])) for layer in range(LAYERS)])


def test_every_layer_sees_the_past_and_the_new_rows():
    store, everything = new_store(), rows(9, 1)
    for start, end in ((0, 1), (1, 4), (4, 9)):
        assert torch.equal(append(store, everything[..., start:end, :]), everything[..., :end, :])
        assert store.length == end


def test_growing_keeps_the_rows():
    store, everything = new_store(capacity=2), rows(100, 2)
    append(store, everything[..., :2, :])
    assert store.capacity == 2
    append(store, everything[..., 2:3, :])
    assert store.capacity == 4
    append(store, everything[..., 3:, :])  # several doublings at once
    assert store.capacity == 128
    assert torch.equal(held(store), everything)


def test_room_that_is_there_is_not_made_again():
    store = new_store(capacity=8)
    append(store, rows(5, 0))
    store.reserve(3)
    assert store.capacity == 8
    store.reserve(4)
    assert store.capacity == 16
    assert store.length == 5


def test_a_pass_that_fails_half_way_leaves_nothing_behind():
    store, everything = new_store(capacity=8), rows(5, 3)
    append(store, everything[..., :3, :])
    store.write(0, *rows(2, 4)[0])  # the second layer never came
    append(store, everything[..., 3:, :])
    assert torch.equal(held(store), everything)


@pytest.mark.parametrize("length", [0, 1, 4, 6])
def test_crop_forgets_the_tail_and_what_follows_takes_its_place(length):
    store, first, second = new_store(), rows(6, 5), rows(7, 6)
    append(store, first)
    store.crop(length)
    assert store.length == length
    expected = torch.cat((first[..., :length, :], second), dim=3)
    assert torch.equal(append(store, second), expected)


@pytest.mark.parametrize("length", [-1, 7])
def test_crop_to_a_length_that_never_was_is_refused(length):
    store = new_store()
    append(store, rows(6, 5))
    with pytest.raises(AssertionError, match=f"6 tokens to {length}"):
        store.crop(length)


def test_reset_forgets_everything():
    store, again = new_store(), rows(3, 8)
    append(store, rows(4, 7))
    store.reset()
    assert store.length == 0
    assert torch.equal(append(store, again), again)


def test_a_row_written_at_an_index_equals_a_row_written_behind():
    behind, at, everything = new_store(capacity=8), new_store(capacity=8), rows(6, 9)
    for store in (behind, at):
        append(store, everything[..., :4, :])
    for token in (4, 5):
        new = everything[..., token : token + 1, :]
        append(behind, new)
        for layer in range(LAYERS):
            buffers = at.write_at(layer, torch.tensor([token]), *new[layer])
            assert all(buffer.shape == (HEADS, 8, WIDTH) for buffer in buffers)
            assert torch.equal(torch.stack(buffers)[..., : token + 1, :], held(behind)[layer])
        at.advance(1)
    assert torch.equal(held(at), held(behind))


@pytest.mark.parametrize(("dtype", "num_bytes"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float64, 8)])
def test_bytes_are_those_of_the_whole_buffer(dtype, num_bytes):
    store = new_store(capacity=4, dtype=dtype)
    assert store.nbytes == LAYERS * 2 * HEADS * 4 * WIDTH * num_bytes
    store.reserve(5)
    assert store.nbytes == LAYERS * 2 * HEADS * 8 * WIDTH * num_bytes
    append(store, rows(5, 0).to(dtype))
    store.reset()
    assert store.nbytes == LAYERS * 2 * HEADS * 8 * WIDTH * num_bytes  # kept for the next conversation
