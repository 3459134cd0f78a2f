"""Layers of the decoders, as plain functions over the checkpoint's weights.

The order of operations is that of `transformers` (modeling_qwen3_omni_moe.py, 5.24), so that results agree to the
last bits: norms and rotary angles in float32, router probabilities in float32, experts summed in index order.
What is left out is what costs time without changing numbers: module calls, mask building, cache objects.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models import host_step
from engine.models.host_step import HostGatedMlp, HostMoe


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, variance in float32 whatever the dtype of `x`.

    `weight` is [D], or one row per head as [H, 1, D].
    """
    normed: Tensor = F.rms_norm(x.float(), x.shape[-1:], None, eps)
    return normed.to(x.dtype) * weight


class Rotary:
    """Cosines and sines of rotary positions; with sections, the interleaved three-axis form (TM-RoPE)."""

    def __init__(self, inv_freq: Tensor, sections: list[int] | None, dtype: torch.dtype) -> None:
        self._inv_freq = inv_freq.float()  # [D / 2]
        self._dtype = dtype
        axis = torch.zeros(inv_freq.shape[0], dtype=torch.long, device=inv_freq.device)
        for row, length in enumerate(sections[1:], start=1) if sections else ():
            axis[row : 3 * length : 3] = row
        self._axis = axis  # [D / 2]: which row of the positions turns this frequency
        half = inv_freq.shape[0]
        self._signs = torch.ones(2 * half, dtype=dtype, device=inv_freq.device)
        self._signs[:half] = -1.0

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines [n, D] of `positions` [3, n] or [n]."""
        if positions.dim() == 2:
            angles = positions.float()[self._axis].T * self._inv_freq
        else:
            angles = positions.float()[:, None] * self._inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(self._dtype), angles.sin().to(self._dtype) * self._signs


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Turn `x` [H, n, D] by its positions; `signed_sin` carries the minus of the first half."""
    half = x.shape[-1] // 2
    swapped: Tensor = x.unflatten(-1, (2, half)).flip(-2).flatten(-2)
    if cos.dtype is not x.dtype:  # the predictor in half precision: angles stay in float32
        turned = x.float() * cos + swapped.float() * signed_sin
        return turned.to(x.dtype)
    return x * cos + swapped * signed_sin


