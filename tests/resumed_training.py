"""Runs that are killed and resumed: how they are started, in this process, forked or by a launcher, and compared.

python -m tests.resumed_training TARGET STORE FOLDER: started by a launcher, trains the runs that FOLDER/jobs.json
lists, one after another in one world, and writes to FOLDER/outcomes.json what became of each: null, or its error.
"""

import json
import os
import random
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator, debug_launcher
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import Tensor

from data.run import asked_for_fsdp, start_processes
from data.store import FeatureStore
from models.drafter_files import step_folders
from models.files import read_json, write_json
from models.target import Target, TargetConfig, TargetIdentity, load_target, target_identity
from tests.conftest import TINY_LAYER_IDS, build_dspark, files_of
from tests.test_train import SPEEDS, train_config
from train import trainer
from train.config import ProbeConfig, TrainConfig

MEASURED = {2: 1.5, 4: 1.2, 6: 1.8}  # acceptance lengths that probes find, by step
PROBES = ProbeConfig(every=2, prompts=None, num_prompts=1, max_new_tokens=1, temperature=0.0)
plain_step = trainer.optimiser_step


def noisy_step(run: trainer.Run, batches: list[Any], step: int) -> None:
    """A step that depends on every global random state, as dropout would."""
    noise = float(torch.rand(())) + random.random() + float(np.random.rand())
    for batch in batches:
        batch.features.mul_(1 + noise / 30)
    plain_step(run, batches, step)


def probe(folder: Path) -> dict[str, float]:
    """Finds what MEASURED says, and leaves no random state as it was."""
    torch.rand(3), random.random(), np.random.rand()
    return {"acceptance_length": MEASURED.get(int(folder.name.removeprefix("step_")), 1.0), "rounds": 3.0}


class Runs:
    """Starts runs on one tiny target and store."""

    def __init__(self, target: Target, config: TargetConfig, store: FeatureStore, identity: TargetIdentity) -> None:
        self.target, self.config, self.store, self.identity = target, config, store, identity

    def train(self, config: TrainConfig, *, accelerator: Accelerator | None = None, fsdp: bool = False) -> Path:
        """In this process, from weights and random states that are always the same; returns the run's folder."""
        drafter = build_dspark(self.target, self.config)
        accelerator = accelerator or Accelerator(cpu=True)
        seed = 5 + accelerator.process_index  # noise is another in each process
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
        probed = probe if config.probe.every else None
        about = {"seed": config.seed, "num_steps": config.num_steps}
        trainer.train(
            config, drafter, self.store, self.identity, accelerator, run_config=about, fsdp=fsdp, probe=probed
        )
        return Path(config.output_dir)

    def train_refused(self, config: TrainConfig, num_processes: int, *, fsdp: bool = False) -> list[str]:
        """What each forked process raises as its ValueError."""
        root = Path(config.output_dir)
        plain = self.train

        def noting(config: TrainConfig, **options: Any) -> Path:
            try:
                plain(config, **options)
            except ValueError as error:
                (root / f"error_{torch.distributed.get_rank()}").write_text(str(error))
            return root

        self.train = noting  # type: ignore[method-assign]
        self.train_together(config, num_processes, fsdp=fsdp)
        self.train = plain  # type: ignore[method-assign]
        return [(root / f"error_{rank}").read_text() for rank in range(num_processes)]

    def train_together(self, config: TrainConfig, num_processes: int, *, fsdp: bool = False) -> Path:
        """In so many forked processes."""

        def work() -> None:
            AcceleratorState._reset_state(reset_partial_state=True)  # inherited
            accelerator = Accelerator(cpu=True)
            assert accelerator.num_processes == num_processes
            self.train(config, accelerator=accelerator, fsdp=fsdp)

        debug_launcher(work, num_processes=num_processes)
        return Path(config.output_dir)


