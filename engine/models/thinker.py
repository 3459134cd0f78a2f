"""The Thinker: embeddings of everything heard, seen and written -> text tokens.

Beside the logits it hands on, for every row it reads, what the Talker needs: the input embedding (layer 0) of text
and the hidden state of `accept_hidden_layer` for audio and pictures (facts.md section 2.5).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models import hf
from engine.models.decoder import Decoder, DecoderOutput, Deepstack, SequenceState


class Thinker:
    """Prefill in pieces, decode token by token."""

    def __init__(self, model: hf.OmniModel) -> None:
        decoder = hf.thinker_decoder(model)
        self._embeddings = decoder.embed_tokens.weight
        self._head = model.thinker.lm_head.weight
        self._decoder = Decoder(decoder, tapped_layer=model.config.talker_config.accept_hidden_layer)
        self.vocabulary = self._head.shape[0]
        self.device, self.dtype = self._decoder.device, self._decoder.dtype

    def init_state(self) -> SequenceState:
        """An empty conversation."""
        return SequenceState(self._decoder.new_store())

    @torch.no_grad()
    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """Input embeddings [n, H] of text tokens."""
        return F.embedding(torch.tensor(token_ids, device=self.device), self._embeddings)

    @torch.no_grad()
    def embed_token(self, token: Tensor) -> Tensor:
        """Input embedding [1, H] of one token [] that is already on the device."""
        return F.embedding(token.view(1), self._embeddings)

    @torch.no_grad()
    def step(
        self, embeddings: Tensor, positions: Tensor, state: SequenceState, deepstack: Deepstack | None = None
    ) -> DecoderOutput:
        """Read rows [n, H] at `positions` [3, n]; `tapped` is what the Talker takes of audio and pictures."""
        return self._decoder.forward(embeddings, positions, state.store, deepstack)

    @torch.no_grad()
    def decode(self, embedding: Tensor, positions: Tensor, state: SequenceState) -> Tensor:
        """Read one token's row [1, H] at `positions` [3, 1]; return its hidden state [1, H]."""
        return self._decoder.step(embedding, positions, state.store)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [V] of the token after the row `hidden` [1, H]."""
        return F.linear(hidden, self._head)[0]
