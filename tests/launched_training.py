"""Started by a launcher: trains the four settings of packing and accumulation in one world, and writes what came out.

python -m tests.launched_training TARGET STORE OUT: reads a tiny target and store, writes OUT/<setting>/ and, from the
main process, OUT/world.json.
"""

import os
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState

from data.run import asked_for_fsdp, start_processes
from data.store import FeatureStore
from models.files import read_json, write_json
from models.target import TargetConfig, load_target, target_identity
from tests.conftest import TINY_LAYER_IDS, build_drafter, dspark_config, eagle3_config
from tests.test_train import train_config
from train import trainer

SETTINGS = {  # packing, tokens of a step's micro-batches of all processes: one of each process, or at least four
    "packed": (True, 1024),
    "packed_4": (True, 80),
    "rows": (False, 1024),
    "rows_4": (False, 80),
}
NUM_STEPS = 20
MODELS = {
    "dspark": dspark_config(num_layers=2),
    "eagle3": eagle3_config(),  # sharded in another way
    "sampled": dspark_config(sampled_vocabulary=10),
}
RUNS = [
    *((setting, "dspark") for setting in SETTINGS),
    ("packed", "eagle3"),
    ("packed", "sampled"),
    ("rows_4", "sampled"),
]


def num_micro_batches(store: FeatureStore, setting: str, num_processes: int) -> set[int]:
    """Of one process in a step, over all steps of a run."""
    packing, tokens = SETTINGS[setting]
    config = train_config(Path(), packing=packing, tokens_per_batch=tokens // num_processes)
    plan = trainer.step_plan(config, store, num_processes)
    return {len(plan.micro_batches(step)[0]) for step in range(NUM_STEPS)}


def main(target_path: str, store_path: str, out: str, mixed_precision: str) -> None:
    torch.set_num_threads(1)
    config = TargetConfig("tiny", target_path, TINY_LAYER_IDS, 4, "float32", None, None, None, 1, None)
    target, identity, store = (
        load_target(config, torch.device("cpu")),
        target_identity(config),
        FeatureStore(Path(store_path)),
    )
    for setting, model in RUNS:
        packing, tokens = SETTINGS[setting]
        AcceleratorState._reset_state()
        accelerator = start_processes(os.environ, mixed_precision=mixed_precision)
        train = train_config(
            Path(out) / f"{setting}_{model}",
            num_steps=NUM_STEPS,
            packing=packing,
            tokens_per_batch=tokens // accelerator.num_processes,
            checkpoint_every=10,
            log_every=1,
            mixed_precision=mixed_precision,
        )
        drafter = build_drafter(MODELS[model], target, config)
        fsdp = asked_for_fsdp(os.environ)
        folder = trainer.train(train, drafter, store, identity, accelerator, run_config={}, fsdp=fsdp)
        assert folder.name == f"step_{NUM_STEPS:08d}"
        launcher = read_json(folder / "trainer.json")["launcher"]
    if accelerator.is_main_process:
        kind = str(accelerator.distributed_type)
        world = {"num_processes": accelerator.num_processes, "type": kind, "launcher": launcher}
        write_json(Path(out) / "world.json", world)
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
