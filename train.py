"""Train a drafter on a feature store: accelerate launch train.py model=dspark [store=FOLDER] [tracker=wandb]."""

import os
import sys
from pathlib import Path

import hydra
from accelerate.utils import set_seed
from omegaconf import DictConfig

from data.run import prepare_target, provenance, stage, start_processes, user_errors, write_provenance
from models.config import register, to_dataclass, typed
from models.target import load_tokenizer, target_identity
from train.config import TrainConfig
from train.setup import build_drafter, open_features
from train.trainer import train

register("train_schema", TrainConfig)


@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(node: DictConfig) -> None:
    with user_errors("train.py"):
        config, model = to_dataclass(TrainConfig, node, section="train"), typed(node.model, section="model")
        accelerator = start_processes(os.environ, mixed_precision=config.mixed_precision)
        folder = Path(config.output_dir)
        target_config = prepare_target(node.target, folder, accelerator)
        with stage(folder, "train", is_main=accelerator.is_main_process):
            set_seed(config.seed)  # initial weights: the same on every process
            identity, tokenizer = target_identity(target_config), load_tokenizer(target_config)
            store = open_features(config, target_config, tokenizer, identity, accelerator)
            drafter = build_drafter(model, target_config, tokenizer, store, accelerator, warm_start=config.warm_start)
            if accelerator.is_main_process:
                write_provenance(folder / "train_provenance.json", node, sys.argv)
            train(config, drafter, store, identity, accelerator, run_config=provenance(node, sys.argv))


if __name__ == "__main__":
    main()
