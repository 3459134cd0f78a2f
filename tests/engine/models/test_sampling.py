import pytest
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.models import host_step
from engine.models.sampling import NOT_FINITE, Sampler, SamplingParams

VOCABULARY = 50


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def sampler(params, vocabulary=VOCABULARY, seed=0):
    return Sampler(params, vocabulary, generator(seed))


def random_logits(seed, vocabulary=VOCABULARY):
    return 4 * torch.randn(vocabulary, generator=generator(seed))


def stock(params):
    """The list that transformers' generate would build."""
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.suppressed:
        processors.append(SuppressTokensLogitsProcessor(list(params.suppressed)))
    if params.do_sample:
        processors.append(TemperatureLogitsWarper(params.temperature))
        if params.top_k:
            processors.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1.0:
            processors.append(TopPLogitsWarper(params.top_p))
    return processors


def stock_scores(params, seen, logits):
    return stock(params)(torch.tensor([seen], dtype=torch.long), logits[None].clone())[0]


def drawn(params, logits, num_draws, seed=0):
    """Relative frequencies [V] of `num_draws` choices."""
    choose = sampler(params, len(logits), seed)
    counts = torch.zeros(len(logits))
    for _ in range(num_draws):
        counts[choose(logits)] += 1
    return counts / num_draws


def within_chance(frequencies, probabilities, num_draws):
    """Whether all frequencies lie within five standard deviations, and nothing forbidden was ever drawn.

    Over 50 tokens chance leaves that band less than once in 30,000 seeds; the seeds here are fixed.
    """
    band = 5 * (probabilities * (1 - probabilities) / num_draws).sqrt() + 1e-6
    return bool(((frequencies - probabilities).abs() <= band).all())


def test_greedy_is_the_argmax():
    for seed in range(20):
        logits = random_logits(seed)
        assert sampler(SamplingParams(do_sample=False))(logits) == logits.argmax()


def test_greedy_leaves_the_warpers_out():
    params = SamplingParams(do_sample=True, temperature=3.0, top_k=2, top_p=0.2).greedy()
    assert not params.do_sample
    for seed in range(20):
        assert sampler(params)(random_logits(seed)) == random_logits(seed).argmax()


@pytest.mark.parametrize("penalty", [0.8, 1.0, 1.05, 1.5, 5.0])
@pytest.mark.parametrize("suppressed", [(), (3,), (0, 7, 49)])
@pytest.mark.parametrize("level", [-20.0, 0.0, 20.0])  # the penalty has two cases: below and above 0
def test_a_greedy_reply_equals_the_one_of_the_stock_processors(penalty, suppressed, level):
    params = SamplingParams(do_sample=False, repetition_penalty=penalty, suppressed=suppressed)
    choose, seen = sampler(params), [1, 2, 2]
    choose.reset(seen)
    for step in range(40):
        # Few distinct values: the penalty decides, so that forgetting it shows.
        logits = level + random_logits(step % 3) + 0.1 * random_logits(step)
        token = int(choose(logits))
        assert token == int(stock_scores(params, seen, logits).argmax())
        seen.append(token)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 5, 49, 50, 80])
@pytest.mark.parametrize("top_p", [1e-9, 1e-6, 0.3, 0.8, 0.999, 1.0])
def test_probabilities_equal_those_of_the_stock_warpers(temperature, top_k, top_p):
    params = SamplingParams(do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p)
    for seed in range(5):
        expected = stock_scores(params, [], random_logits(seed)).softmax(-1)
        found = sampler(params)._probabilities(random_logits(seed))
        assert torch.equal(found == 0, expected == 0)  # the same tokens are allowed
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_ties_at_the_edge_of_top_k_are_kept_as_stock_keeps_them():
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    params = SamplingParams(do_sample=True, top_k=2)
    found = sampler(params, len(logits))._probabilities(logits)
    torch.testing.assert_close(found, stock_scores(params, [], logits).softmax(-1))
    assert (found > 0).sum() == 4


def test_a_share_that_top_p_meets_exactly_is_cut_as_stock_cuts_it():
    logits = torch.zeros(4)  # shares of exactly a quarter
    params = SamplingParams(do_sample=True, top_p=0.5)
    found = sampler(params, 4)._probabilities(logits)
    assert torch.equal(found, stock_scores(params, [], logits).softmax(-1))
    assert (found > 0).sum() == 2


def test_all_rules_together_draw_as_often_as_stock_would():
    params = SamplingParams(True, temperature=1.4, top_k=12, top_p=0.9, repetition_penalty=1.3, suppressed=(4, 9))
    logits, seen, num_draws = random_logits(11) / 2, [8, 20, 31], 4_000
    expected = stock_scores(params, seen, logits).softmax(-1)
    choose, counts = sampler(params), torch.zeros(VOCABULARY)
    for _ in range(num_draws):
        choose.reset(seen)
        counts[choose(logits)] += 1
    assert 3 < (expected > 0).sum() <= 12
    assert within_chance(counts / num_draws, expected, num_draws)


