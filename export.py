"""Write a drafter in an engine's layout with its model card: python export.py draft=FOLDER engine=vllm."""

import os
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from data.run import prepare_target, provenance, read_stages, stage, start_processes, user_errors
from eval.calibrate import read_calibration
from eval.report import measurement_of, model_card, write_summary
from models.base import Engine
from models.checkpoint import check_target, load_drafter
from models.config import register, to_dataclass
from models.drafter_files import fingerprint, resolve_folder
from models.export import ExportConfig, export_drafter, serve_command
from models.gguf_target import write_gguf_target
from models.target import dtype_of, load_spec, target_identity
from models.target_files import load_frozen

register("export_schema", ExportConfig)


@hydra.main(version_base=None, config_path="conf", config_name="export")
def main(node: DictConfig) -> None:
    with user_errors("export.py"):
        config = to_dataclass(ExportConfig, node, section="export")
        if config.with_target and config.engine is not Engine.gguf:
            raise ValueError(f"with_target=true writes a GGUF file, for engine=gguf; got engine={config.engine}")
        folder, out, dtype = Path(config.output_dir), Path(config.out), dtype_of(config.dtype)
        target = prepare_target(node.target, folder, start_processes(os.environ, single=True))
        with stage(folder, "export"):
            draft = resolve_folder(config.draft, allow_pickle=config.allow_pickle)
            spec, identity = load_spec(target), target_identity(target)
            drafter = load_drafter(draft, target=spec, allow_pickle=config.allow_pickle).drafter
            drafter.bind(*load_frozen(target, spec))
            check_target(draft, drafter, target, identity)
            calibration = read_calibration(draft, drafter.num_draft_tokens)
            calibrated, weights = calibration is not None, fingerprint(draft, allow_pickle=config.allow_pickle)
            measured = measurement_of(weights, (folder, *draft.parents[:2]), dtype=config.dtype)  # or in its own run
            serving = serve_command(drafter, config.engine, target.path, calibrated=calibrated)
            about = (type(drafter).__name__, target.name, provenance(node, sys.argv))
            card = model_card(*about, serving=serving, measured=measured, calibrated=calibrated)
            options = {"engine": config.engine, "dtype": dtype, "card": card, "calibration": calibration}
            export_drafter(drafter, out, **options, target=target, identity=identity)
            if config.with_target:
                write_gguf_target(target, out / f"{target.name}.gguf", dtype=dtype_of(target.dtype))
        write_summary(folder, read_stages(folder))
        files = ", ".join(sorted(path.name for path in out.iterdir()))
        sys.stdout.write(f"{draft} for {config.engine}, {config.dtype}, in {out}: {files}\n")


if __name__ == "__main__":
    main()
