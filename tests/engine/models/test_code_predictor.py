"""The code predictor's own loop against `generate` of the stock module, in float64."""

import copy

import pytest
import torch
from torch import Tensor

from engine.loader import load_model
from engine.models import hf
from engine.models.code_predictor import CodePredictor, Frame
from engine.models.sampling import NOT_FINITE, Sampler, SamplingParams

NUM_CODES = 16
NUM_FRAMES = 20
GREEDY = SamplingParams(do_sample=False)


@pytest.fixture(scope="module")
def stock(tiny_folder) -> hf.OmniModel:
    """The stock model, with norms that are not all one."""
    model = load_model(tiny_folder, device="cpu", dtype="float64", on_progress=lambda *_: None).model
    generator = torch.Generator().manual_seed(2)
    for parameter in model.talker.code_predictor.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.5 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


@pytest.fixture(scope="module")
def predictor(stock) -> CodePredictor:
    talker = copy.deepcopy(stock.talker)
    return CodePredictor(talker.code_predictor, talker.model.codec_embedding.weight)


def sampler(predictor: CodePredictor, params: SamplingParams = GREEDY, seed: int = 0) -> Sampler:
    return Sampler(params, predictor.vocabulary, torch.Generator().manual_seed(seed))


def frame_inputs(stock: hf.OmniModel, seed: int) -> tuple[Tensor, Tensor]:
    """A Talker's hidden state [1, H] and a code 0 []."""
    generator = torch.Generator().manual_seed(seed)
    width = stock.talker.config.text_config.hidden_size
    hidden = torch.randn(1, width, generator=generator, dtype=torch.float64)
    codebook = stock.talker.config.code_predictor_config.vocab_size
    return hidden, torch.randint(codebook, (), generator=generator)


def generated(stock: hf.OmniModel, hidden: Tensor, first_code: Tensor) -> tuple[list[int], Tensor]:
    """The 15 codes, and the sum that the Talker takes back, as `prepare_inputs_for_generation` computes it."""
    talker = stock.talker
    with torch.no_grad():
        first = talker.get_input_embeddings()(first_code.view(1, 1))
        result = talker.code_predictor.generate(
            inputs_embeds=torch.cat((hidden[None], first), dim=1),
            max_new_tokens=NUM_CODES - 1,
            do_sample=False,
            output_hidden_states=True,
            return_dict_in_generate=True,
        )
        middle = [states[0] for states in result.hidden_states[1:]]
        last = talker.code_predictor.get_input_embeddings()[-1](result.sequences[..., -1:])
    return result.sequences[0].tolist(), torch.cat([first, *middle, last], dim=1).sum(1)


@pytest.mark.parametrize("seed", range(NUM_FRAMES))
def test_greedy_codes_and_their_embedding_equal_generate(stock, predictor, seed):
    hidden, first_code = frame_inputs(stock, seed)
    frame = predictor.step(hidden, first_code, sampler(predictor))
    codes, embedding = generated(stock, hidden, first_code)
    assert frame.codes.tolist() == [int(first_code), *codes]
    assert frame.embedding.shape == embedding.shape
    assert float((frame.embedding - embedding).abs().max()) < 1e-10


def test_the_frames_compared_are_not_all_alike(stock, predictor):
    frames = [predictor.step(*frame_inputs(stock, seed), sampler(predictor)).codes for seed in range(NUM_FRAMES)]
    assert len({tuple(codes.tolist()) for codes in frames}) == NUM_FRAMES
    assert all(len(codes.unique()) > 4 for codes in frames)


def test_a_frame_does_not_depend_on_the_frames_before(stock, predictor):
    inputs = frame_inputs(stock, 0)
    alone = predictor.step(*inputs, sampler(predictor))
    kept = alone.codes.clone(), alone.embedding.clone()
    for seed in range(1, 4):
        predictor.step(*frame_inputs(stock, seed), sampler(predictor))
    assert torch.equal(alone.codes, kept[0])  # nor is it overwritten by those after
    assert torch.equal(alone.embedding, kept[1])
    again = predictor.step(*inputs, sampler(predictor))
    assert torch.equal(again.codes, kept[0])
    assert torch.equal(again.embedding, kept[1])


def test_code_0_may_be_a_special_of_the_talker(stock, predictor):
    """The Talker's table is larger than a codebook: code 0 is looked up there."""
    hidden, _ = frame_inputs(stock, 0)
    special = torch.tensor(stock.talker.config.codec_eos_token_id)
    assert special >= predictor.vocabulary
    frame = predictor.step(hidden, special, sampler(predictor))
    assert frame.codes.tolist()[1:] == generated(stock, hidden, special)[0]


def test_sampled_codes_follow_the_seed(stock, predictor):
    params = SamplingParams(do_sample=True, temperature=1.5, top_k=50, top_p=0.95)

    def drawn(seed: int) -> list[int]:
        codes = predictor.step(*frame_inputs(stock, 0), sampler(predictor, params, seed)).codes.tolist()
        assert all(0 <= code < predictor.vocabulary for code in codes)
        return codes

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert drawn(1)[0] == drawn(2)[0]


def test_the_embedding_is_that_of_the_codes_that_were_drawn(stock, predictor):
    params = SamplingParams(do_sample=True, temperature=2.0)
    frame = predictor.step(*frame_inputs(stock, 3), sampler(predictor, params, 5))
    tables = stock.talker.code_predictor.get_input_embeddings()
    expected = stock.talker.get_input_embeddings().weight[frame.codes[0]].clone()
    for table, code in zip(tables, frame.codes[1:], strict=True):
        expected += table.weight[code]
    assert float((frame.embedding[0] - expected).abs().max()) < 1e-10


def test_a_hidden_state_that_is_no_number_is_reported_and_not_fatal(stock, predictor):
    hidden, first_code = frame_inputs(stock, 0)
    frame: Frame = predictor.step(hidden * torch.nan, first_code, sampler(predictor))
    assert frame.codes[1:].tolist() == [NOT_FINITE] * (NUM_CODES - 1)
    after = predictor.step(hidden, first_code, sampler(predictor))
    assert after.codes[1:].tolist() == generated(stock, hidden, first_code)[0]
    assert after.embedding.isfinite().all()
