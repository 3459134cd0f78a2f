"""The decoder stack in pieces against the stock module over the whole sequence, in float64."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kvcache.store import KVStore
from engine.loader import load_model
from engine.models import hf
from engine.models.decoder import Decoder, Deepstack
from engine.models.layers import MoeMlp

TOLERANCE = 1e-10
NUM_ROWS = 23
DEEPSTACK_LAYERS = 3


@pytest.fixture(scope="module")
def stock(tiny_folder) -> hf.OmniModel:
    """The stock model; wrappers get a copy, so that nothing they do to their weights can hide."""
    model = load_model(tiny_folder, device="cpu", dtype="float64", on_progress=lambda *_: None).model
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms of one would let a wrapper mix them up
            parameter.data += 0.5 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


@pytest.fixture(scope="module")
def wrapped(stock: hf.OmniModel) -> hf.OmniModel:
    return copy.deepcopy(stock)


def thinker_of(model: hf.OmniModel) -> Any:
    return hf.thinker_decoder(model)


def talker_of(model: hf.OmniModel) -> Any:
    return model.talker.model


STACKS = {"thinker": thinker_of, "talker": talker_of}


@dataclass(frozen=True)
class Prompt:
    """Random rows at positions as a prompt has them: text, a picture, audio, text."""

    rows: Tensor  # [n, H]
    positions: Tensor  # [3, n]
    visual: Tensor  # [n] bool
    features: tuple[Tensor, ...]  # per layer [m, H]

    def deepstack(self, start: int, end: int) -> Deepstack | None:
        """What the piece of rows `start` to `end` - 1 brings."""
        rows = self.visual[start:end].nonzero()[:, 0]
        if not len(rows):
            return None
        before = int(self.visual[:start].sum())
        return Deepstack(rows, tuple(layer[before : before + len(rows)] for layer in self.features))


def prompt(width: int, seed: int = 0) -> Prompt:
    generator = torch.Generator().manual_seed(seed)
    picture = torch.stack((torch.full((6,), 5.0), torch.arange(6) // 3 + 5.0, torch.arange(6) % 3 + 5.0))
    later = torch.arange(NUM_ROWS - 11) + 8.5  # fractions, as a video between two seconds has
    positions = torch.cat((torch.arange(5.0).expand(3, -1), picture, later.expand(3, -1)), dim=1)
    visual = torch.zeros(NUM_ROWS, dtype=torch.bool)
    visual[5:11] = True
    features = tuple(torch.randn(6, width, generator=generator, dtype=torch.float64) for _ in range(DEEPSTACK_LAYERS))
    rows = torch.randn(NUM_ROWS, width, generator=generator, dtype=torch.float64)
    return Prompt(rows, positions, visual, features)


def one_shot(module: Any, given: Prompt, num_rows: int = NUM_ROWS, *, has_deepstack: bool = False) -> Any:
    """The stock module over the first `num_rows` rows at once."""
    visual = given.visual[:num_rows]
    extra = {}
    if has_deepstack:
        extra = {
            "visual_pos_masks": visual[None],
            "deepstack_visual_embeds": [layer[: int(visual.sum())] for layer in given.features],
        }
    with torch.no_grad():
        return module(
            inputs_embeds=given.rows[None, :num_rows],
            position_ids=given.positions[:, None, :num_rows],
            output_hidden_states=True,
            use_cache=False,
            **extra,
        )


def pieces(start: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    for first in range(start, end, size):
        yield first, min(end, first + size)


def feed(
    decoder: Decoder, store: KVStore, given: Prompt, cuts: Iterator[tuple[int, int]], *, has_deepstack: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Run the pieces; return the hidden states and tapped states of all of them."""
    hidden, tapped = [], []
    with torch.no_grad():
        for start, end in cuts:
            deepstack = given.deepstack(start, end) if has_deepstack else None
            out = decoder.forward(given.rows[start:end], given.positions[:, start:end], store, deepstack)
            hidden.append(out.hidden)
            tapped.append(out.tapped)
    return torch.cat(hidden), None if tapped[0] is None else torch.cat(tapped)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype == torch.float64
    error = float((found - expected).abs().max())
    assert error < TOLERANCE, f"differs by {error:.1e}"


@pytest.mark.parametrize("size", [1, 7, NUM_ROWS])
@pytest.mark.parametrize("stack", STACKS)
def test_any_split_of_a_prompt_equals_the_stock_module(stock, wrapped, stack, size):
    module = STACKS[stack](stock)
    given = prompt(module.config.hidden_size)
    decoder = Decoder(STACKS[stack](wrapped))
    store = decoder.new_store(capacity=4)  # it has to grow on the way
    hidden, tapped = feed(decoder, store, given, pieces(0, NUM_ROWS, size))
    assert_close(hidden, one_shot(module, given).last_hidden_state[0])
    assert tapped is None
    assert store.length == NUM_ROWS


