"""One token through a decoder on a CPU, as cheaply as it can be done from Python.

Small models spend their time on the cost of a call, not on arithmetic: about 3 us for a PyTorch operation, 0.5 us for
a numpy one. So matrices are multiplied by PyTorch and everything between by numpy, in place, on the same memory: the
checkpoint's weights and the `KVStore` are shared, never copied. `Decoder.forward` is the reference; both agree to
rounding.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kvcache.store import KVStore

Array = NDArray[Any]  # float32 or float64


def runs_on_host(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights of this kind can be stepped here: numpy knows no bfloat16."""
    return device.type == "cpu" and dtype in (torch.float32, torch.float64)


class _Buffer:
    """Memory that PyTorch and numpy both see."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.tensor = torch.zeros(size, dtype=dtype)
        self.array: Array = self.tensor.numpy()


def _norm(x: Array, weight: Array, eps: float, out: Array) -> None:
    """Root-mean-square norm of one row into `out`; the variance in float32, as everywhere."""
    single = x.astype(np.float32, copy=False)
    scale = 1.0 / np.sqrt(np.dot(single, single) / np.float32(single.shape[0]) + np.float32(eps))
    np.multiply(single, scale, out=out)
    out *= weight


class HostGatedMlp:
    """silu(gate) * up, then down, for one row."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        self._gate_up, self._down = gate_up, down
        self._inner = _Buffer(gate_up.shape[0], gate_up.dtype)
        self._half = gate_up.shape[0] // 2
        self._scratch = _Buffer(self._half, gate_up.dtype)
        self._out = _Buffer(down.shape[0], down.dtype)

    def __call__(self, x: Tensor) -> Array:
        """Apply to `x` [H]; the result is overwritten by the next call."""
        return self.apply(x, self._gate_up, self._down)

    def apply(self, x: Tensor, gate_up: Tensor, down: Tensor) -> Array:
        """Apply with other weights of the same shape (an expert's)."""
        torch.mv(gate_up, x, out=self._inner.tensor)
        gate, up, scratch = self._inner.array[: self._half], self._inner.array[self._half :], self._scratch.array
        np.negative(gate, out=scratch)
        np.exp(scratch, out=scratch)
        scratch += 1.0
        np.divide(gate, scratch, out=scratch)
        scratch *= up
        torch.mv(down, self._scratch.tensor, out=self._out.tensor)
        return self._out.array


class HostMoe:
    """Routed experts for one row, with the gated shared expert where there is one."""

    def __init__(
        self,
        router: Tensor,
        top_k: int,
        normalize: bool,
        experts: tuple[Tensor, Tensor],
        shared: HostGatedMlp | None,
        shared_gate: Tensor | None,
    ) -> None:
        self._router, self._top_k, self._normalize = router, top_k, normalize
        self._experts = list(zip(experts[0].unbind(0), experts[1].unbind(0), strict=True))
        self._scores = _Buffer(router.shape[0], router.dtype)
        self._expert = HostGatedMlp(*self._experts[0])
        self._shared = shared
        self._shared_gate: Array | None = None if shared_gate is None else shared_gate[0].numpy()
        self._out: Array = np.zeros(experts[1].shape[1], dtype=self._scores.array.dtype)

    def __call__(self, x: Tensor) -> Array:
        """Apply to `x` [H]; the result is overwritten by the next call."""
        torch.mv(self._router, x, out=self._scores.tensor)
        probabilities = self._scores.array.astype(np.float32)
        probabilities -= probabilities.max()
        np.exp(probabilities, out=probabilities)
        chosen = probabilities.argsort(kind="stable")[-self._top_k :]
        total = probabilities[chosen].sum() if self._normalize else probabilities.sum()
        out = self._out
        out[:] = 0.0
        for expert in sorted(chosen.tolist()):
            part = self._expert.apply(x, *self._experts[expert])
            part *= probabilities[expert] / total
            out += part
        if self._shared is not None and self._shared_gate is not None:
            gate = 1.0 / (1.0 + np.exp(-np.dot(self._shared_gate, x.numpy())))
            part = self._shared(x)
            part *= gate
            out += part
        return out


