"""CUDA graphs: what a function of fixed shapes does on the device, recorded once and run again without Python."""

from collections.abc import Callable

import torch
from torch import Tensor

WARM_UPS = 3  # as torch asks for: libraries choose their kernels in the first calls


class Replay:
    """A function of tensors that waits for no value of theirs. What it gives is overwritten by the next call."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> None:
        """Runs `function` on copies of `inputs`, several times. Raises ValueError elsewhere than on CUDA."""
        if inputs[0].device.type != "cuda":
            raise ValueError(
                f"cuda_graphs=true needs a CUDA device, got {inputs[0].device.type}; use cuda_graphs=false"
            )
        self.inputs = [x.clone() for x in inputs]
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                function(*self.inputs)
        current.wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = function(*self.inputs)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Inputs of the same shapes."""
        for own, new in zip(self.inputs, inputs, strict=True):
            own.copy_(new)
        self.graph.replay()
        return self.outputs
