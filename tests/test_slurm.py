"""The batch scripts with stand-ins for Slurm's commands: what they start on which node, and what a time limit does."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data.store import FeatureStore
from models.drafter_files import step_folders
from models.target import TargetConfig
from tests.conftest import TINY_LAYER_IDS

ROOT = Path(__file__).parents[1]
SRUN = """#!/usr/bin/env bash
seconds=0; if [[ $1 == --overlap ]]; then seconds=${SIGNALLING:-0}; fi
while [[ $1 == --* ]]; do shift; done
pids=()
for ((node = 0; node < SLURM_NNODES; node++)); do SLURM_NODEID=$node "$@" & pids+=($!); done
for pid in "${pids[@]}"; do wait "$pid" || exit; done
sleep "$seconds"
"""
SCONTROL = """#!/usr/bin/env bash
if [[ $1 == show ]]; then printf '127.0.0.1\\nsecond\\n'; else echo "$@" >> "$LOG/scontrol"; fi
"""
# A launcher with one process below it, as accelerate has; SIGTERM would kill the launcher itself.
ACCELERATE = """#!/usr/bin/env bash
echo "$@" > "$LOG/launched.$SLURM_NODEID"
bash -c 'trap "exit 0" TERM; touch "$LOG/up.$SLURM_NODEID"; while [[ ! -e $LOG/stop ]]; do sleep 0.05; done' &
wait $!
"""


def write_commands(folder: Path, **commands: str) -> Path:
    folder.mkdir(parents=True)
    for name, text in commands.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def start(script: str, tmp_path: Path, submit_dir: Path, *overrides: str, **variables: str) -> subprocess.Popen:
    commands = write_commands(tmp_path / "commands", srun=SRUN, scontrol=SCONTROL)
    environment = {
        **os.environ,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "LOG": str(tmp_path),
        "SLURM_SUBMIT_DIR": str(submit_dir),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node[1-2]",
        **variables,
    }
    return subprocess.Popen(["bash", str(ROOT / "launch" / "slurm" / script), *overrides], env=environment)


def wait_for(*paths: Path, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not all(path.is_file() and (path.name.startswith("up") or path.read_text()) for path in paths):
        assert time.monotonic() < end, f"{paths} did not come"
        time.sleep(0.05)


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[Path]:
    """A folder to submit from, whose accelerate records its arguments; what a failed test leaves behind ends."""
    write_commands(tmp_path / "checkout" / ".venv" / "bin", accelerate=ACCELERATE)
    yield tmp_path / "checkout"
    (tmp_path / "stop").touch()


NODES = {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}


def test_training_starts_one_launcher_a_node_that_know_the_first(tmp_path: Path, two_nodes: Path) -> None:
    job = start(
        "train.sbatch", tmp_path, two_nodes, "model=dflash", CONFIG="launch/accelerate/zero2_nodes.yaml", **NODES
    )
    wait_for(*(tmp_path / f"up.{node}" for node in (0, 1)))
    for node in (0, 1):
        shown = (tmp_path / f"launched.{node}").read_text()
        assert f"--machine_rank {node} " in shown
        for part in ("--num_machines 2", "--num_processes 16", "--main_process_ip 127.0.0.1", "zero2_nodes.yaml"):
            assert part in shown, part
        assert re.search(r"--main_process_port 24711 train.py model=dflash$", shown)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(20) == 0


# Seconds that signalling takes: by then the launchers have ended, or not.
@pytest.mark.parametrize("signalling", ["0", "1"])
def test_a_time_limit_ends_the_training_processes_and_queues_the_job_again(
    tmp_path: Path, two_nodes: Path, signalling: str
) -> None:
    job = start("train.sbatch", tmp_path, two_nodes, SIGNALLING=signalling, **NODES)
    wait_for(*(tmp_path / f"up.{node}" for node in (0, 1)))
    job.send_signal(signal.SIGUSR1)
    assert job.wait(20) == 0
    assert (tmp_path / "scontrol").read_text() == "requeue 4711\n"
    assert not list((two_nodes / "outputs" / "slurm").iterdir())


def test_a_failed_launcher_fails_the_job_and_queues_nothing(tmp_path: Path, two_nodes: Path) -> None:
    accelerate = two_nodes / ".venv" / "bin" / "accelerate"
    accelerate.write_text("#!/usr/bin/env bash\nexit 3\n")
    assert start("train.sbatch", tmp_path, two_nodes, **NODES).wait(20) == 3
    assert not (tmp_path / "scontrol").exists()


def test_what_cannot_be_tidied_up_changes_no_exit_status(tmp_path: Path, two_nodes: Path) -> None:
    """A node that is still starting may write where the others' launchers were noted."""
    (two_nodes / ".venv" / "bin" / "accelerate").write_text("#!/usr/bin/env bash\nexit 3\n")
    fails = {"BASH_FUNC_rm%%": "() { return 1; }"}
    assert start("train.sbatch", tmp_path, two_nodes, **NODES, **fails).wait(20) == 3


