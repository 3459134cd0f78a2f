"""Chooses a token from logits: the checkpoint's sampling rules, one seeded generator, nothing copied to the host.

The rules and their order are those of `transformers`' generate: repetition penalty, suppressed tokens, then (when
sampling) temperature, top-k, top-p. Greedy applies the first two only.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.models import host_step

NOT_FINITE = -1  # in place of a token when the logits hold NaN or infinity


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens of one stage are chosen. `top_k` 0 and `top_p` 1.0 mean no limit."""

    do_sample: bool
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    suppressed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}; it must be above 0 (for greedy use do_sample=False)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be in (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (no limit) or more")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}; it must be above 0 (1 is off)")

    def greedy(self) -> "SamplingParams":
        """The same rules with the most probable token always chosen."""
        return replace(self, do_sample=False)


@dataclass(frozen=True, slots=True, eq=False)
class SamplerState:
    """Where a sampler stands."""

    seen: Tensor
    generator: Tensor


class Sampler:
    """Draws tokens by `params`; remembers which it has drawn, for the repetition penalty."""

    def __init__(self, params: SamplingParams, vocabulary: int, generator: torch.Generator) -> None:
        self._params = params
        self.generator = generator
        device = generator.device
        self._seen = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self._blocked = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        if params.suppressed:
            self._blocked[list(params.suppressed)] = True
        self._noise = torch.ones(vocabulary, device=device)
        self._remembers = params.repetition_penalty != 1.0
        self._on_host = host_step.runs_on_host(torch.float32, device)

    def reset(self, seen: Iterable[int] = ()) -> None:
        """Forget what was drawn; count the tokens `seen` as drawn already (a prompt)."""
        self._seen.zero_()
        if self._remembers and (tokens := list(seen)):
            self._seen[tokens] = True

    def snapshot(self) -> SamplerState:
        """What was drawn so far, and the generator's state."""
        return SamplerState(self._seen.clone(), self.generator.get_state())

    def restore(self, state: SamplerState) -> None:
        """Return to `state`."""
        self._seen.copy_(state.seen)
        self.generator.set_state(state.generator)

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the chosen token, a device tensor [], of `logits` [V]; NOT_FINITE where there is no choice."""
        if self._on_host:
            return torch.tensor(self.choose_on_host(logits.float().numpy()))
        scores = logits.float()
        params = self._params
        if self._remembers:
            penalty = params.repetition_penalty
            punished = torch.where(scores < 0, scores * penalty, scores / penalty)
            scores = torch.where(self._seen, punished, scores)
        if params.suppressed:
            scores = scores.masked_fill(self._blocked, -torch.inf)
        best, token = scores.max(dim=-1)
        is_finite = best.isfinite()
        if params.do_sample:
            self._noise.exponential_(generator=self.generator)
            # argmax(p / Exp(1)) is a draw from p, with no host round trip: the exponential race, as in Gumbel-max.
            token = (self._probabilities(scores) / self._noise).argmax(dim=-1)
        if self._remembers:
            self._seen.scatter_(0, token.view(1), (self._seen[token] | is_finite).view(1))
        return torch.where(is_finite, token, NOT_FINITE)

    def choose_on_host(self, scores: NDArray[np.float32]) -> int:
        """The same choice where host and device are one, in numpy: its calls cost a fifth of PyTorch's.

        `scores` [V] may be written to.
        """
        params = self._params
        if self._remembers:
            punished = np.where(scores < 0, scores * params.repetition_penalty, scores / params.repetition_penalty)
            scores = np.where(self._seen.numpy(), punished, scores).astype(np.float32, copy=False)
        if params.suppressed:
            scores[self._blocked.numpy()] = -np.inf
        token = int(scores.argmax())
        if not math.isfinite(scores[token]):
            return NOT_FINITE
        if params.do_sample:
            self._noise.exponential_(generator=self.generator)
            token = int((self._probabilities_on_host(scores) / self._noise.numpy()).argmax())
        if self._remembers:
            self._seen[token] = True
        return token

    def _probabilities(self, scores: Tensor) -> Tensor:
        params = self._params
        scores = scores / params.temperature
        if 0 < params.top_k < scores.shape[-1]:
            scores = scores.masked_fill(scores < torch.topk(scores, params.top_k).values[-1], -torch.inf)
        if params.top_p < 1.0:
            ordered, index = torch.sort(scores)
            removed = F.softmax(ordered, dim=-1).cumsum(dim=-1) <= 1 - params.top_p
            removed[-1] = False  # the most probable token always stays
            scores = scores.masked_fill(removed.scatter(0, index, removed), -torch.inf)
        return F.softmax(scores, dim=-1)

    def _probabilities_on_host(self, scores: NDArray[np.float32]) -> NDArray[np.float32]:
        params = self._params
        scores = scores / np.float32(params.temperature)
        if 0 < params.top_k < len(scores):
            scores[scores < np.partition(scores, -params.top_k)[-params.top_k]] = -np.inf
        if params.top_p < 1.0:
            index = scores.argsort(kind="stable")
            removed = _softmax(scores[index]).cumsum() <= 1 - params.top_p
            removed[-1] = False  # the most probable token always stays
            scores[index[removed]] = -np.inf
        return _softmax(scores)


def _softmax(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    powers = np.exp(scores - scores.max())
    return np.asarray(powers / powers.sum())
