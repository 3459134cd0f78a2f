"""The code predictor: from the Talker's hidden state and code 0 of a frame to the other 15 codes, in one tight loop.

It starts afresh every 80 ms, so its keys and values live in a buffer of 17 rows and its positions are known before.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.decoder import Decoder
from engine.models.host_step import HostStepper
from engine.models.sampling import Sampler


@dataclass(frozen=True, slots=True)
class Frame:
    """One codec frame, on the device."""

    codes: Tensor  # [K] int64
    embedding: Tensor  # [1, H]: the sum of the K code embeddings, which the Talker takes back


class CodePredictor:
    """Residual codes of one frame. `codec_embedding` [V, H] is the Talker's, for code 0."""

    def __init__(self, module: Any, codec_embedding: Tensor) -> None:
        # Half precision makes the audio decay after thousands of frames unless angles stay float32 (facts.md 4.5).
        self._decoder = Decoder(module.model, float_rotary=True)
        self._first_embedding = codec_embedding
        self._embeddings = [table.weight for table in module.model.codec_embedding]
        self._heads = [head.weight for head in module.lm_head]
        self.num_codes = len(self._heads) + 1
        self.vocabulary = self._heads[0].shape[0]
        self._store = self._decoder.new_store(capacity=self.num_codes + 1)
        positions = torch.arange(self.num_codes, device=self._decoder.device)
        cos, sin = self._decoder.rotary(positions)
        self._rotary = [(cos[row : row + 1], sin[row : row + 1]) for row in range(self.num_codes)]
        host = self._decoder.host
        self._turns = [] if host is None else [host.turns(*rotary) for rotary in self._rotary]
        self._hidden = torch.zeros(self._decoder.hidden_size, dtype=self._decoder.dtype, device=self._decoder.device)
        self._embedded = torch.zeros(
            self.num_codes, self._decoder.hidden_size, dtype=self._decoder.dtype, device=self._decoder.device
        )
        self._codes = torch.zeros(self.num_codes, dtype=torch.long, device=self._decoder.device)

    @torch.no_grad()
    def step(self, hidden: Tensor, first_code: Tensor, sampler: Sampler) -> Frame:
        """Complete the frame that starts with `first_code` [] after the Talker's `hidden` [1, H]."""
        self._store.reset()
        self._codes[0] = first_code
        if self._decoder.host is None:
            self._run_on_device(hidden, first_code, sampler)
        else:
            self._run_on_host(self._decoder.host, hidden, first_code, sampler)
        return Frame(self._codes.clone(), self._embedded.sum(0, keepdim=True))

    def _run_on_device(self, hidden: Tensor, first_code: Tensor, sampler: Sampler) -> None:
        """The loop without a word from the host, so that a graph can capture it."""
        row = F.embedding(first_code.view(1), self._first_embedding)
        self._embedded[0] = row[0]
        self._decoder.forward_turned(hidden, self._rotary[0], self._store)
        for index, (head, table) in enumerate(zip(self._heads, self._embeddings, strict=True), start=1):
            out = self._decoder.forward_turned(row, self._rotary[index], self._store).hidden
            code = sampler(F.linear(out, head)[0])
            row = F.embedding(code.clamp_min(0).view(1), table)  # NOT_FINITE is reported by the Talker's next step
            self._codes[index] = code
            self._embedded[index] = row[0]

    def _run_on_host(self, host: HostStepper, hidden: Tensor, first_code: Tensor, sampler: Sampler) -> None:
        """The same loop where host and device are one."""
        embedded, codes, out = self._embedded.numpy(), self._codes.numpy(), self._hidden.numpy()
        host.step(hidden[0].numpy(), self._turns[0], self._store, out)
        embedded[0] = self._first_embedding[int(first_code)].numpy()
        for index, (head, table) in enumerate(zip(self._heads, self._embeddings, strict=True), start=1):
            host.step(embedded[index - 1], self._turns[index], self._store, out)
            code = sampler.choose_on_host(np.dot(head.numpy(), out).astype(np.float32, copy=False))
            codes[index] = code
            embedded[index] = table[max(code, 0)].numpy()