@pytest.fixture
def runs(
    tiny_target: Target,
    tiny_target_config: TargetConfig,
    tiny_store: FeatureStore,
    tiny_identity: TargetIdentity,
    monkeypatch: pytest.MonkeyPatch,
) -> Runs:
    """Of noisy steps."""
    monkeypatch.setattr(trainer, "optimiser_step", noisy_step)
    return Runs(tiny_target, tiny_target_config, tiny_store, tiny_identity)


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_target: Target,
    tiny_target_config: TargetConfig,
    tiny_store: FeatureStore,
    tiny_identity: TargetIdentity,
) -> Path:
    """The run of `config_of` that nothing disturbed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "optimiser_step", noisy_step)
        runs = Runs(tiny_target, tiny_target_config, tiny_store, tiny_identity)
        return runs.train(config_of(tmp_path_factory.mktemp("whole")))


def config_of(folder: Path, **changes: Any) -> TrainConfig:
    """6 steps, checkpoints and probes at every second, reports at other steps; the newest is kept, and the best, which
    is that of step 2, then of step 6."""
    values: dict[str, Any] = {"num_steps": 6, "keep_checkpoints": 1, "log_every": 4, "probe": PROBES}
    return train_config(folder, **values | changes)


def steps_of(folder: Path) -> list[int]:
    """Of a run's checkpoints."""
    return [int(path.name.removeprefix("step_")) for path in step_folders(folder / "checkpoints")]


def started(work: Callable[[], object], *, quiet: bool = True) -> int:
    """Fork `work` into a process group of its own; returns its id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setpgid(0, 0)
            if quiet:  # what a planted kill makes of the other processes
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_group(child: int) -> int:
    """SIGKILL a process that `started` forked, and all of its own; returns its exit code."""
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(child, signal.SIGKILL)  # it has not come to make a group, or ended
    return ended(child)


def killed_at_call(owner: Any, name: str, call: int, *, rank: int) -> None:
    """From here on, the process of that rank kills itself in its n-th call of `owner.name`."""
    original, calls = getattr(owner, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += torch.distributed.is_initialized() and torch.distributed.get_rank() == rank
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, counted)


def weights(folder: Path) -> dict[str, Tensor]:
    """Of a run's newest checkpoint."""
    return load_file(step_folders(folder / "checkpoints")[-1] / "model.safetensors")


def largest_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def logged(folder: Path) -> list[dict[str, float]]:
    """Lines of metrics.jsonl but for how fast it went."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in SPEEDS} for line in lines]


def assert_same_run(folder: Path, whole: Path) -> None:
    """Equal checkpoints, byte by byte and with nothing beside them, and equal metrics.

    Torch gives the metadata of a sharded optimiser a random name, so that is left out, with the sum of its bytes.
    """
    ours, theirs = folder / "checkpoints", whole / "checkpoints"
    assert [path.name for path in step_folders(ours)] == [path.name for path in step_folders(theirs)]
    assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()}
    last = step_folders(theirs)[-1].name
    found, expected = files_of(ours / last), files_of(theirs / last)
    assert found.keys() == expected.keys()
    random_files = {"optimizer/.metadata", "trainer.json"} if "optimizer/.metadata" in found else set()
    differing = {name for name in found if found[name] != expected[name]} - random_files
    assert not differing, differing
    if (theirs / "best").is_symlink():
        assert (ours / "best").readlink() == (theirs / "best").readlink()
    assert logged(folder) == logged(whole)


def main(target_path: str, store_path: str, folder: str) -> None:
    torch.set_num_threads(1)
    config = TargetConfig("tiny", target_path, TINY_LAYER_IDS, 4, "float32", None, None, None, 1, None)
    target, identity = load_target(config, torch.device("cpu")), target_identity(config)
    runs = Runs(target, config, FeatureStore(Path(store_path)), identity)
    results: dict[str, str | None] = {}
    for name, changes in read_json(Path(folder) / "jobs.json").items():
        AcceleratorState._reset_state()
        accelerator = start_processes(os.environ, mixed_precision="no")
        stop_at = changes.pop("stop_at", None)
        trainer.optimiser_step = noisy_step if stop_at is None else stopping_after(stop_at)
        try:
            run = train_config(Path(changes.pop("folder")), **changes)
            runs.train(run, accelerator=accelerator, fsdp=asked_for_fsdp(os.environ))
            results[name] = None
        except ValueError as error:
            results[name] = str(error)
        if accelerator.is_main_process:
            write_json(Path(folder) / "outcomes.json", results)
    accelerator.end_training()


def stopping_after(num_steps: int) -> Callable[..., None]:
    """A SIGTERM comes in that step."""

    def step(run: trainer.Run, batches: list[Any], number: int) -> None:
        if number == num_steps - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        noisy_step(run, batches, number)

    return step


if __name__ == "__main__":
    main(*sys.argv[1:])
