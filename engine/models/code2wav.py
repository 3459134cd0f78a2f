"""Turns codec frames into samples as they come: what `Qwen3OmniMoeCode2Wav` makes of all of them at once, in steps.

The whole stage runs time-major, rows [T, D]. A causal convolution is then one matrix product over windows of rows,
and a transposed one is too, because its kernel is a whole number of strides: a window gives `stride` output rows.
Both need only the rows before the new ones, and those rows are all that the state keeps.

A frame is some 500 small operations, so on a CPU the calls cost more than the arithmetic. Therefore the buffers,
the views and the calls of a pass over T frames are prepared once (`_Pass`), and a step only runs the calls.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.streaming import StreamState

# A longer step runs in passes of this size: it bounds the buffers, and on a CPU they stay in the cache.
FRAMES_PER_PASS: Final = 4
# The rotary angles are made for this many frames at a time (82 s), so that the table does not grow with the stream.
FRAMES_PER_ROTARY_BLOCK: Final = 1024
# Per-channel constants are repeated to rows of this many values: elementwise loops over 12 channels are slow.
TILE_VALUES: Final = 512
# Narrow convolutions make several rows per window, up to this width: products with 12 columns are slow as well.
BLOCK_WIDTH: Final = 48
MAX_ROWS_PER_BLOCK: Final = 16


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
        self._layers = [_TransformerLayer(layer) for layer in parts.pre_transformer.layers]
        self._norm = _RmsNorm(parts.pre_transformer.norm)
        self._upsamplers = [_Upsampler(conv, block) for conv, block in parts.upsample]
        rows_per_frame = math.prod(upsampler.stride for upsampler in self._upsamplers)
        # Otherwise the first frame would give the first transposed convolution no two rows to look at.
        assert rows_per_frame >= 2, f"upsampling_ratios multiply to {rows_per_frame}, expected 2 or more"
        first, *blocks, last_snake, last = parts.decoder
        self._first, self._last = _CausalConv(first), _CausalConv(last)
        self._blocks: list[_DecoderBlock] = []
        self._lookahead_samples = 0
        for block in blocks:
            self._blocks.append(_DecoderBlock(block))
            stride = self._blocks[-1].stride
            rows_per_frame *= stride
            self._lookahead_samples = (self._lookahead_samples + self._blocks[-1].lookahead_rows) * stride
        self._samples_per_frame = rows_per_frame
        self._last_snake = _Snake(last_snake)
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

    def _prepare(self, num_frames: int, *, is_first: bool) -> "_Pass":
        pass_ = _Pass(self._embedding, num_frames, self._layers[0], is_first=is_first)
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

    def _run(self, pass_: "_Pass", codes: Tensor, state: Code2WavState) -> None:
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


@dataclass(frozen=True, slots=True)
class _Filled:
    """A buffer [context + T, D]: the rows kept from before, and behind them the part `rows` for the new ones."""

    buffer: Tensor
    rows: Tensor


class _Pass:
    """The prepared calls for a pass over `num_frames` frames, with all the buffers they read and write.

    Layers add to it in the order they run: each takes the tensor its input will be in and returns the one its
    output will be in. Before the calls, the tails of a state are copied to `contexts`; after them, `ends` to the
    tails.
    """

    def __init__(self, like: Tensor, num_frames: int, layer: "_TransformerLayer", *, is_first: bool) -> None:
        self.num_frames = num_frames
        self.is_first = is_first
        self.contexts: list[Tensor] = []
        self.ends: list[Tensor] = []
        self.rows = like.new_empty(num_frames, like.shape[1])
        self.rotary = like.new_empty(2, num_frames, 1, layer.head_dim)
        # Row i sees the window that ends with it; columns are the window-1 kept frames, then the new ones.
        num_keys = layer.context + num_frames
        hidden = like.new_full((num_frames, num_keys), -math.inf)
        self._window_mask = hidden.triu(layer.context + 1).add_(hidden.tril(-1))
        self.mask = self._window_mask.clone()
        self.samples = like.new_empty(0)
        self._num_hidden = 0
        self._calls: list[Callable[[], object]] = []
        self._like = like
        self._scratch: dict[tuple[str, int, int], Tensor] = {}

    def do(self, function: Callable[..., object], *args: object, **kwargs: object) -> None:
        """Add a call."""
        self._calls.append(partial(function, *args, **kwargs))

    def result(self, function: Callable[[], Tensor], shape: Iterable[int]) -> Tensor:
        """Add a call that allocates its result, and return the buffer to which it is copied."""
        out = self._like.new_empty(*shape)
        self._calls.append(lambda: out.copy_(function()))
        return out

    def scratch(self, name: str, num_rows: int, width: int) -> Tensor:
        """A buffer [num_rows, width] that every layer asking for the same `name` and shape shares."""
        key = (name, num_rows, width)
        if key not in self._scratch:
            self._scratch[key] = self._like.new_empty(num_rows, width)
        return self._scratch[key]

    def fresh(
        self, num_rows: int, width: int, context: int, *, num_padded: int = 0, kept: slice = slice(None)
    ) -> _Filled:
        """A buffer for `num_rows` rows and `num_padded` more; the last `context` rows, of them the columns `kept`,
        open the next pass."""
        buffer = self._like.new_zeros(context + num_rows + num_padded, width)
        self.contexts.append(buffer[:context, kept])
        self.ends.append(buffer[num_rows : num_rows + context, kept])
        return _Filled(buffer, buffer[context:])

    def hide(self, num_hidden: int) -> None:
        """Let nobody look at the first `num_hidden` kept frames: they lie before the start of the stream."""
        if num_hidden != self._num_hidden:
            self.mask.copy_(self._window_mask)
            self.mask[:, :num_hidden] = -math.inf
            self._num_hidden = num_hidden

    def run(self, tails: list[Tensor]) -> None:
        """Run the calls between loading and saving `tails`."""
        for context, tail in zip(self.contexts, tails, strict=True):
            context.copy_(tail)
        for call in self._calls:
            call()
        for tail, end in zip(tails, self.ends, strict=True):
            tail.copy_(end)


class _RmsNorm:
    """RMSNorm in the order of operations of the module: float32 inside, the weight last."""

    def __init__(self, norm: Any) -> None:
        self._weight: Tensor = norm.weight
        self._epsilon: float = norm.variance_epsilon

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        wide = rows.float()
        scale = wide.square().mean(-1, keepdim=True).add_(self._epsilon).rsqrt_()
        return self._weight * (wide * scale).to(rows.dtype)


class _TransformerLayer:
    """One transformer layer over [T, D] with the keys and values of the window before."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.head_dim: int = attention.head_dim
        self.context: int = attention.sliding_window - 1
        assert attention.q_proj.bias is None, "released checkpoints have no attention_bias"
        self._query_width: int = attention.q_proj.out_features
        self._key_width: int = attention.k_proj.out_features
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._qkv = torch.cat([projection.weight for projection in projections]).t().contiguous()
        self._out = attention.o_proj.weight.t().contiguous()
        self._scaling: float = attention.scaling
        self._attention_norm, self._mlp_norm = _RmsNorm(layer.input_layernorm), _RmsNorm(layer.post_attention_layernorm)
        self._attention_scale: Tensor = layer.self_attn_layer_scale.scale
        self._mlp_scale: Tensor = layer.mlp_layer_scale.scale
        self._gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)).t().contiguous()
        self._activation: Callable[[Tensor], Tensor] = mlp.act_fn
        self._down = mlp.down_proj.weight.t().contiguous()

    def prepare(self, pass_: _Pass, rows: Tensor) -> None:
        """Add the calls that run the layer over `rows` [T, D] in place."""
        num_rows = rows.shape[0]
        key_end = self._query_width + self._key_width
        # A buffer row is q, k and v, as the projection writes them; only k and v are kept for the next pass.
        filled = pass_.fresh(num_rows, key_end + self._key_width, self.context, kept=slice(self._query_width, None))
        pass_.do(lambda: torch.mm(self._attention_norm(rows), self._qkv, out=filled.rows))
        self._prepare_rotation(pass_, filled.rows[:, :key_end])
        attend = partial(
            F.scaled_dot_product_attention,
            self._heads(filled.rows[:, : self._query_width]),
            self._heads(filled.buffer[:, self._query_width : key_end]),
            self._heads(filled.buffer[:, key_end:]),
            attn_mask=pass_.mask,
            scale=self._scaling,
            enable_gqa=self._query_width != self._key_width,
        )
        pass_.do(lambda: rows.addcmul_(self._attention_scale, self._joined(attend()) @ self._out))
        gate_up = pass_.scratch("gate_up", num_rows, self._gate_up.shape[1])
        gate, up = gate_up.chunk(2, dim=-1)
        pass_.do(lambda: torch.mm(self._mlp_norm(rows), self._gate_up, out=gate_up))
        pass_.do(lambda: rows.addcmul_(self._mlp_scale, (self._activation(gate) * up) @ self._down))

    def _prepare_rotation(self, pass_: _Pass, rows: Tensor) -> None:
        """Rotate the heads of `rows` [T, H * head_dim] in place."""
        num_rows, width = rows.shape
        half = self.head_dim // 2
        heads = rows.unflatten(1, (-1, self.head_dim))
        rotated = pass_.scratch("rotated", num_rows, width).view(heads.shape)
        cos, sin = pass_.rotary
        pass_.do(torch.mul, heads, cos, out=rotated)
        pass_.do(rotated[..., :half].addcmul_, heads[..., half:], sin[..., :half])
        pass_.do(rotated[..., half:].addcmul_, heads[..., :half], sin[..., half:])
        pass_.do(heads.copy_, rotated)

    def _heads(self, rows: Tensor) -> Tensor:
        """[T, H * head_dim] -> [1, H, T, head_dim]."""
        num_rows, width = rows.shape
        return rows.view(1, num_rows, width // self.head_dim, self.head_dim).transpose(1, 2)

    def _joined(self, heads: Tensor) -> Tensor:
        """[1, H, T, head_dim] -> [T, H * head_dim]."""
        return heads[0].transpose(0, 1).reshape(-1, self._query_width)


class _CausalConv:
    """A causal convolution as one product of windows of rows with a matrix.

    A window holds the inputs of `rows_per_block` output rows that lie `dilation` apart. The matrix then has zeros,
    but with few channels the product and the copy that makes the windows are faster than one row at a time.
    """

    def __init__(self, conv: Any) -> None:
        weight: Tensor = conv.conv.weight  # [out, D, taps]
        out_width, self._width, num_taps = weight.shape
        self._dilation = int(conv.dilation)
        self.context = (num_taps - 1) * self._dilation
        self._rows_per_block = min(MAX_ROWS_PER_BLOCK, max(1, BLOCK_WIDTH // out_width))
        # Where a window is one output row, the windows may start anywhere, so there are no phases to tell apart.
        self._num_phases = self._dilation if self._rows_per_block > 1 else 1
        self._num_inputs = num_taps + self._rows_per_block - 1
        matrix = weight.new_zeros(self._num_inputs, self._width, self._rows_per_block, out_width)
        for row in range(self._rows_per_block):
            matrix[row : row + num_taps, :, row] = weight.permute(2, 1, 0)
        self._matrix = matrix.flatten(2).flatten(0, 1)
        self._bias: Tensor = conv.conv.bias.repeat(self._rows_per_block)

    @property
    def granule(self) -> int:
        """`prepare` takes a multiple of this many rows."""
        return self._rows_per_block * self._num_phases

    def prepare(self, pass_: _Pass, filled: _Filled) -> Tensor:
        """Add the calls that run over `filled` [T, D] and return where the rows [T, out] will be, `reordered`."""
        num_blocks = filled.rows.shape[0] // self.granule
        width = self._width
        source = filled.buffer.as_strided(
            (num_blocks, self._num_phases, self._num_inputs, width),
            (self.granule * width, width, self._dilation * width, 1),
        )
        windows = pass_.scratch("windows", num_blocks * self._num_phases, self._num_inputs * width)
        pass_.do(windows.view(source.shape).copy_, source)
        out = pass_.scratch("convolved", windows.shape[0], self._matrix.shape[1])
        pass_.do(torch.addmm, self._bias, windows, self._matrix, out=out)
        return out.view(filled.rows.shape[0], -1)

    def reordered(self, rows: Tensor) -> Tensor:
        """`rows` [T, D] in the order of the output: [blocks, phases, rows per block, D]."""
        return rows.view(-1, self._rows_per_block, self._num_phases, rows.shape[1]).transpose(1, 2)


class _TransposedConv:
    """A transposed convolution whose kernel is `taps` strides long: a window of `taps` rows gives `stride` rows."""

    def __init__(self, conv: Any) -> None:
        weight: Tensor = conv.conv.weight  # [D, out, taps * stride]
        self.stride: int = conv.conv.stride[0]
        num_taps, remainder = divmod(weight.shape[2], self.stride)
        assert remainder == 0, f"kernel {weight.shape[2]} is not a whole number of strides {self.stride}"
        self.context = num_taps - 1
        self._out_width = weight.shape[1]
        # The last tap of the kernel belongs to the oldest row, which comes first in a window.
        taps = weight.unflatten(2, (num_taps, self.stride)).flip(2)  # [D, out, taps, stride]
        self._matrix = taps.permute(2, 0, 3, 1).reshape(num_taps * weight.shape[0], -1)
        self._bias: Tensor = conv.conv.bias.repeat(self.stride)

    def prepare(self, pass_: _Pass, filled: _Filled, granule: int = 1) -> tuple[Tensor, int]:
        """Add the calls that run over `filled` [T, D]; return where the rows will be, and how many [T * stride, out].

        Rows of zeros follow up to a multiple of `granule`. In the first pass there are fewer rows: the module drops
        what its first rows give before their windows are full.
        """
        buffer = filled.rows if pass_.is_first else filled.buffer
        num_windows, width = buffer.shape[0] - self.context, buffer.shape[1]
        source = buffer.as_strided((num_windows, self._matrix.shape[0]), (width, 1), int(buffer.storage_offset()))
        windows = pass_.scratch("windows", *source.shape)
        pass_.do(windows.copy_, source)
        num_rows = num_windows * self.stride
        out = pass_.scratch("upsampled", math.ceil(num_rows / granule) * granule, self._out_width)
        pass_.do(torch.addmm, self._bias, windows, self._matrix, out=out[:num_rows].view(num_windows, -1))
        if out.shape[0] > num_rows:
            pass_.do(out[num_rows:].zero_)  # the residual units add to these rows in every pass
        return out, num_rows


class _Upsampler:
    """A transposed convolution without overlap, then a ConvNeXt block."""

    def __init__(self, conv: Any, block: Any) -> None:
        self._conv = _TransposedConv(conv)
        assert self._conv.context == 0, f"an upsampler that looks {self._conv.context} rows ahead"
        self.stride = self._conv.stride
        weight: Tensor = block.dwconv.conv.weight  # [D, 1, taps]
        self._depthwise = weight[:, 0].t().contiguous()  # [taps, D]
        self._depthwise_bias: Tensor = block.dwconv.conv.bias
        self._norm: Callable[[Tensor], Tensor] = block.norm
        self._activation: Callable[[Tensor], Tensor] = block.act
        self._widen, self._widen_bias = block.pwconv1.weight.t().contiguous(), block.pwconv1.bias
        self._narrow, self._narrow_bias = block.pwconv2.weight.t().contiguous(), block.pwconv2.bias
        self._gamma: Tensor = block.gamma

    def prepare(self, pass_: _Pass, rows: Tensor) -> Tensor:
        """Add the calls that run over `rows` [T, D] and return where the rows [T * stride, D] will be."""
        rows, num_rows = self._conv.prepare(pass_, _Filled(rows, rows))
        width = rows.shape[1]
        num_taps = self._depthwise.shape[0]
        filled = pass_.fresh(num_rows, width, num_taps - 1)
        pass_.do(filled.rows.copy_, rows)
        windows = filled.buffer.as_strided((num_rows, num_taps, width), (width, width, 1))

        def mix() -> None:
            mixed = (windows * self._depthwise).sum(1).add_(self._depthwise_bias)
            wide = self._activation(torch.addmm(self._widen_bias, self._norm(mixed), self._widen))
            rows.addcmul_(self._gamma, torch.addmm(self._narrow_bias, wide, self._narrow))

        pass_.do(mix)
        return rows


class _Snake:
    """SnakeBeta, x + sin²(x · e^alpha) / e^beta, with its constants made once."""

    def __init__(self, snake: Any) -> None:
        self._alpha = torch.exp(snake.alpha)
        self._inverse_beta = 1.0 / (torch.exp(snake.beta) + snake.no_div_by_zero)

    def prepare(self, pass_: _Pass, rows: Tensor, out: Tensor) -> None:
        """Add the calls that write the activation of `rows` [T, D] to `out` [T, D], which may be `rows` itself."""
        num_rows, width = rows.shape
        divisors = (n for n in range(1, num_rows + 1) if num_rows % n == 0)
        num_repeats = next(n for n in divisors if n * width >= TILE_VALUES or n == num_rows)
        alpha, inverse_beta = self._alpha.repeat(num_repeats), self._inverse_beta.repeat(num_repeats)
        wave = pass_.scratch("wave", num_rows, width)
        rows, out, wave = (tensor.view(-1, num_repeats * width) for tensor in (rows, out, wave))
        pass_.do(torch.mul, rows, alpha, out=wave)
        pass_.do(wave.sin_)
        pass_.do(wave.mul_, wave)
        pass_.do(torch.addcmul, rows, wave, inverse_beta, out=out)


class _ResidualUnit:
    """Snake, dilated convolution, snake, pointwise convolution, added to the input."""

    def __init__(self, unit: Any) -> None:
        self._snake, self._inner_snake = _Snake(unit.act1), _Snake(unit.act2)
        self._conv = _CausalConv(unit.conv1)
        self.granule = self._conv.granule
        self._matrix = unit.conv2.conv.weight[:, :, 0].t().contiguous()
        self._bias: Tensor = unit.conv2.conv.bias

    def prepare(self, pass_: _Pass, rows: Tensor, num_rows: int) -> None:
        """Add the calls that run in place over `rows` [T, D], of which `num_rows` are not padding."""
        num_padded = rows.shape[0] - num_rows
        filled = pass_.fresh(num_rows, rows.shape[1], self._conv.context, num_padded=num_padded)
        self._snake.prepare(pass_, rows, filled.rows)
        inner = self._conv.prepare(pass_, filled)
        self._inner_snake.prepare(pass_, inner, inner)
        added = pass_.scratch("added", *rows.shape)
        pass_.do(torch.addmm, self._bias, inner, self._matrix, out=added)
        target = self._conv.reordered(rows)
        pass_.do(target.add_, added.view(target.shape))


class _DecoderBlock:
    """Snake and a transposed convolution that looks ahead, then the residual units."""

    def __init__(self, block: Any) -> None:
        snake, conv, *units = block.block
        self._snake, self._conv = _Snake(snake), _TransposedConv(conv)
        self.stride, self.lookahead_rows = self._conv.stride, self._conv.context
        self._units = [_ResidualUnit(unit) for unit in units]
        self._granule = math.lcm(*(unit.granule for unit in self._units))

    def prepare(self, pass_: _Pass, rows: Tensor) -> Tensor:
        """Add the calls that run over `rows` [T, D] and return where [T * stride, D / 2] will be, at first fewer."""
        filled = pass_.fresh(rows.shape[0], rows.shape[1], self._conv.context)
        self._snake.prepare(pass_, rows, filled.rows)
        rows, num_rows = self._conv.prepare(pass_, filled, self._granule)
        for unit in self._units:
            unit.prepare(pass_, rows, num_rows)
        return rows[:num_rows]
