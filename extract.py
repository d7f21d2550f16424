"""Features of the target over answered chats: accelerate launch extract.py [responses=FILE] [store=FOLDER]."""

import os
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from data.extract import ExtractConfig, extract
from data.inspect import inspect
from data.run import prepare_target, stage, start_processes, user_errors, write_provenance
from models.config import register, to_dataclass

register("extract_schema", ExtractConfig)


@hydra.main(version_base=None, config_path="conf", config_name="extract")
def main(node: DictConfig) -> None:
    with user_errors("extract.py"):
        config = to_dataclass(ExtractConfig, node, section="extract")
        accelerator = start_processes(os.environ)
        folder = Path(config.output_dir)
        target = prepare_target(node.target, folder, accelerator)
        if (text := inspect(config, target, accelerator)) is not None:
            if accelerator.is_main_process:
                sys.stdout.write(text)
            return
        with stage(folder, "extract", is_main=accelerator.is_main_process):
            extract(config, target, accelerator)
        if accelerator.is_main_process:
            write_provenance(folder / "extract_provenance.json", node, sys.argv)


if __name__ == "__main__":
    main()
