"""The target answers prompts: python generate.py [prompts=SOURCE] [target=...] [server=URL] [sampling.seed=...]."""

import os
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from data.generate import GenerateConfig, generate, generate_by_servers
from data.run import prepare_target, stage, start_processes, user_errors, write_provenance
from models.config import register, to_dataclass
from models.target import load_spec, load_target, load_tokenizer, target_identity

register("generate_schema", GenerateConfig)


@hydra.main(version_base=None, config_path="conf", config_name="generate")
def main(node: DictConfig) -> None:
    with user_errors("generate.py"):
        config = to_dataclass(GenerateConfig, node, section="generate")
        accelerator = start_processes(os.environ, single=True)
        folder = Path(config.output_dir)
        target_config = prepare_target(node.target, folder, accelerator)
        thinking = target_config.thinking
        with stage(folder, "generate"):
            tokenizer = load_tokenizer(target_config)
            if config.server is not None:
                generate_by_servers(config, load_spec(target_config), tokenizer, thinking=thinking)
            else:
                layer_ids = () if config.capture is None else None
                target = load_target(target_config, accelerator.device, layer_ids=layer_ids)
                generate(config, target, tokenizer, target_identity(target_config), thinking=thinking)
        write_provenance(folder / "generate_provenance.json", node, sys.argv)


if __name__ == "__main__":
    main()