def test_frequencies_of_draws_are_the_probabilities():
    logits, num_draws = random_logits(5) / 2, 20_000
    frequencies = drawn(SamplingParams(do_sample=True), logits, num_draws)
    assert within_chance(frequencies, logits.softmax(-1), num_draws)
    assert not within_chance(frequencies, (logits / 1.2).softmax(-1), num_draws)  # the bound can tell


def test_successive_draws_do_not_depend_on_each_other():
    choose, logits, num_draws = sampler(SamplingParams(do_sample=True), 2), torch.zeros(2), 4_000
    draws = torch.stack([choose(logits) for _ in range(num_draws)])
    repeats = (draws[1:] == draws[:-1]).float().mean()
    assert abs(repeats - 0.5) < 5 * 0.5 / num_draws**0.5


def test_the_same_seed_draws_the_same_and_another_differs():
    def reply(seed):
        choose = sampler(SamplingParams(do_sample=True), seed=seed)
        return [int(choose(random_logits(step))) for step in range(50)]

    assert reply(1) == reply(1)
    assert reply(1) != reply(2)


def test_greedy_takes_no_random_numbers():
    shared = generator()
    before = shared.get_state()
    Sampler(SamplingParams(do_sample=False), VOCABULARY, shared)(random_logits(0))
    assert torch.equal(shared.get_state(), before)


def test_a_restored_sampler_draws_the_same_again():
    choose, logits = sampler(SamplingParams(do_sample=True, repetition_penalty=1.5)), random_logits(0) / 4
    for _ in range(5):
        choose(logits)
    before = choose.snapshot()
    first = [int(choose(logits)) for _ in range(30)]
    choose.restore(before)
    assert [int(choose(logits)) for _ in range(30)] == first
    assert len(set(first)) > 5  # neither the penalty nor the noise alone would do


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", [0, 17, slice(None)])
def test_logits_that_are_no_numbers_give_no_token(do_sample, bad, where):
    logits = random_logits(0)
    logits[where] = bad
    params = SamplingParams(do_sample, top_k=10, top_p=0.9, repetition_penalty=1.1, suppressed=(3,))
    assert sampler(params)(logits) == NOT_FINITE


@pytest.mark.parametrize("do_sample", [False, True])
def test_no_token_comes_of_logits_that_allow_none(do_sample):
    assert sampler(SamplingParams(do_sample))(torch.full((VOCABULARY,), -torch.inf)) == NOT_FINITE


def test_logits_that_are_no_numbers_leave_later_choices_as_they_were():
    params = SamplingParams(do_sample=False, repetition_penalty=10.0)
    choose, logits = sampler(params), torch.linspace(2.0, 1.0, VOCABULARY)
    assert choose(torch.full((VOCABULARY,), torch.nan)) == NOT_FINITE
    assert choose(logits) == 0  # no token was drawn, so none may be punished


def test_reset_forgets_what_was_drawn():
    params = SamplingParams(do_sample=False, repetition_penalty=5.0)
    choose, logits = sampler(params), torch.linspace(1.1, 1.0, VOCABULARY)
    assert [int(choose(logits)) for _ in range(3)] == [0, 1, 2]
    choose.reset()
    assert int(choose(logits)) == 0
    choose.reset([0, 1])
    assert int(choose(logits)) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_precision_are_taken(dtype):
    params = SamplingParams(do_sample=True, top_k=1, repetition_penalty=1.1)
    logits = random_logits(3).to(dtype)
    assert sampler(params)(logits) == logits.argmax()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.0),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -2.0),
        ("repetition_penalty", float("nan")),
    ],
)
def test_a_setting_out_of_range_is_named_with_its_value(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        SamplingParams(do_sample=True, **{name: value})


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(False),
        SamplingParams(False, repetition_penalty=1.3, suppressed=(1, 5)),
        SamplingParams(True, 0.9, 20, 1.0, 1.05, (3,)),
        SamplingParams(True, 1.4, 0, 0.7),
        SamplingParams(True, 1.0, 10, 0.8),
    ],
)
def test_the_host_chooses_what_the_device_chooses(params, monkeypatch):
    on_host = Sampler(params, 50, torch.Generator().manual_seed(3))
    monkeypatch.setattr(host_step, "runs_on_host", lambda dtype, device: False)
    on_device = Sampler(params, 50, torch.Generator().manual_seed(3))
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(4)) * 2
    assert [int(on_host(row)) for row in logits] == [int(on_device(row)) for row in logits]