@pytest.mark.parametrize("signalling", ["0", "1"])
def test_a_checkpoint_that_fails_at_the_time_limit_queues_nothing(
    tmp_path: Path, two_nodes: Path, signalling: str
) -> None:
    (two_nodes / ".venv" / "bin" / "accelerate").write_text(ACCELERATE.replace("exit 0", "exit 5"))
    job = start("train.sbatch", tmp_path, two_nodes, SIGNALLING=signalling, **NODES)
    wait_for(*(tmp_path / f"up.{node}" for node in (0, 1)))
    job.send_signal(signal.SIGUSR1)
    assert job.wait(20) == 5
    assert not (tmp_path / "scontrol").exists()


def test_extraction_starts_launchers_that_know_nothing_of_each_other(tmp_path: Path, two_nodes: Path) -> None:
    job = start("extract.sbatch", tmp_path, two_nodes, "target=qwen3_8b", **NODES)
    wait_for(*(tmp_path / f"up.{node}" for node in (0, 1)))
    shown = {(tmp_path / f"launched.{node}").read_text() for node in (0, 1)}
    assert len(shown) == 1
    text = shown.pop()
    assert "--num_machines 1 --num_processes 8 extract.py target=qwen3_8b" in text
    assert "main_process_ip" not in text and "machine_rank" not in text
    job.send_signal(signal.SIGUSR1)
    wait_for(tmp_path / "scontrol")
    assert (tmp_path / "scontrol").read_text() == "requeue 4711\n"
    (tmp_path / "stop").touch()
    assert job.wait(20) == 0


def test_scripts_that_slurm_did_not_start_say_so(tmp_path: Path) -> None:
    for script in ("train.sbatch", "extract.sbatch"):
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
        done = subprocess.run(
            ["bash", str(ROOT / "launch" / "slurm" / script)], env=environment, capture_output=True, text=True
        )
        assert done.returncode != 0 and "start this with sbatch" in done.stderr


@pytest.mark.slow
def test_a_time_limit_leaves_a_checkpoint_of_real_training(
    tmp_path: Path, tiny_target_config: TargetConfig, tiny_store: FeatureStore
) -> None:
    """One node, two gloo processes, DDP."""
    config = tmp_path / "ddp.yaml"
    text = (ROOT / "launch" / "accelerate" / "ddp_nodes.yaml").read_text()
    config.write_text(text.replace("mixed_precision: bf16", "mixed_precision: 'no'"))
    out = tmp_path / "out"
    variables: dict[str, Any] = {"SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "2", "CONFIG": str(config)}
    variables |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    job = start(
        "train.sbatch",
        tmp_path,
        ROOT,
        "target=custom",
        f"target.path={tiny_target_config.path}",
        f"target.layer_ids={list(TINY_LAYER_IDS)}".replace(" ", ""),
        f"target.mask_token_id={tiny_target_config.mask_token_id}",
        "target.name=tiny",
        "target.dtype=float32",
        f"store={tiny_store.folder}",
        f"output_dir={out}",
        "model.num_layers=1",
        "model.markov_rank=8",
        "batch_size=8",
        "num_steps=100000",
        "log_every=1",
        "checkpoint_every=100000",
        **variables,
    )
    wait_for(out / "metrics.jsonl", seconds=240)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(120) == 0
    (folder,) = step_folders(out / "checkpoints")
    assert 0 < int(folder.name.removeprefix("step_")) < 100_000
    assert (tmp_path / "scontrol").read_text() == "requeue 4711\n"
