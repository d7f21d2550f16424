"""Write a drafter in an engine's layout with its model card: python export.py draft=FOLDER engine=deepspec."""

import os
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from data.run import prepare_target, provenance, read_stages, stage, start_processes, user_errors
from eval.calibrate import read_calibration
from eval.markdown import render
from eval.report import model_card, write_summary
from models.checkpoint import check_target, load_drafter, resolve_folder
from models.config import register, to_dataclass
from models.export import ExportConfig, export_drafter
from models.target import dtype_of, load_spec, load_tokenizer, target_identity
from models.target_files import load_frozen

register("export_schema", ExportConfig)


@hydra.main(version_base=None, config_path="conf", config_name="export")
def main(node: DictConfig) -> None:
    with user_errors("export.py"):
        config = to_dataclass(ExportConfig, node, section="export")
        folder = Path(config.output_dir)
        target = prepare_target(node.target, folder, start_processes(os.environ, single=True))
        with stage(folder, "export"):
            draft = resolve_folder(Path(config.draft))
            spec = load_spec(target)
            drafter = load_drafter(draft, target=spec).drafter.bind(*load_frozen(target, spec))
            check_target(draft, drafter, target, target_identity(target))
            calibration = read_calibration(draft, drafter.num_draft_tokens)
            summary = write_summary(folder, read_stages(folder))
            made = provenance(node, sys.argv)
            names, calibrated = (type(drafter).__name__, target.name), calibration is not None
            card = model_card(summary, *names, made, engine=config.engine, calibrated=calibrated)
            tokens = load_tokenizer(target).convert_ids_to_tokens(list(range(drafter.spec.vocab_size)))
            out, dtype = Path(config.out), dtype_of(config.dtype)
            options = {"engine": config.engine, "dtype": dtype, "card": card, "tokens": tokens}
            export_drafter(drafter, out, **options, calibration=calibration)
        sys.stdout.write(render(write_summary(folder, read_stages(folder))))


if __name__ == "__main__":
    main()