class GatedMlp:
    """silu(gate(x)) * up(x), then down; gate and up are one matrix product."""

    def __init__(self, module: Any) -> None:
        self._gate_up = fuse([module.gate_proj, module.up_proj])[0]
        self._down = module.down_proj.weight

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to `x` [n, H]."""
        gate, up = F.linear(x, self._gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self._down)

    def on_host(self) -> HostGatedMlp:
        """The same MLP for single rows on a CPU."""
        return HostGatedMlp(self._gate_up, self._down)


class MoeMlp:
    """Top-k routed experts, with the Talker's gated shared expert where the checkpoint has one."""

    def __init__(self, module: Any) -> None:
        self._router = module.gate.weight
        self._top_k: int = module.gate.top_k
        self._normalize: bool = module.gate.norm_topk_prob
        self._experts = module.experts
        self._on_host = host_step.runs_on_host(self._router.dtype, self._router.device)
        shared = getattr(module, "shared_expert", None)
        self._shared = None if shared is None else GatedMlp(shared)
        self._shared_gate = None if shared is None else module.shared_expert_gate.weight

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to `x` [n, H]."""
        weights, chosen = self._route(x)
        if x.shape[0] > 1 and self._on_host:
            out = self._rows_on_host(x, weights, chosen)
        elif x.shape[0] > 1:
            out = self._experts(x, chosen, weights)
        else:
            out = self._one_token(x, weights, chosen)
        if self._shared is not None and self._shared_gate is not None:
            out = out + torch.sigmoid(F.linear(x, self._shared_gate)) * self._shared(x)
        return out

    def on_host(self) -> HostMoe:
        """The same experts for single rows on a CPU."""
        experts = (self._experts.gate_up_proj, self._experts.down_proj)
        shared = None if self._shared is None else self._shared.on_host()
        return HostMoe(self._router, self._top_k, self._normalize, experts, shared, self._shared_gate)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = F.softmax(F.linear(x, self._router), dim=-1, dtype=torch.float)
        weights, chosen = torch.topk(probabilities, self._top_k, dim=-1)
        if self._normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), chosen

    def _rows_on_host(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Several rows on a CPU: sorted by expert once, so that each expert works on a slice."""
        by_expert = chosen.flatten().argsort(stable=True)  # [n * k]
        rows = by_expert // self._top_k
        counts = chosen.flatten().bincount(minlength=len(self._experts.gate_up_proj)).tolist()
        sorted_x = x[rows]
        parts = torch.empty_like(sorted_x)
        start = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            end = start + count
            gate, up = F.linear(sorted_x[start:end], self._experts.gate_up_proj[expert]).chunk(2, dim=-1)
            parts[start:end] = F.linear(F.silu(gate) * up, self._experts.down_proj[expert])
            start = end
        parts *= weights.flatten()[by_expert][:, None]
        return torch.zeros_like(x).index_add_(0, rows, parts)

    def _one_token(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Gather the chosen experts on the device: no host round trip, and the form a graph can capture."""
        index, rank = torch.sort(chosen[0])
        gate_up, down = self._experts.gate_up_proj[index], self._experts.down_proj[index]  # [k, 2I, H], [k, H, I]
        gate, up = torch.matmul(gate_up, x[0]).chunk(2, dim=-1)  # [k, I]
        parts = torch.bmm(down, (F.silu(gate) * up)[..., None])[..., 0]  # [k, H]
        return (parts * weights[0, rank, None]).sum(0, keepdim=True)


def fuse(linears: list[Any]) -> tuple[Tensor, Tensor | None]:
    """Stack the weights (and biases) of `linears` in one tensor; the modules keep views of it, so nothing doubles."""
    weight = torch.cat([linear.weight for linear in linears])
    has_bias = linears[0].bias is not None
    bias = torch.cat([linear.bias for linear in linears]) if has_bias else None
    start = 0
    for linear in linears:
        end = start + linear.weight.shape[0]
        linear.weight.data = weight[start:end]
        if bias is not None:
            linear.bias.data = bias[start:end]
        start = end
    return weight, bias


@functools.lru_cache(maxsize=4)  # one can be tens of megabytes
def _causal(num_past: int, num_new: int, groups: int, device: torch.device) -> Tensor:
    rows = torch.arange(num_past, num_past + num_new, device=device)
    return (torch.arange(num_past + num_new, device=device) <= rows[:, None]).repeat(groups, 1)


def attend(query: Tensor, keys: Tensor, values: Tensor, num_past: int) -> Tensor:
    """Causal attention of `query` [H, n, D] over `keys`, `values` [H_kv, num_past + n, D]; returns [n, H * D].

    Queries that share a key head are stacked as rows, so keys are never repeated and one token needs no mask.
    """
    heads, num_new, head_dim = query.shape
    kv_heads = keys.shape[0]
    groups = heads // kv_heads
    stacked = query.reshape(kv_heads, groups * num_new, head_dim)
    mask = _causal(num_past, num_new, groups, query.device) if num_new > 1 else None
    out = F.scaled_dot_product_attention(stacked[None], keys[None], values[None], attn_mask=mask)[0]
    return out.view(heads, num_new, head_dim).transpose(0, 1).reshape(num_new, heads * head_dim)


def attend_masked(query: Tensor, keys: Tensor, values: Tensor, allowed: Tensor) -> Tensor:
    """Attention of one token [H, 1, D] over whole buffers [H_kv, capacity, D] where `allowed` [capacity] is true."""
    heads, _, head_dim = query.shape
    stacked = query.view(1, keys.shape[0], heads // keys.shape[0], head_dim)
    out = F.scaled_dot_product_attention(stacked, keys[None], values[None], attn_mask=allowed[None, None, None])
    return out.reshape(1, heads * head_dim)
