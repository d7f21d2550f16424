"""How the launcher's processes share one drafter: alone, DDP, FSDP2 or DeepSpeed ZeRO.

Losses are sums over the whole optimiser step and launchers take means over processes, so the trainer multiplies by the
number of processes. Weights and gradients are float32 between steps under every launcher, also where layers compute in
bf16.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from models.base import DraftBatch, Drafter, DraftLoss
from models.checkpoint import load_weights
from models.drafter_files import WEIGHTS, read_weights
from train.config import OptimConfig
from train.optim import build_optimizer

OPTIMIZER = "optimizer.safetensors"
SHARDED_OPTIMIZER = "optimizer"  # a folder of torch's distributed checkpoint


class Shared(ABC):
    """A drafter as the launcher wraps it, with its optimiser."""

    name: str
    drafter: Drafter
    accelerator: Accelerator
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def __call__(self, batch: DraftBatch) -> DraftLoss:
        with self.accelerator.autocast():
            return self.model(batch)

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    @abstractmethod
    def accumulating(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch; processes exchange gradients in the last one of a step only."""

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    @abstractmethod
    def update(self, max_grad_norm: float) -> Tensor:
        """Clip, step and forget the gradients; returns their norm before clipping, of the whole model."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Whole float32 weights, complete on the main process; a collective call."""

    @abstractmethod
    def save_optimizer(self, folder: Path) -> None:
        """A collective call; every process may write into `folder`, files of its own name. Raises OSError or
        SafetensorError where it cannot."""

    @abstractmethod
    def load(self, folder: Path, *, num_processes: int, launcher: str) -> None:
        """Weights and optimiser of a checkpoint, which so many processes of a launcher of that `name` wrote. Raises
        ValueError where it cannot."""


class Replicated(Shared):
    """One process, or DDP: every process holds everything."""

    def __init__(self, drafter: Drafter, config: OptimConfig, accelerator: Accelerator) -> None:
        self.name = "one process" if accelerator.num_processes == 1 else "DDP"
        self.drafter, self.accelerator = drafter, accelerator
        self.optimizer = build_optimizer(drafter.parameters(), config)
        self.model = accelerator.prepare(drafter)

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if is_last else self.accelerator.no_sync(self.model)

    def update(self, max_grad_norm: float) -> Tensor:
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def weights(self) -> dict[str, Tensor]:
        return self.drafter.state_dict()

    def save_optimizer(self, folder: Path) -> None:
        if self.accelerator.is_main_process:
            state = {name: tensor.contiguous() for name, tensor in optimizer_state(self).items()}
            save_file(state, folder / OPTIMIZER)

    def load(self, folder: Path, *, num_processes: int, launcher: str) -> None:  # noqa: ARG002 (any number)
        load_weights(self.drafter, read_weights(folder), folder / WEIGHTS)
        load_optimizer(self, folder)


class FullySharded(Replicated):
    """FSDP2 by torch's own call, on CUDA and on gloo alike: Accelerate would turn it into DDP on a CPU.

    Each of a drafter's sharded layers is gathered for its own forward and backward, the rest once a step. Layers
    compute in bf16 where that is asked for; gradients are summed in float32.
    """

    def __init__(self, drafter: Drafter, config: OptimConfig, accelerator: Accelerator) -> None:
        self.name, self.drafter, self.accelerator = "FSDP2", drafter, accelerator
        narrow = torch.bfloat16 if accelerator.mixed_precision == "bf16" else None
        options: dict[str, Any] = {
            "mesh": init_device_mesh(accelerator.device.type, (accelerator.num_processes,)),
            # inputs stay as they are: rotary tables would be rounded with the rest
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=narrow, reduce_dtype=torch.float32, cast_forward_inputs=False
            ),
        }
        for layer in drafter.sharded_layers or ():
            fully_shard(layer, **options)
        fully_shard(drafter, **options)
        self.model = drafter
        self.optimizer = build_optimizer(drafter.parameters(), config)

    def __call__(self, batch: DraftBatch) -> DraftLoss:
        return self.model(batch)

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[Any]:
        self.model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        return nullcontext()

    def weights(self) -> dict[str, Tensor]:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_model_state_dict(self.model, options=options).items()
        return {name: tensor for name, tensor in whole if isinstance(tensor, Tensor)}

    def save_optimizer(self, folder: Path) -> None:
        try:
            save_sharded(optimizer_state(self), checkpoint_id=folder / SHARDED_OPTIMIZER)
        except CheckpointException as error:  # raised by all processes where one could not write
            reason, _trace = next(iter(error.failures.values()))
            raise OSError(f"{folder / SHARDED_OPTIMIZER}: {reason}") from error

    def load(self, folder: Path, *, num_processes: int, launcher: str) -> None:  # noqa: ARG002 (any number)
        tensors = read_weights(folder)
        own = dict(self.drafter.named_parameters()) | dict(self.drafter.named_buffers())
        if own.keys() != tensors.keys():
            raise ValueError(f"{folder / WEIGHTS} holds other weights than this drafter has")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(_like(tensors[name], tensor))
        self.drafter.check_weights()
        load_optimizer(self, folder)


