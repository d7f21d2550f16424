"""Features of the target over answered chats: accelerate launch extract.py [responses=FILE.jsonl] [store=FOLDER]."""

import os
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from data.extract import ExtractConfig, extract, verify_store
from data.run import prepare_target, stage, start_processes, user_errors, write_provenance
from models.config import register, to_dataclass
from models.target import load_target, load_tokenizer, target_identity

register("extract_schema", ExtractConfig)


@hydra.main(version_base=None, config_path="conf", config_name="extract")
def main(node: DictConfig) -> None:
    with user_errors("extract.py"):
        config = to_dataclass(ExtractConfig, node, section="extract")
        if config.verify:
            return verify_store(Path(config.store))
        accelerator = start_processes(os.environ)
        folder = Path(config.output_dir)
        target_config = prepare_target(node.target, folder, accelerator)
        with stage(folder, "extract", is_main=accelerator.is_main_process):
            target = load_target(target_config, accelerator.device)
            extract(config, target, load_tokenizer(target_config), target_identity(target_config), accelerator)
        if accelerator.is_main_process:
            write_provenance(folder / "extract_provenance.json", node, sys.argv)


if __name__ == "__main__":
    main()