@pytest.mark.parametrize("size", [1, 4, 7, NUM_ROWS])
def test_pictures_reach_the_first_layers_in_any_split(stock, wrapped, size):
    module = thinker_of(stock)
    given = prompt(module.config.hidden_size)
    decoder = Decoder(thinker_of(wrapped))
    hidden, _ = feed(decoder, decoder.new_store(), given, pieces(0, NUM_ROWS, size), has_deepstack=True)
    expected = one_shot(module, given, has_deepstack=True).last_hidden_state[0]
    assert_close(hidden, expected)
    plain = one_shot(module, given).last_hidden_state[0]
    assert (plain - expected).abs().max() > 1e-3  # the features matter
    assert torch.equal(plain[:5], expected[:5])  # and only from where they stand


@pytest.mark.parametrize("layer", [1, 4, 5])
@pytest.mark.parametrize("size", [1, 7, NUM_ROWS])
def test_the_tapped_layer_is_that_of_the_stock_module(stock, wrapped, size, layer):
    module = thinker_of(stock)
    given = prompt(module.config.hidden_size)
    decoder = Decoder(thinker_of(wrapped), tapped_layer=layer)
    _, tapped = feed(decoder, decoder.new_store(), given, pieces(0, NUM_ROWS, size))
    assert tapped is not None, f"layer {layer} was not tapped"
    assert_close(tapped, one_shot(module, given).hidden_states[layer][0])


def test_the_checkpoints_tapped_layer_carries_what_pictures_added(stock, wrapped):
    """Where `accept_hidden_layer` lies behind the layers that take pictures, as in every released checkpoint."""
    layer = stock.config.talker_config.accept_hidden_layer
    assert layer > DEEPSTACK_LAYERS
    given = prompt(thinker_of(stock).config.hidden_size)
    decoder = Decoder(thinker_of(wrapped), tapped_layer=layer)
    _, tapped = feed(decoder, decoder.new_store(), given, pieces(0, NUM_ROWS, 7), has_deepstack=True)
    assert_close(tapped, one_shot(thinker_of(stock), given, has_deepstack=True).hidden_states[layer][0])


@pytest.mark.parametrize("kept", [0, 1, 8, 15])
@pytest.mark.parametrize("stack", STACKS)
def test_what_is_cropped_and_fed_again_leaves_no_trace(stock, wrapped, stack, kept):
    module = STACKS[stack](stock)
    given, other = prompt(module.config.hidden_size), prompt(module.config.hidden_size, seed=9)
    decoder = Decoder(STACKS[stack](wrapped))
    store = decoder.new_store()
    feed(decoder, store, given, pieces(0, kept, 7) if kept else iter([(0, 1)]))
    store.crop(kept)
    feed(decoder, store, other, pieces(kept, NUM_ROWS, 7))  # a guess
    store.crop(kept)
    hidden, _ = feed(decoder, store, given, pieces(kept, NUM_ROWS, 5))
    assert_close(hidden, one_shot(module, given).last_hidden_state[0, kept:])


@pytest.mark.parametrize("stack", STACKS)
def test_later_rows_do_not_change_earlier_ones(stock, wrapped, stack):
    module = STACKS[stack](stock)
    given = prompt(module.config.hidden_size)
    decoder = Decoder(STACKS[stack](wrapped))
    hidden, _ = feed(decoder, decoder.new_store(), given, pieces(0, NUM_ROWS, NUM_ROWS))
    for num_rows in (1, 6, 20):
        assert_close(hidden[:num_rows], one_shot(module, given, num_rows).last_hidden_state[0])


@pytest.mark.parametrize("stack", STACKS)
def test_a_step_of_fixed_shape_equals_an_ordinary_one(stock, wrapped, stack):
    module = STACKS[stack](stock)
    given = prompt(module.config.hidden_size)
    decoder = Decoder(STACKS[stack](wrapped))
    store = decoder.new_store(capacity=64)
    feed(decoder, store, prompt(module.config.hidden_size, seed=4), pieces(0, NUM_ROWS, 9))  # what a crop left behind
    store.crop(0)
    feed(decoder, store, given, pieces(0, 12, 12))
    hidden = []
    with torch.no_grad():
        for row in range(12, NUM_ROWS):
            position = given.positions[:, row : row + 1]
            hidden.append(decoder.step_static(given.rows[row : row + 1], position, torch.tensor([row]), store))
            store.advance(1)
    assert_close(torch.cat(hidden), one_shot(module, given).last_hidden_state[0, 12:])
    # The two kinds of step can follow each other.
    store.crop(20)
    tail, _ = feed(decoder, store, given, pieces(20, NUM_ROWS, 1))
    assert_close(tail, torch.cat(hidden)[-3:])


