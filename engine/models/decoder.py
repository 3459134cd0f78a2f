"""A decoder stack over a `KVStore`: prefill in pieces of any size, decode token by token, cut at any token.

Thinker, Talker and code predictor are this one stack with other weights. Any split of a sequence into calls gives
what one call over the whole sequence gives.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kvcache.store import KVStore
from engine.models import host_step
from engine.models.layers import GatedMlp, MoeMlp, Rotary, attend, attend_masked, fuse, rms_norm, rotate
from engine.models.streaming import StreamState


@dataclass(frozen=True, slots=True)
class Deepstack:
    """Visual features added to the rows `rows` [m] of a piece after each of the first layers."""

    rows: Tensor
    features: tuple[Tensor, ...]  # per layer [m, H]


@dataclass(frozen=True, slots=True)
class DecoderOutput:
    """The normed last hidden states, and those of the tapped layer (None where no layer is tapped)."""

    hidden: Tensor  # [n, H]
    tapped: Tensor | None  # [n, H]


@dataclass
class SequenceState(StreamState):
    """Keys and values of one sequence so far."""

    store: KVStore

    @property
    def nbytes(self) -> int:
        """Bytes of the KV buffer."""
        return self.store.nbytes

    def reset(self) -> None:
        """Forget the sequence."""
        self.store.reset()


class _Layer:
    """Weights of one layer."""

    def __init__(self, module: Any) -> None:
        attention = module.self_attn
        self.qkv, self.qkv_bias = fuse([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out, self.out_bias = attention.o_proj.weight, attention.o_proj.bias
        self.head_dim: int = attention.head_dim
        self.num_heads = attention.q_proj.weight.shape[0] // self.head_dim
        self.num_kv_heads = attention.k_proj.weight.shape[0] // self.head_dim
        self.head_norms = torch.cat(  # one norm for all query and key heads together
            (
                attention.q_norm.weight.expand(self.num_heads, 1, -1),
                attention.k_norm.weight.expand(self.num_kv_heads, 1, -1),
            )
        )
        self.eps: float = attention.q_norm.variance_epsilon
        self.attention_norm, self.mlp_norm = module.input_layernorm.weight, module.post_attention_layernorm.weight
        self.mlp = MoeMlp(module.mlp) if hasattr(module.mlp, "experts") else GatedMlp(module.mlp)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [H, n, D], keys and values [H_kv, n, D] of `x` [n, hidden], normed and turned."""
        rows = F.linear(rms_norm(x, self.attention_norm, self.eps), self.qkv, self.qkv_bias)
        heads = rows.view(x.shape[0], -1, self.head_dim).transpose(0, 1)  # [H + 2 H_kv, n, D]
        num_turned = self.num_heads + self.num_kv_heads
        turned = rotate(rms_norm(heads[:num_turned], self.head_norms, self.eps), cos, sin)
        return turned[: self.num_heads], turned[self.num_heads :], heads[num_turned:]

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Output projection, residual, and the MLP with its residual."""
        x = x + F.linear(attended, self.out, self.out_bias)
        return x + self.mlp(rms_norm(x, self.mlp_norm, self.eps))


class Decoder:
    """The stack: `forward` for prefill and decode, `step_static` for captured graphs."""

    def __init__(self, module: Any, *, tapped_layer: int | None = None, float_rotary: bool = False) -> None:
        """Wrap `module`, a decoder of the checkpoint.

        `tapped_layer` counts as `hidden_states[i]` of transformers does: the output of the first i layers.
        `float_rotary` keeps the rotary angles in float32 when the weights are in half precision.
        """
        self._layers = [_Layer(layer) for layer in module.layers]
        first = self._layers[0]
        self._norm, self._eps = module.norm.weight, module.norm.variance_epsilon
        self.dtype, self.device = first.qkv.dtype, first.qkv.device
        self.hidden_size = self._norm.shape[0]
        half = self.dtype in (torch.bfloat16, torch.float16)
        rotary_dtype = torch.float32 if float_rotary and half else self.dtype
        sections = getattr(module.rotary_emb, "mrope_section", None)
        self._rotary = Rotary(module.rotary_emb.inv_freq.to(self.device), sections, rotary_dtype)
        self._tapped_layer = tapped_layer
        on_host = host_step.runs_on_host(self.dtype, self.device)
        self.host = host_step.HostStepper(self._layers, self._norm, self._eps) if on_host else None

    def new_store(self, capacity: int = 256) -> KVStore:
        """An empty store of this decoder's shape."""
        first = self._layers[0]
        return KVStore(
            len(self._layers),
            first.num_kv_heads,
            first.head_dim,
            dtype=self.dtype,
            device=self.device,
            capacity=capacity,
        )

    def forward(
        self, x: Tensor, positions: Tensor, store: KVStore, deepstack: Deepstack | None = None
    ) -> DecoderOutput:
        """Append `x` [n, H] at `positions` [3, n] or [n] to the sequence in `store`."""
        return self.forward_turned(x, self._rotary(positions), store, deepstack)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of `positions`, for callers that use the same ones many times."""
        return self._rotary(positions)

    def forward_turned(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], store: KVStore, deepstack: Deepstack | None = None
    ) -> DecoderOutput:
        """`forward` with the rotary angles already known."""
        cos, sin = rotary
        num_past, num_new = store.length, x.shape[0]
        store.reserve(num_new)
        tapped: Tensor | None = None
        for index, layer in enumerate(self._layers):
            query, key, value = layer.project(x, cos, sin)
            keys, values = store.write(index, key, value)
            x = layer.finish(x, attend(query, keys, values, num_past))
            if deepstack is not None and index < len(deepstack.features):
                x = x.index_add(0, deepstack.rows, deepstack.features[index].to(x.dtype))
            if index + 1 == self._tapped_layer:
                tapped = x
        store.advance(num_new)
        return DecoderOutput(rms_norm(x, self._norm, self._eps), tapped)

    def step(self, x: Tensor, positions: Tensor, store: KVStore) -> Tensor:
        """Append one token [1, H] and return its normed hidden state [1, H]: `forward` at the lowest cost."""
        if self.host is None:
            return self.forward(x, positions, store).hidden
        out = torch.empty_like(x)
        self.host.step(x[0].numpy(), self.host.turns(*self._rotary(positions)), store, out[0].numpy())
        return out

    def step_static(self, x: Tensor, positions: Tensor, index: Tensor, store: KVStore) -> Tensor:
        """One token [1, H] written at row `index` [1] of `store`, without any number known to the host.

        Returns the normed hidden state [1, H]. The caller keeps `store.length`; the store must not grow.
        """
        cos, sin = self._rotary(positions)
        allowed = torch.arange(store.capacity, device=x.device) <= index
        for number, layer in enumerate(self._layers):
            query, key, value = layer.project(x, cos, sin)
            keys, values = store.write_at(number, index, key, value)
            x = layer.finish(x, attend_masked(query, keys, values, allowed))
        return rms_norm(x, self._norm, self._eps)