class Zero(Shared):
    """DeepSpeed ZeRO-2 or ZeRO-3, through Accelerate; clipping and stepping happen inside the engine."""

    def __init__(self, drafter: Drafter, config: OptimConfig, accelerator: Accelerator) -> None:
        plugin = accelerator.state.deepspeed_plugin
        assert plugin is not None
        settings = plugin.deepspeed_config
        settings["train_micro_batch_size_per_gpu"] = 1  # counts nothing here: losses are sums over the step
        settings["gradient_clipping"] = config.max_grad_norm
        if accelerator.mixed_precision == "bf16":
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
        self.name = f"ZeRO-{settings['zero_optimization']['stage']}"
        self.drafter, self.accelerator = drafter, accelerator
        self.model, self.optimizer = accelerator.prepare(drafter, build_optimizer(drafter.parameters(), config))

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[Any]:
        self.accelerator.sync_gradients = is_last  # the engine steps in the backward call of the last one
        return nullcontext()

    def update(self, max_grad_norm: float) -> Tensor:  # noqa: ARG002 (told at the start)
        return torch.as_tensor(float(self.model.get_global_grad_norm()))  # type: ignore[operator]

    def weights(self) -> dict[str, Tensor]:
        """Of the master copies, layer by layer where they are sharded."""
        from deepspeed.utils import safe_get_full_fp32_param

        whole = dict(self.drafter.named_buffers())
        for name, parameter in self.drafter.named_parameters():
            master = safe_get_full_fp32_param(parameter)
            if self.accelerator.is_main_process and master is not None:  # one at a time on the device, kept on the host
                whole[name] = master.to("cpu", copy=True)
        return whole

    def save_optimizer(self, folder: Path) -> None:
        try:
            self.model.save_checkpoint(str(folder), tag=SHARDED_OPTIMIZER)  # type: ignore[operator]
        except RuntimeError as error:  # what torch.save makes of a full disk
            raise OSError(f"{folder / SHARDED_OPTIMIZER}: {str(error).splitlines()[0]}") from error

    def load(self, folder: Path, *, num_processes: int, launcher: str) -> None:
        if (launcher, num_processes) != (self.name, self.accelerator.num_processes):
            raise ValueError(
                f"{folder} was written by {launcher} on {num_processes} process(es); {self.name} resumes only its own "
                f"checkpoints, on as many processes, not on {self.accelerator.num_processes}. Its {WEIGHTS} holds the "
                f"whole float32 weights: init={folder} starts from them with a fresh optimiser, under any launcher"
            )
        path, _ = self.model.load_checkpoint(str(folder), tag=SHARDED_OPTIMIZER)  # type: ignore[operator]
        assert path is not None, folder  # DeepSpeed only warns where it finds nothing


def share(drafter: Drafter, config: OptimConfig, accelerator: Accelerator, *, fsdp: bool) -> Shared:
    """`fsdp`: whether the launcher asked for FSDP2, which Accelerate does not tell on a CPU."""
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        return Zero(drafter, config, accelerator)
    if not fsdp:
        return Replicated(drafter, config, accelerator)
    if accelerator.num_processes == 1:
        raise ValueError("FSDP2 was asked for with one process: start several, or use another launcher config")
    return FullySharded(drafter, config, accelerator)


def optimizer_state(shared: Shared) -> dict[str, Tensor]:
    """AdamW's tensors as `<parameter>.<exp_avg, exp_avg_sq or step>`, zeros where no step was done yet."""
    flat = {}
    for name, parameter in shared.drafter.named_parameters():
        state = shared.optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        flat |= {f"{name}.{key}": value for key, value in state.items()}
    return flat


def load_optimizer(shared: Shared, folder: Path) -> None:
    """Of one process, DDP or FSDP2, whichever wrote it."""
    state = optimizer_state(shared)
    if (folder / SHARDED_OPTIMIZER / ".metadata").is_file():
        sharded = any(isinstance(tensor, DTensor) for tensor in state.values())
        load_sharded(state, checkpoint_id=folder / SHARDED_OPTIMIZER, no_dist=not sharded)
        return
    if not (folder / OPTIMIZER).is_file():
        raise ValueError(
            f"{folder} holds an optimiser of DeepSpeed ZeRO, which only the same launcher resumes; "
            f"init={folder} starts from its weights with a fresh optimiser"
        )
    stored = load_file(folder / OPTIMIZER)
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(_like(stored[name], tensor))


def _like(whole: Tensor, own: Tensor) -> Tensor:
    """Sharded as `own` is, if it is."""
    if not isinstance(own, DTensor):
        return whole
    return distribute_tensor(whole.to(own.device), own.device_mesh, own.placements)
