"""Processes that share one copy of a target too large for one device, and therefore work on one shard together."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from models.target import TargetConfig

STOP = -1


class TargetGroup:
    """The `tp_size` consecutive processes that hold one target. Its first one leads: it says what all compute next."""

    def __init__(self, config: TargetConfig, accelerator: Accelerator) -> None:
        """Raises ValueError where the processes cannot be divided into groups."""
        size, num_processes = config.tp_size, accelerator.num_processes
        if size < 1 or num_processes % size:
            raise ValueError(
                f"target.tp_size={size} processes share a target, so the launcher must start a multiple of them, got "
                f"{num_processes}: change --num_processes or target.tp_size"
            )
        self.index, self.num_groups = accelerator.process_index // size, num_processes // size
        self.is_leader = accelerator.process_index % size == 0
        self.device = accelerator.device
        self.mesh: DeviceMesh | None = None
        if size > 1:
            mesh = init_device_mesh(self.device.type, (self.num_groups, size), mesh_dim_names=("groups", "target"))
            self.mesh = mesh["target"]

    def agree(self, value: int) -> int:
        """The leader's value, in every process of the group."""
        if self.mesh is None:
            return value
        shared = torch.tensor(value, device=self.device)
        dist.broadcast(shared, group=self.mesh.get_group(), group_src=0)
        return int(shared)

    def follow(self) -> Iterator[int]:
        """What the leader passes to `agree`, until that is STOP."""
        while (value := self.agree(STOP)) != STOP:
            yield value
