"""The code predictor: from the Talker's hidden state and code 0 of a frame to the other 15 codes, in one tight loop.

It starts afresh every 80 ms, so its keys and values live in a buffer of 17 rows and its positions are known before.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.decoder import Decoder
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
        positions = torch.arange(self.num_codes + 1, device=self._decoder.device)
        cos, sin = self._decoder.rotary(positions)
        self._rotary = [(cos[row : row + 1], sin[row : row + 1]) for row in range(self.num_codes)]
        self._embedded = torch.zeros(
            self.num_codes, self._decoder.hidden_size, dtype=self._decoder.dtype, device=self._decoder.device
        )
        self._codes = torch.zeros(self.num_codes, dtype=torch.long, device=self._decoder.device)

    @torch.no_grad()
    def step(self, hidden: Tensor, first_code: Tensor, sampler: Sampler) -> Frame:
        """Complete the frame that starts with `first_code` [] after the Talker's `hidden` [1, H]."""
        self._store.reset()
        self._decoder.step_turned(hidden, self._rotary[0], self._store)
        row = F.embedding(first_code.view(1), self._first_embedding)
        self._codes[0] = first_code
        self._embedded[0] = row[0]
        for index, (head, table) in enumerate(zip(self._heads, self._embeddings, strict=True), start=1):
            out = self._decoder.step_turned(row, self._rotary[index], self._store)
            code = sampler(F.linear(out, head)[0])
            row = F.embedding(code.clamp_min(0).view(1), table)  # NOT_FINITE is reported by the Talker's next step
            self._codes[index] = code
            self._embedded[index] = row[0]
        return Frame(self._codes.clone(), self._embedded.sum(0, keepdim=True))
