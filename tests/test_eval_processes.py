"""eval.py as users start it: two processes report what one does, and so does one that was killed and started again."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from models.checkpoint import save_drafter
from models.dspark import DSpark
from models.target import TargetConfig, TargetIdentity
from tests.conftest import counting_chat

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "launch" / "accelerate" / "ddp_cpu.yaml"
TIMES = ("seconds", "per_second", "share_of_time", "peak_rss_gib")
NUM_KILLS = 10
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def command(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_target_config: TargetConfig,
    tiny_identity: TargetIdentity,
    tiny_dspark: DSpark,
) -> list[str]:
    """Without its output folder: 40 prompts in units of four, greedy and sampled, two baselines."""
    folder, rng = tmp_path_factory.mktemp("eval"), random.Random(3)
    save_drafter(tiny_dspark, folder / "drafter", target=vars(tiny_identity))
    chats = [json.dumps({"messages": counting_chat(rng)[:1]}) + "\n" for _ in range(40)]
    (folder / "prompts.jsonl").write_text("".join(chats))
    config = tiny_target_config
    options = ["target=custom", f"target.path={config.path}", "target.name=tiny", "target.dtype=float32"]
    options += ["target.layer_ids=[0,1,2]", f"target.mask_token_id={config.mask_token_id}", "batch_size=2"]
    options += [f"draft={folder / 'drafter'}", f"tasks=[{folder / 'prompts.jsonl'}]", "temperature=[0,1]"]
    return [str(ROOT / "eval.py"), *options, "max_new_tokens=40", "check_transformers=2"]


def start(command: list[str], out: Path, *, processes: int = 1) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    launcher = [sys.executable]
    if processes > 1:
        environment["ACCELERATE_USE_CPU"] = "true"
        launcher += ["-m", "accelerate.commands.launch", "--config_file", str(CONFIG)]
    with out.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [*launcher, *command, f"output_dir={out}"], cwd=ROOT, env=environment, stdout=log, stderr=log
        )


def report_of(out: Path) -> dict[str, Any]:
    return untimed(json.loads((out / "eval" / "report.json").read_text()))


def untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: untimed(part) for key, part in value.items() if not key.endswith(TIMES)}
    return [untimed(part) for part in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, command: list[str]) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("alone") / "run"
    assert start(command, out).wait(600) == 0, out.with_suffix(".log").read_text()[-3000:]
    report = report_of(out)
    assert report["num_prompts"] == 40 and report["acceptance_length"] > 1
    assert report["outputs_identical_to_vanilla"] and report["transformers_generate"]["num_prompts"] == 2
    return report


def test_two_processes_report_what_one_does(tmp_path: Path, command: list[str], alone: dict[str, Any]) -> None:
    out = tmp_path / "run"
    assert start(command, out, processes=2).wait(600) == 0, out.with_suffix(".log").read_text()[-3000:]
    assert report_of(out) == alone
    assert out.with_suffix(".log").read_text().count("| dspark") == 4, "one process prints"


def test_a_run_killed_at_random_times_reports_what_another_does(
    tmp_path: Path, command: list[str], alone: dict[str, Any]
) -> None:
    """Ten kills while units are being decoded and written, each after a few more of them than the one before."""
    out, rng, killed = tmp_path / "run", random.Random(0), 0
    while killed < NUM_KILLS:
        known = len(list(out.rglob("unit_*.json")))
        process = start(command, out)
        while process.poll() is None and len(list(out.rglob("unit_*.json"))) < known + 2:
            time.sleep(0.01)
        time.sleep(0.3 * rng.random())
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        killed += 1
        assert not (out / "eval" / "report.json").exists()
    assert killed >= NUM_KILLS - 2
    assert start(command, out).wait(600) == 0, out.with_suffix(".log").read_text()[-3000:]
    assert report_of(out) == alone
