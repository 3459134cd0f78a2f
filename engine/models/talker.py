"""The Talker: what the user said and showed, and the reply's text one token a frame -> codec frames.

Its prompt is [all user segments] + nine rows made of the assistant header, the voice and the *first* text token
(facts.md section 2.5), so it starts as soon as the Thinker has sampled one token. Frame g takes text token g + 1.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kvcache.store import KVStore
from engine.models import hf
from engine.models.code_predictor import CodePredictor, Frame
from engine.models.decoder import Decoder, SequenceState
from engine.models.graphs import CapturedCall
from engine.models.sampling import Sampler


class _Projection:
    """Two linear layers from the Thinker's width to the Talker's."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, x: Tensor) -> Tensor:
        first, second = self._module.linear_fc1, self._module.linear_fc2
        return F.linear(F.silu(F.linear(x, first.weight, first.bias)), second.weight, second.bias)


class Talker:
    """Prefill with what the user said, start with the reply's first token, then one frame a step."""

    def __init__(self, model: hf.OmniModel, header: Sequence[int]) -> None:
        """Wrap the model's Talker; `header` is the token ids of `<|im_start|>assistant` and its newline."""
        talker = model.talker
        self.config = model.config.talker_config
        self._thinker_embedding = hf.thinker_decoder(model).embed_tokens.weight
        self._text_projection = _Projection(talker.text_projection)
        self._hidden_projection = _Projection(talker.hidden_projection)
        self._decoder = Decoder(talker.model)
        self._codec_embedding = talker.model.codec_embedding.weight
        self._codec_head = talker.codec_head.weight
        self.predictor = CodePredictor(talker.code_predictor, self._codec_embedding)
        self.vocabulary = self._codec_head.shape[0]
        self.device = self._decoder.device
        config = model.config
        specials = torch.tensor(
            [config.tts_bos_token_id, config.tts_eos_token_id, config.tts_pad_token_id], device=self.device
        )
        with torch.no_grad():
            rows = self._text_projection(F.embedding(specials, self._thinker_embedding))
        self._text_begin: Tensor
        self.text_end: Tensor
        self.text_pad: Tensor
        self._text_begin, self.text_end, self.text_pad = rows.split(1)
        self._header = torch.tensor(header, device=self.device)
        self._uses_graphs = False
        self._captured_step: tuple[KVStore, int, CapturedCall] | None = None
        self._captured_frame: tuple[Sampler, CapturedCall] | None = None

    def use_graphs(self) -> None:
        """Replay one-row steps and the predictor's loop as captured graphs from now on."""
        self._uses_graphs = True

    def init_state(self) -> SequenceState:
        """An empty conversation."""
        return SequenceState(self._decoder.new_store())

    @torch.no_grad()
    def user_rows(self, embeddings: Tensor, tapped: Tensor, *, is_text: bool) -> Tensor:
        """Talker rows [n, H] of user rows: text by its embedding, audio and pictures by the tapped hidden state."""
        return self._text_projection(embeddings) if is_text else self._hidden_projection(tapped)

    @torch.no_grad()
    def text_row(self, embedding: Tensor) -> Tensor:
        """Talker row [1, H] of one reply token's input embedding [1, H_thinker]."""
        return self._text_projection(embedding)

    @torch.no_grad()
    def start_rows(self, first_text: Tensor, speaker_id: int) -> Tensor:
        """The nine rows [9, H] that open a reply; `first_text` [1, H] is its first token's `text_row`."""
        header = self._text_projection(F.embedding(self._header, self._thinker_embedding))
        text = torch.cat((header, self.text_pad.expand(4, -1), self._text_begin, first_text))
        config = self.config
        codec = [
            config.codec_nothink_id,
            config.codec_think_bos_id,
            config.codec_think_eos_id,
            speaker_id,
            config.codec_pad_id,
            config.codec_bos_id,
        ]
        text[3:] += F.embedding(torch.tensor(codec, device=self.device), self._codec_embedding)
        return text

    @torch.no_grad()
    def step(self, rows: Tensor, positions: Tensor, state: SequenceState) -> Tensor:
        """Read `rows` [n, H] at `positions` [3, n] and return the last hidden state [1, H]."""
        if rows.shape[0] == 1:
            if self._uses_graphs:
                return self._step_captured(rows, positions, state.store)
            return self._decoder.step(rows, positions, state.store)
        return self._decoder.forward(rows, positions, state.store).hidden[-1:]

    @torch.no_grad()
    def first_code(self, hidden: Tensor, sampler: Sampler) -> Tensor:
        """Code 0 of the frame after `hidden` [1, H]; it may be the end-of-speech token."""
        return sampler(F.linear(hidden, self._codec_head)[0])

    @torch.no_grad()
    def complete(self, hidden: Tensor, first_code: Tensor, sampler: Sampler) -> Frame:
        """The whole frame that starts with `first_code`."""
        if self._uses_graphs:
            return self._complete_captured(hidden, first_code, sampler)
        return self.predictor.step(hidden, first_code, sampler)

    def _step_captured(self, row: Tensor, positions: Tensor, store: KVStore) -> Tensor:
        store.reserve(1)
        index = torch.tensor([store.length], device=self.device)
        held = self._captured_step
        if held is None or held[0] is not store or held[1] != store.capacity:  # a grown store has a new buffer

            def step(row: Tensor, positions: Tensor, index: Tensor) -> tuple[Tensor]:
                return (self._decoder.step_static(row, positions, index, store),)

            held = (store, store.capacity, CapturedCall(step, (row, positions, index)))
            self._captured_step = held
        (hidden,) = held[2](row, positions, index)
        store.advance(1)
        return hidden

    def _complete_captured(self, hidden: Tensor, first_code: Tensor, sampler: Sampler) -> Frame:
        held = self._captured_frame
        if held is None or held[0] is not sampler:

            def complete(hidden: Tensor, first_code: Tensor) -> tuple[Tensor, Tensor]:
                frame = self.predictor.step(hidden, first_code, sampler)
                return frame.codes, frame.embedding

            held = (sampler, CapturedCall(complete, (hidden, first_code), (sampler,)))
            self._captured_frame = held
        codes, embedding = held[1](hidden, first_code)
        return Frame(codes.clone(), embedding)
