"""Turns codec frames into samples as they come: what `Qwen3OmniMoeCode2Wav` makes of all of them at once, in steps.

The whole stage runs time-major, rows [T, D]. A causal convolution is then one matrix product over windows of rows,
and a transposed one is too, because its kernel is a whole number of strides: a window gives `stride` output rows.
Both need only the rows before the new ones, and those rows are all that the state keeps.

A frame is some 500 small operations, so on a CPU the calls cost more than the arithmetic. Therefore the buffers,
the views and the calls of a pass over T frames are prepared once (`Pass`), and a step only runs the calls.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.streaming import StreamState
from engine.models.wave_layers import CausalConv, DecoderBlock, Pass, RmsNorm, Snake, TransformerLayer, Upsampler

# A longer step runs in passes of this size: it bounds the buffers, and on a CPU they stay in the cache.
FRAMES_PER_PASS: Final = 4
# The rotary angles are made for this many frames at a time (82 s), so that the table does not grow with the stream.
FRAMES_PER_ROTARY_BLOCK: Final = 1024


@dataclass
class Code2WavState(StreamState):
    """What the next frame needs of the earlier ones: the last rows in front of every layer that looks back."""

    # Per layer, in the order they run: K and V of the last window-1 frames, or the input rows of a convolution.
    tails: list[Tensor]
    # cos and sin [2, positions, 1, head_dim] of the positions from `rotary_start` on; filled when first needed.
    rotary: Tensor
    rotary_start: int | None = None
    num_frames: int = 0

    def reset(self) -> None:
        """Return to the start of a stream."""
        for tail in self.tails:
            tail.zero_()
        self.rotary_start = None
        self.num_frames = 0


class Code2Wav:
    """Streams a `Qwen3OmniMoeCode2Wav`, bit for bit up to rounding.

    It keeps rearranged copies of the weights, so it is made once the module has its final device and dtype, and
    work buffers, so one thread at a time may step it, with any number of states in turn. The transposed
    convolutions look ahead: the first frame gives `samples_per_frame - lookahead_samples` samples, and the last
    `lookahead_samples` of a stream are never emitted, just as the module drops them.
    """

    @torch.no_grad()
    def __init__(self, module: nn.Module) -> None:
        parts: Any = module
        self._num_codebooks: int = parts.config.num_quantizers
        self._embedding: Tensor = parts.code_embedding.weight
        self._code_offset: Tensor = parts.code_offset.view(-1, 1)
        self._rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = parts.pre_transformer.rotary_emb
        self._layers = [TransformerLayer(layer) for layer in parts.pre_transformer.layers]
        self._norm = RmsNorm(parts.pre_transformer.norm)
        self._upsamplers = [Upsampler(conv, block) for conv, block in parts.upsample]
        rows_per_frame = math.prod(upsampler.stride for upsampler in self._upsamplers)
        # Otherwise the first frame would give the first transposed convolution no two rows to look at.
        assert rows_per_frame >= 2, f"upsampling_ratios multiply to {rows_per_frame}, expected 2 or more"
        first, *blocks, last_snake, last = parts.decoder
        self._first, self._last = CausalConv(first), CausalConv(last)
        self._blocks: list[DecoderBlock] = []
        self._lookahead_samples = 0
        for block in blocks:
            self._blocks.append(DecoderBlock(block))
            stride = self._blocks[-1].stride
            rows_per_frame *= stride
            self._lookahead_samples = (self._lookahead_samples + self._blocks[-1].lookahead_rows) * stride
        self._samples_per_frame = rows_per_frame
        self._last_snake = Snake(last_snake)
        # The first frame gives fewer samples than the others, so it gets a pass of its own.
        self._first_pass = self._prepare(1, is_first=True)
        self._passes = {n: self._prepare(n, is_first=False) for n in range(1, FRAMES_PER_PASS + 1)}

    def init_state(self) -> Code2WavState:
        """The state at the start of a stream."""
        positions = FRAMES_PER_ROTARY_BLOCK + FRAMES_PER_PASS
        return Code2WavState(
            tails=[self._embedding.new_zeros(context.shape) for context in self._first_pass.contexts],
            rotary=self._embedding.new_zeros(2, positions, 1, self._layers[0].head_dim),
        )

    @torch.no_grad()
    def step(self, codes: Tensor, state: Code2WavState) -> Tensor:
        """Decode `codes` [K, T] on the module's device and return the samples [n] that became final, within ±1."""
        if codes.dim() != 2 or codes.shape[0] != self._num_codebooks:
            raise ValueError(f"codes have shape {list(codes.shape)}; pass [{self._num_codebooks}, T]")
        num_frames = codes.shape[1]
        missing = self._lookahead_samples if state.num_frames == 0 and num_frames else 0
        samples = self._embedding.new_empty(num_frames * self._samples_per_frame - missing)
        frame = done = 0
        while frame < num_frames:
            pass_ = self._passes[min(num_frames - frame, FRAMES_PER_PASS)] if state.num_frames else self._first_pass
            self._run(pass_, codes[:, frame : frame + pass_.num_frames], state)
            size = pass_.samples.shape[0]
            torch.clamp(pass_.samples, -1, 1, out=samples[done : done + size])
            frame += pass_.num_frames
            done += size
        return samples

    @property
    def samples_per_frame(self) -> int:
        """Samples that one codec frame lasts (1920: 80 ms at 24 kHz)."""
        return self._samples_per_frame

    @property
    def lookahead_samples(self) -> int:
        """Samples by which the output stays behind the frames given (555)."""
        return self._lookahead_samples

    def _prepare(self, num_frames: int, *, is_first: bool) -> "Pass":
        pass_ = Pass(self._embedding, num_frames, self._layers[0], is_first=is_first)
        rows = pass_.rows
        for layer in self._layers:
            layer.prepare(pass_, rows)
        rows = pass_.result(partial(self._norm, rows), rows.shape)
        for upsampler in self._upsamplers:
            rows = upsampler.prepare(pass_, rows)
        filled = pass_.fresh(rows.shape[0], rows.shape[1], self._first.context)
        pass_.do(filled.rows.copy_, rows)
        rows = self._first.prepare(pass_, filled)
        for block in self._blocks:
            rows = block.prepare(pass_, rows)
        num_rows, width = rows.shape
        filled = pass_.fresh(num_rows, width, self._last.context, num_padded=-num_rows % self._last.granule)
        self._last_snake.prepare(pass_, rows, filled.rows[:num_rows])
        pass_.samples = self._last.prepare(pass_, filled).view(-1)[:num_rows]
        return pass_

    def _run(self, pass_: "Pass", codes: Tensor, state: Code2WavState) -> None:
        """Run `pass_` on its `codes` [K, T]: afterwards its samples are there and `state` is moved on."""
        torch.mean(F.embedding(codes + self._code_offset, self._embedding), 0, out=pass_.rows)
        pass_.rotary.copy_(self._rotary_rows(pass_.num_frames, state))
        pass_.hide(max(0, self._layers[0].context - state.num_frames))
        pass_.run(state.tails)
        state.num_frames += pass_.num_frames

    def _rotary_rows(self, num_frames: int, state: Code2WavState) -> Tensor:
        """The cos and sin [2, T, 1, head_dim] of the next `num_frames` positions."""
        start = state.rotary_start
        if start is None or state.num_frames - start >= FRAMES_PER_ROTARY_BLOCK:
            state.rotary_start = start = state.num_frames
            positions = torch.arange(state.rotary.shape[1], device=state.rotary.device) + start
            cos, sin = self._rotary(state.rotary, positions[None])
            # rotate_half negates the half that it moves to the front; with that in the sine, a swap is enough.
            sin[..., : sin.shape[-1] // 2].neg_()
            torch.stack((cos[0, :, None], sin[0, :, None]), out=state.rotary)
        offset = state.num_frames - start
        return state.rotary[:, offset : offset + num_frames]
