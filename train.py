"""Train a drafter on a feature store: accelerate launch train.py model=dspark [store=FOLDER] [tracker=wandb]."""

import os
import sys
from pathlib import Path

import hydra
from accelerate.utils import set_seed
from omegaconf import DictConfig

from data.run import asked_for_fsdp, prepare_target, provenance, stage, start_processes, user_errors
from data.tracking import choose_tracker
from eval.probe import Probe, heldout_prompts
from models.config import register, to_dataclass, typed
from models.target import load_tokenizer, target_identity
from train.config import TrainConfig
from train.estimate import show_estimate
from train.setup import build_drafter, open_features
from train.trainer import train

register("train_schema", TrainConfig)


@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(node: DictConfig) -> None:
    with user_errors("train.py"):
        config, model = to_dataclass(TrainConfig, node, section="train"), typed(node.model, section="model")
        fsdp = asked_for_fsdp(os.environ)
        accelerator = start_processes(os.environ, mixed_precision=config.mixed_precision)
        config.mixed_precision = accelerator.mixed_precision
        config.tracker, config.wandb = choose_tracker(config.tracker, config.wandb, os.environ)
        folder = Path(config.output_dir)
        target_config = prepare_target(node.target, folder, accelerator)
        if config.estimate:
            shown = show_estimate(config, model, target_config, accelerator)
            if accelerator.is_main_process:
                sys.stdout.write(shown)
            return
        with stage(folder, "train", is_main=accelerator.is_main_process):
            set_seed(config.seed)  # initial weights: the same on every process
            identity, tokenizer = target_identity(target_config), load_tokenizer(target_config)
            store = open_features(config, target_config, tokenizer, identity, accelerator)
            drafter = build_drafter(config, model, target_config, tokenizer, store, accelerator)
            asked, device = config.probe, accelerator.device
            prompts = heldout_prompts(asked.prompts, asked.num_prompts, tokenizer, target_config.thinking)
            probe = Probe(target_config, identity, device, prompts, asked.max_new_tokens, asked.temperature)
            about = provenance(node, sys.argv)
            train(config, drafter, store, identity, accelerator, run_config=about, fsdp=fsdp, probe=probe)
        accelerator.end_training()


if __name__ == "__main__":
    main()