def test_positions_of_one_row_are_those_of_three_equal_rows(wrapped):
    decoder = Decoder(thinker_of(wrapped))
    given = prompt(decoder.hidden_size)
    flat = torch.arange(NUM_ROWS)
    with torch.no_grad():
        three = decoder.forward(given.rows, flat.expand(3, -1), decoder.new_store()).hidden
        one = decoder.forward(given.rows, flat, decoder.new_store()).hidden
    assert torch.equal(three, one)


def test_the_three_rows_of_positions_all_matter(stock, wrapped):
    module = thinker_of(stock)
    given = prompt(module.config.hidden_size)
    decoder = Decoder(thinker_of(wrapped))
    hidden = {}
    for row in range(3):
        positions = given.positions.clone()
        positions[row, 7:] += 3
        moved = Prompt(given.rows, positions, given.visual, given.features)
        hidden[row], _ = feed(decoder, decoder.new_store(), moved, pieces(0, NUM_ROWS, 7))
        assert_close(hidden[row], one_shot(module, moved).last_hidden_state[0])
    assert not torch.allclose(hidden[0], hidden[1])
    assert not torch.allclose(hidden[1], hidden[2])


def test_the_weights_of_the_module_are_views_of_the_fused_ones(stock):
    """Nothing doubles in memory, and the stock module still computes what it did."""
    module = copy.deepcopy(talker_of(stock))
    given = prompt(module.config.hidden_size)
    before = one_shot(module, given).last_hidden_state
    num_elements = sum(parameter.numel() for parameter in module.parameters())
    decoder = Decoder(module)
    assert torch.equal(one_shot(module, given).last_hidden_state, before)
    assert sum(parameter.numel() for parameter in module.parameters()) == num_elements
    qkv = decoder._layers[0].qkv
    assert module.layers[0].self_attn.k_proj.weight.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()


@pytest.mark.parametrize("stack", STACKS)
def test_experts_one_row_at_a_time_equal_the_stock_block(stock, wrapped, stack):
    block = STACKS[stack](stock).layers[1].mlp
    mlp = MoeMlp(STACKS[stack](wrapped).layers[1].mlp)
    rows = torch.randn(40, STACKS[stack](stock).config.hidden_size, generator=torch.Generator().manual_seed(5)).double()
    with torch.no_grad():
        out = block(rows[None])
        expected = (out[0] if isinstance(out, tuple) else out)[0]
        assert_close(mlp(rows), expected)
        assert_close(torch.cat([mlp(row[None]) for row in rows]), expected)
        assert len(mlp._route(rows)[1].unique()) > 4  # several experts had work


@pytest.mark.parametrize("stack", STACKS)
def test_a_token_stepped_on_the_host_is_one_prefilled(stock, wrapped, stack):
    """`step` in numpy against the stock module; norms are float32 on both sides, so they agree to its rounding."""
    module = STACKS[stack](stock)
    decoder = Decoder(STACKS[stack](wrapped))
    assert decoder.host is not None
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(30, module.config.hidden_size, generator=generator).double()
    positions = torch.arange(30.0).expand(3, -1)
    reference, store = decoder.new_store(), decoder.new_store()
    with torch.no_grad():
        expected = decoder.forward(rows, positions, reference).hidden
        decoder.forward(rows[:5], positions[:, :5], store)
        stepped = [decoder.step(rows[i : i + 1], positions[:, i : i + 1], store) for i in range(5, 30)]
    assert store.length == 30
    assert (torch.cat(stepped) - expected[5:]).abs().max() < 1e-5
    assert (store.rows[..., :30, :] - reference.rows[..., :30, :]).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_other_precisions_stay_near_the_stock_module(stock, dtype):
    # Against itself in one piece: in half precision another order of sums rounds otherwise.
    module = copy.deepcopy(thinker_of(stock)).to(dtype)
    decoder = Decoder(module)
    given = prompt(module.config.hidden_size)
    rows = given.rows.to(dtype)
    low = Prompt(rows, given.positions, given.visual, given.features)
    hidden, _ = feed(decoder, decoder.new_store(), low, pieces(0, NUM_ROWS, 7))
    assert hidden.dtype == dtype
    expected = one_shot(module, low).last_hidden_state[0].double()
    relative = float((hidden.double() - expected).norm() / expected.norm())
    assert relative < {torch.bfloat16: 0.1, torch.float16: 0.02, torch.float32: 1e-5}[dtype]
