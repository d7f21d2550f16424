"""Measure a drafter with the lossless runtime: python eval.py draft=FOLDER|ngram|vanilla [temperature=[0,1]]."""

import os
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from data.run import prepare_target, provenance, read_stages, stage, start_processes, user_errors, write_provenance
from data.tracking import TrackerName, choose_tracker
from eval.config import EvalConfig
from eval.harness import Harness
from eval.markdown import render
from eval.report import show_in_wandb, write_summary
from eval.subject import load_subject, told_apart
from models.config import register, to_dataclass
from models.target import load_target, load_tokenizer, target_identity

register("eval_schema", EvalConfig)


@hydra.main(version_base=None, config_path="conf", config_name="eval")
def main(node: DictConfig) -> None:
    with user_errors("eval.py"):
        config = to_dataclass(EvalConfig, node, section="eval")
        accelerator = start_processes(os.environ)
        tracker, wandb = choose_tracker(config.tracker, config.wandb, os.environ)
        folder = Path(config.output_dir)
        target_config = prepare_target(node.target, folder, accelerator, may_quantise=True)
        with stage(folder, "eval", is_main=accelerator.is_main_process):
            identity, device = target_identity(target_config), accelerator.device
            drafts = (config.draft, *config.compare)
            place = (target_config, identity, device)
            loaded = [load_subject(draft, *place, allow_pickle=config.allow_pickle) for draft in drafts]
            subjects = told_apart(loaded)
            target = load_target(target_config, device, layer_ids=())
            for subject in subjects:
                subject.bind(target)
            tokenizer = load_tokenizer(target_config)
            report = Harness(config, target, target_config, tokenizer, accelerator).run(subjects[0], subjects[1:])
        if accelerator.is_main_process:
            write_provenance(folder / "eval_provenance.json", node, sys.argv)
            if tracker is TrackerName.wandb:
                show_in_wandb(report, wandb, folder, provenance(node, sys.argv))
            sys.stdout.write(render(write_summary(folder, read_stages(folder))))
            sys.stdout.write(f"page: {folder / 'eval' / 'report.html'}\n")


if __name__ == "__main__":
    main()
