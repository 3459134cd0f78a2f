"""One buffer for the keys and values of one sequence: written in place, cut by moving a length."""

import torch
from torch import Tensor

# A store starts this long and doubles when full: growing copies each token a bounded number of times.
INITIAL_TOKENS = 256


class KVStore:
    """Keys and values of `num_layers` layers, [layers, 2, H_kv, capacity, D], for one sequence.

    A forward pass writes each layer's new rows behind `length` and calls `advance` once, so that a pass that
    fails half-way leaves nothing behind. Rows past `length` are garbage.
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        capacity: int = INITIAL_TOKENS,
    ) -> None:
        self._rows = torch.zeros(num_layers, 2, num_heads, capacity, head_dim, dtype=dtype, device=device)
        self.length = 0

    @property
    def capacity(self) -> int:
        """Tokens that fit before the buffer grows."""
        return self._rows.shape[3]

    @property
    def rows(self) -> Tensor:
        """The whole buffer [layers, 2, H_kv, capacity, D]; it is another one after `reserve` made it grow."""
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        return self._rows.numel() * self._rows.element_size()

    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` more tokens behind `length`."""
        wanted = self.length + num_tokens
        if wanted <= self.capacity:
            return
        capacity = self.capacity
        while capacity < wanted:
            capacity *= 2
        layers, two, heads, _, head_dim = self._rows.shape
        rows = self._rows.new_zeros(layers, two, heads, capacity, head_dim)
        rows[..., : self.length, :] = self._rows[..., : self.length, :]
        self._rows = rows

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put `keys` and `values` [H_kv, n, D] behind `length`; return all keys and values [H_kv, length + n, D]."""
        end = self.length + keys.shape[1]
        layer_keys, layer_values = self._rows[layer, 0], self._rows[layer, 1]
        layer_keys[:, self.length : end] = keys
        layer_values[:, self.length : end] = values
        return layer_keys[:, :end], layer_values[:, :end]

    def write_at(self, layer: int, index: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put one token [H_kv, 1, D] at row `index` [1], a device tensor; return the whole buffers.

        For captured graphs: neither the row nor any shape is known to the host.
        """
        layer_keys, layer_values = self._rows[layer, 0], self._rows[layer, 1]
        layer_keys.index_copy_(1, index, keys)
        layer_values.index_copy_(1, index, values)
        return layer_keys, layer_values

    def advance(self, num_tokens: int) -> None:
        """Count `num_tokens` rows, written by every layer, as part of the sequence."""
        self.length += num_tokens

    def crop(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        assert 0 <= length <= self.length, f"cannot crop {self.length} tokens to {length}"
        self.length = length

    def reset(self) -> None:
        """Forget all tokens."""
        self.length = 0
