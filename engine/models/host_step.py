"""One token through a decoder on a CPU, as cheaply as it can be done from Python.

Small models spend their time on the cost of a call, not on arithmetic: about 3 us for a PyTorch operation, 0.5 us for
a numpy one, and numpy's matrix-vector product is the faster one too (49 us against 84 for the eight products of a
predictor step, measured on two AMD EPYC cores). So a single token goes through numpy, in place, on the memory of the
checkpoint's weights and of the `KVStore`: nothing is copied. `Decoder.forward` is the reference; both agree to
rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kvcache.store import KVStore

Array = NDArray[Any]  # float32 or float64


def runs_on_host(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether tensors of this kind can be worked on here: numpy knows no bfloat16."""
    return device.type == "cpu" and dtype in (torch.float32, torch.float64)


def _norm(x: Array, weight: Array, eps: float, out: Array) -> None:
    """Root-mean-square norm of one row into `out`; the variance in float32, as everywhere."""
    single = x.astype(np.float32, copy=False)
    np.multiply(single, (float(np.dot(single, single)) / single.shape[0] + eps) ** -0.5, out=out)
    np.multiply(out, weight, out=out)


class HostGatedMlp:
    """silu(gate) * up, then down, for one row."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        self._weights: tuple[Array, Array] = gate_up.numpy(), down.numpy()
        inner: Array = np.zeros(gate_up.shape[0], self._weights[0].dtype)
        half = len(inner) // 2
        self._inner, self._gate, self._up = inner, inner[:half], inner[half:]
        self._scratch = np.zeros_like(self._gate)
        self._out: Array = np.zeros(down.shape[0], inner.dtype)

    def __call__(self, x: Array) -> Array:
        """Apply to `x` [H]; the result is overwritten by the next call."""
        return self.apply(x, self._weights)

    def apply(self, x: Array, weights: tuple[Array, Array]) -> Array:
        """Apply with other weights of the same shape (an expert's)."""
        gate_up, down = weights
        gate, scratch = self._gate, self._scratch
        np.dot(gate_up, x, out=self._inner)
        np.negative(gate, out=scratch)
        np.exp(scratch, out=scratch)
        np.add(scratch, 1.0, out=scratch)
        np.divide(gate, scratch, out=scratch)
        np.multiply(scratch, self._up, out=scratch)
        return np.dot(down, scratch, out=self._out)


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
        self._router: Array = router.numpy()
        self._top_k, self._normalize = top_k, normalize
        self._experts: list[tuple[Array, Array]] = list(zip(experts[0].numpy(), experts[1].numpy(), strict=True))
        self._expert = HostGatedMlp(experts[0][0], experts[1][0])
        self._shared = shared
        self._shared_gate: Array | None = None if shared_gate is None else shared_gate[0].numpy()
        self._out: Array = np.zeros(experts[1].shape[1], self._router.dtype)

    def __call__(self, x: Array) -> Array:
        """Apply to `x` [H]; the result is overwritten by the next call."""
        probabilities = np.dot(self._router, x).astype(np.float32, copy=False)
        probabilities -= probabilities.max()
        np.exp(probabilities, out=probabilities)
        chosen = probabilities.argsort(kind="stable")[-self._top_k :]
        total = probabilities[chosen].sum() if self._normalize else probabilities.sum()
        out = self._out
        out[:] = 0.0
        for expert in sorted(chosen.tolist()):
            part = self._expert.apply(x, self._experts[expert])
            np.multiply(part, probabilities[expert] / total, out=part)
            np.add(out, part, out=out)
        if self._shared is not None and self._shared_gate is not None:
            part = self._shared(x)
            np.multiply(part, 1.0 / (1.0 + np.exp(-np.dot(self._shared_gate, x))), out=part)
            np.add(out, part, out=out)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """Rotary angles of one position with a layer's head norms multiplied in: `straight` and `crossed` [H + H_kv, D]."""

    straight: Array
    crossed: Array


class HostLayer:
    """Weights and work buffers of one decoder layer."""

    def __init__(self, layer: Any) -> None:
        heads, kv_heads, head_dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
        self._qkv_weight: Array = layer.qkv.numpy()
        self._out_weight: Array = layer.out.numpy()
        self._qkv_bias: Array | None = None if layer.qkv_bias is None else layer.qkv_bias.numpy()
        self._out_bias: Array | None = None if layer.out_bias is None else layer.out_bias.numpy()
        self._attention_norm: Array = layer.attention_norm.numpy()
        self._mlp_norm: Array = layer.mlp_norm.numpy()
        self._eps = layer.eps
        self._mlp = layer.mlp.on_host()
        self._head_dim, self._half = head_dim, head_dim // 2
        # The scale of the scores goes with the queries' norm: one multiplication less for each token.
        self._head_norms: Array = layer.head_norms[:, 0].numpy().copy()  # [H + H_kv, D]
        self._head_norms[:heads] *= head_dim**-0.5
        self._normed: Array = np.zeros(layer.qkv.shape[1], self._qkv_weight.dtype)
        self._qkv: Array = np.zeros(layer.qkv.shape[0], self._normed.dtype)
        projected = self._qkv.reshape(-1, head_dim)  # [H + 2 H_kv, D]
        self._to_turn, self._value = projected[: heads + kv_heads], projected[heads + kv_heads :]
        self._turned = np.zeros_like(self._to_turn)
        self._swapped = np.zeros_like(self._to_turn)
        self._query, self._key = self._turned[:heads].reshape(kv_heads, -1, head_dim), self._turned[heads:]
        self._attended: Array = np.zeros(heads * head_dim, self._normed.dtype)
        self._attended_heads = self._attended.reshape(kv_heads, -1, head_dim)
        self._projected: Array = np.zeros(layer.out.shape[0], self._normed.dtype)

    def turn(self, cos: Array, signed_sin: Array) -> Turn:
        """What this layer's queries and keys are multiplied with at the position of `cos`, `signed_sin` [D]."""
        crossed = np.roll(self._head_norms, self._half, axis=-1) * signed_sin
        return Turn(self._head_norms * cos, crossed)

    def step(self, x: Array, turn: Turn, rows: Array, length: int) -> None:
        """Add this layer's work to `x` [hidden] in place; its key and value go to row `length` of `rows`.

        `rows` [2, H_kv, capacity, D] is the layer's part of the store.
        """
        _norm(x, self._attention_norm, self._eps, self._normed)
        np.dot(self._qkv_weight, self._normed, out=self._qkv)
        if self._qkv_bias is not None:
            self._qkv += self._qkv_bias
        self._apply(turn)
        rows[0, :, length] = self._key
        rows[1, :, length] = self._value
        self._attend(rows[:, :, : length + 1])
        np.dot(self._out_weight, self._attended, out=self._projected)
        np.add(x, self._projected, out=x)
        if self._out_bias is not None:
            x += self._out_bias
        _norm(x, self._mlp_norm, self._eps, self._normed)
        np.add(x, self._mlp(self._normed), out=x)

    def _apply(self, turn: Turn) -> None:
        """Norm and rotate queries and keys [H + H_kv, D], from `_to_turn` into `_turned`."""
        turned, swapped, half = self._turned, self._swapped, self._half
        heads = self._to_turn.astype(np.float32, copy=False)
        scale = np.einsum("hd,hd->h", heads, heads)
        np.multiply(scale, 1.0 / self._head_dim, out=scale)
        np.add(scale, self._eps, out=scale)
        np.sqrt(scale, out=scale)
        np.divide(heads, scale[:, None], out=turned)
        swapped[:, :half] = turned[:, half:]
        swapped[:, half:] = turned[:, :half]
        np.multiply(swapped, turn.crossed, out=swapped)
        np.multiply(turned, turn.straight, out=turned)
        np.add(turned, swapped, out=turned)

    def _attend(self, rows: Array) -> None:
        """Attention of the query over `rows` [2, H_kv, n, D], into `_attended`."""
        keys, values = rows
        scores = np.matmul(self._query, keys.transpose(0, 2, 1))  # [H_kv, groups, n]
        np.subtract(scores, scores.max(axis=-1, keepdims=True), out=scores)
        np.exp(scores, out=scores)
        np.divide(scores, scores.sum(axis=-1, keepdims=True), out=scores)
        np.matmul(scores, values, out=self._attended_heads)


class HostStepper:
    """Steps one token through all layers."""

    def __init__(self, layers: Sequence[Any], norm: Tensor, eps: float) -> None:
        self._layers = [HostLayer(layer) for layer in layers]
        self._norm: Array = norm.numpy()
        self._eps = eps
        self._x: Array = np.zeros_like(self._norm)

    def turns(self, cos: Tensor, signed_sin: Tensor) -> list[Turn]:
        """Each layer's `Turn` for one position, given as `cos` and `signed_sin` [1, D]."""
        return [layer.turn(cos[0].numpy(), signed_sin[0].numpy()) for layer in self._layers]

    def step(self, x: Array, turns: Sequence[Turn], store: KVStore, out: Array) -> None:
        """Append `x` [hidden] to `store` at the position of `turns`; its normed hidden state [hidden] goes to `out`."""
        store.reserve(1)
        rows: Array = store.rows.numpy()
        row = self._x
        row[:] = x
        for index, layer in enumerate(self._layers):
            layer.step(row, turns[index], rows[index], store.length)
        store.advance(1)
        _norm(row, self._norm, self._eps, out)
