"""Captured calls: a fixed sequence of small kernels replayed as one CUDA graph, without Python between them.

One switch turns it on (`EngineConfig.use_graphs`, by default where there is a GPU). On a CPU a captured call runs its
function directly on the same static inputs, so that everything but the capture itself is exercised everywhere.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.models.sampling import Sampler

NUM_WARM_UPS = 3  # as PyTorch's notes on CUDA graphs ask: libraries allocate their workspaces on the first calls

StaticFunction = Callable[..., tuple[Tensor, ...]]


class CapturedCall:
    """`function` of device tensors with fixed shapes; its inputs are copied in, its outputs live until the next call.

    `samplers` are those the function draws with: their random state becomes part of the graph, and the warm-up
    leaves no trace in them.
    """

    def __init__(self, function: StaticFunction, examples: Sequence[Tensor], samplers: Sequence[Sampler] = ()) -> None:
        self._function = function
        self._inputs = [example.clone() for example in examples]
        self._outputs: tuple[Tensor, ...] = ()
        self._graph: torch.cuda.CUDAGraph | None = None
        if examples[0].device.type == "cuda":
            self._graph = self._capture(samplers)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Copy `inputs` in, run, and return the static outputs."""
        for static, given in zip(self._inputs, inputs, strict=True):
            static.copy_(given)
        if self._graph is None:
            return self._function(*self._inputs)
        self._graph.replay()
        return self._outputs

    def _capture(self, samplers: Sequence[Sampler]) -> "torch.cuda.CUDAGraph":
        kept = [sampler.snapshot() for sampler in samplers]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(NUM_WARM_UPS):
                self._function(*self._inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        for generator in {sampler.generator for sampler in samplers}:
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph):
            self._outputs = self._function(*self._inputs)
        for sampler, state in zip(samplers, kept, strict=True):
            sampler.restore(state)
        return graph
