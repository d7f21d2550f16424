"""The target answers prompts: python generate.py [prompts=FILE.jsonl] [target=...] [sampling.temperature=...]."""

import os
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from data.generate import GenerateConfig, generate
from data.run import prepare_target, stage, start_processes, user_errors, write_provenance
from models.config import register, to_dataclass
from models.target import load_target, load_tokenizer, target_identity

register("generate_schema", GenerateConfig)


@hydra.main(version_base=None, config_path="conf", config_name="generate")
def main(node: DictConfig) -> None:
    with user_errors("generate.py"):
        config = to_dataclass(GenerateConfig, node, section="generate")
        accelerator = start_processes(os.environ, single=True)
        folder = Path(config.output_dir)
        target_config = prepare_target(node.target, folder, accelerator)
        with stage(folder, "generate"):
            layer_ids = () if config.capture is None else None
            target = load_target(target_config, accelerator.device, layer_ids=layer_ids)
            generate(config, target, load_tokenizer(target_config), target_identity(target_config))
        write_provenance(folder / "generate_provenance.json", node, sys.argv)


if __name__ == "__main__":
    main()