class HostLayer:
    """Weights and work buffers of one decoder layer."""

    def __init__(self, layer: Any) -> None:
        dtype = layer.qkv.dtype
        self._qkv_weight, self._out_weight = layer.qkv, layer.out
        self._qkv_bias = None if layer.qkv_bias is None else layer.qkv_bias.numpy()
        self._out_bias = None if layer.out_bias is None else layer.out_bias.numpy()
        self._head_norms: Array = layer.head_norms[:, 0].numpy()  # [H + H_kv, D]
        self._attention_norm: Array = layer.attention_norm.numpy()
        self._mlp_norm: Array = layer.mlp_norm.numpy()
        self._eps = layer.eps
        self._mlp = layer.mlp.on_host()
        self._num_heads, self._num_kv_heads, self._head_dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
        self._normed = _Buffer(layer.qkv.shape[1], dtype)
        self._qkv = _Buffer(layer.qkv.shape[0], dtype)
        self._heads = self._qkv.array.reshape(-1, self._head_dim)  # [H + 2 H_kv, D]
        self._turned: Array = np.zeros((self._num_heads + self._num_kv_heads, self._head_dim), self._qkv.array.dtype)
        self._swapped = np.zeros_like(self._turned)
        self._attended = _Buffer(self._num_heads * self._head_dim, dtype)
        self._projected = _Buffer(layer.out.shape[0], dtype)
        self._scale = self._head_dim**-0.5

    def step(self, x: Array, cos: Array, signed_sin: Array, rows: Array, length: int) -> None:
        """Add this layer's work to `x` [hidden] in place; its key and value go to row `length` of `rows`.

        `rows` [2, H_kv, capacity, D] is the layer's part of the store.
        """
        _norm(x, self._attention_norm, self._eps, self._normed.array)
        torch.mv(self._qkv_weight, self._normed.tensor, out=self._qkv.tensor)
        if self._qkv_bias is not None:
            self._qkv.array += self._qkv_bias
        turned = self._turn(cos, signed_sin)
        rows[0, :, length] = turned[self._num_heads :]
        rows[1, :, length] = self._heads[self._num_heads + self._num_kv_heads :]
        self._attend(turned[: self._num_heads], rows[:, :, : length + 1])
        torch.mv(self._out_weight, self._attended.tensor, out=self._projected.tensor)
        x += self._projected.array
        if self._out_bias is not None:
            x += self._out_bias
        _norm(x, self._mlp_norm, self._eps, self._normed.array)
        x += self._mlp(self._normed.tensor)

    def _turn(self, cos: Array, signed_sin: Array) -> Array:
        """Norm and rotate queries and keys [H + H_kv, D]."""
        turned, swapped = self._turned, self._swapped
        heads = self._heads[: len(turned)].astype(np.float32, copy=False)
        squares = np.einsum("hd,hd->h", heads, heads) / np.float32(self._head_dim)
        np.multiply(heads, (1.0 / np.sqrt(squares + np.float32(self._eps)))[:, None], out=turned)
        turned *= self._head_norms
        half = self._head_dim // 2
        swapped[:, :half] = turned[:, half:]
        swapped[:, half:] = turned[:, :half]
        swapped *= signed_sin
        turned *= cos
        turned += swapped
        return turned

    def _attend(self, query: Array, rows: Array) -> None:
        """Attention of `query` [H, D] over `rows` [2, H_kv, n, D], into `_attended`."""
        keys, values = rows
        stacked = query.reshape(self._num_kv_heads, -1, self._head_dim) * self._scale
        scores = np.matmul(stacked, keys.transpose(0, 2, 1))  # [H_kv, groups, n]
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        np.matmul(scores, values, out=self._attended.array.reshape(self._num_kv_heads, -1, self._head_dim))


class HostStepper:
    """Steps one token through all layers."""

    def __init__(self, layers: Sequence[Any], norm: Tensor, eps: float) -> None:
        self._layers = [HostLayer(layer) for layer in layers]
        self._norm: Array = norm.numpy()
        self._eps = eps
        self._x: Array = np.zeros_like(self._norm)

    def step(self, x: Tensor, cos: Tensor, signed_sin: Tensor, store: KVStore) -> Tensor:
        """Append `x` [1, hidden], turned by `cos` and `signed_sin` [1, D]; return the normed row [1, hidden]."""
        store.reserve(1)
        rows: Array = store.rows.numpy()
        row = self._x
        row[:] = x[0].numpy()
        turn = cos[0].numpy(), signed_sin[0].numpy()
        for index, layer in enumerate(self._layers):
            layer.step(row, *turn, rows[index], store.length)
        store.advance(1)
        out = torch.empty_like(x)
        _norm(row, self._norm, self._eps, out[0].numpy())
        return out
