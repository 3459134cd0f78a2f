"""The layers of Code2Wav, prepared once for passes over a fixed number of frames.

Rows are time-major, [T, D]. A layer's `prepare` makes the buffers and the list of calls of one pass; a step only runs
the calls. Each layer that looks back leaves its last input rows as a tail in the stream's state.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

# Per-channel constants are repeated to rows of this many values: elementwise loops over 12 channels are slow.
TILE_VALUES: Final = 512
# Narrow convolutions make several rows per window, up to this width: products with 12 columns are slow as well.
BLOCK_WIDTH: Final = 48
MAX_ROWS_PER_BLOCK: Final = 16


@dataclass(frozen=True, slots=True)
class Filled:
    """A buffer [context + T, D]: the rows kept from before, and behind them the part `rows` for the new ones."""

    buffer: Tensor
    rows: Tensor


class Pass:
    """The prepared calls for a pass over `num_frames` frames, with all the buffers they read and write.

    Layers add to it in the order they run: each takes the tensor its input will be in and returns the one its
    output will be in. Before the calls, the tails of a state are copied to `contexts`; after them, `ends` to the
    tails.
    """

    def __init__(self, like: Tensor, num_frames: int, layer: "TransformerLayer", *, is_first: bool) -> None:
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
    ) -> Filled:
        """A buffer for `num_rows` rows and `num_padded` more; the last `context` rows, of them the columns `kept`,
        open the next pass."""
        buffer = self._like.new_zeros(context + num_rows + num_padded, width)
        self.contexts.append(buffer[:context, kept])
        self.ends.append(buffer[num_rows : num_rows + context, kept])
        return Filled(buffer, buffer[context:])

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


class RmsNorm:
    """RMSNorm in the order of operations of the module: float32 inside, the weight last."""

    def __init__(self, norm: Any) -> None:
        self._weight: Tensor = norm.weight
        self._epsilon: float = norm.variance_epsilon

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        wide = rows.float()
        scale = wide.square().mean(-1, keepdim=True).add_(self._epsilon).rsqrt_()
        return self._weight * (wide * scale).to(rows.dtype)


class TransformerLayer:
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
        self._attention_norm, self._mlp_norm = RmsNorm(layer.input_layernorm), RmsNorm(layer.post_attention_layernorm)
        self._attention_scale: Tensor = layer.self_attn_layer_scale.scale
        self._mlp_scale: Tensor = layer.mlp_layer_scale.scale
        self._gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)).t().contiguous()
        self._activation: Callable[[Tensor], Tensor] = mlp.act_fn
        self._down = mlp.down_proj.weight.t().contiguous()

    def prepare(self, pass_: Pass, rows: Tensor) -> None:
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

    def _prepare_rotation(self, pass_: Pass, rows: Tensor) -> None:
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


class CausalConv:
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

    def prepare(self, pass_: Pass, filled: Filled) -> Tensor:
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


class TransposedConv:
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

    def prepare(self, pass_: Pass, filled: Filled, granule: int = 1) -> tuple[Tensor, int]:
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


class Upsampler:
    """A transposed convolution without overlap, then a ConvNeXt block."""

    def __init__(self, conv: Any, block: Any) -> None:
        self._conv = TransposedConv(conv)
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

    def prepare(self, pass_: Pass, rows: Tensor) -> Tensor:
        """Add the calls that run over `rows` [T, D] and return where the rows [T * stride, D] will be."""
        rows, num_rows = self._conv.prepare(pass_, Filled(rows, rows))
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


class Snake:
    """SnakeBeta, x + sin²(x · e^alpha) / e^beta, with its constants made once."""

    def __init__(self, snake: Any) -> None:
        self._alpha = torch.exp(snake.alpha)
        self._inverse_beta = 1.0 / (torch.exp(snake.beta) + snake.no_div_by_zero)

    def prepare(self, pass_: Pass, rows: Tensor, out: Tensor) -> None:
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


class ResidualUnit:
    """Snake, dilated convolution, snake, pointwise convolution, added to the input."""

    def __init__(self, unit: Any) -> None:
        self._snake, self._inner_snake = Snake(unit.act1), Snake(unit.act2)
        self._conv = CausalConv(unit.conv1)
        self.granule = self._conv.granule
        self._matrix = unit.conv2.conv.weight[:, :, 0].t().contiguous()
        self._bias: Tensor = unit.conv2.conv.bias

    def prepare(self, pass_: Pass, rows: Tensor, num_rows: int) -> None:
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


class DecoderBlock:
    """Snake and a transposed convolution that looks ahead, then the residual units."""

    def __init__(self, block: Any) -> None:
        snake, conv, *units = block.block
        self._snake, self._conv = Snake(snake), TransposedConv(conv)
        self.stride, self.lookahead_rows = self._conv.stride, self._conv.context
        self._units = [ResidualUnit(unit) for unit in units]
        self._granule = math.lcm(*(unit.granule for unit in self._units))

    def prepare(self, pass_: Pass, rows: Tensor) -> Tensor:
        """Add the calls that run over `rows` [T, D] and return where [T * stride, D / 2] will be, at first fewer."""
        filled = pass_.fresh(rows.shape[0], rows.shape[1], self._conv.context)
        self._snake.prepare(pass_, rows, filled.rows)
        rows, num_rows = self._conv.prepare(pass_, filled, self._granule)
        for unit in self._units:
            unit.prepare(pass_, rows, num_rows)
        return rows[:num_rows]
