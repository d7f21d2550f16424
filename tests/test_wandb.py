"""What `WANDB_MODE=offline accelerate launch train.py` leaves behind: a run to upload, made without network."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wandb.proto.wandb_internal_pb2 import Record

from data.store import FeatureStore
from data.tracking import TrackerName, WandbConfig, choose_tracker
from models.target import TargetConfig
from tests.test_scripts import Script, prompts_file, script  # noqa: F401 (fixtures)

ROOT = Path(__file__).parents[1]
BLOCK, HEADER = 32768, 7  # W&B keeps records in a LevelDB log: blocks of fragments under a header of 7 bytes


def records_of(path: Path) -> Iterator[Record]:
    """Whole records of a .wandb file, whose fragments may span blocks."""
    content, place, whole = path.read_bytes(), HEADER, b""
    assert content.startswith(b":W&B")
    while place + HEADER <= len(content):
        if BLOCK - place % BLOCK < HEADER:  # the rest of a block is padding
            place += BLOCK - place % BLOCK
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        whole += content[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (1, 4):  # a full record, or its last fragment
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def internet_sockets(root: int) -> set[str]:
    """Remote addresses of the connections of a process and its descendants, but for this machine's own."""
    children = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
    parents = dict(map(int, line.split()) for line in children.splitlines()[1:])  # type: ignore[misc]
    found = set()
    for process in [pid for pid in parents if root in ancestors(pid, parents)]:
        inodes = set()
        for link in Path(f"/proc/{process}/fd").glob("*"):
            try:
                inodes.add(str(link.readlink()))
            except OSError:  # closed meanwhile
                continue
        for table in ("tcp", "tcp6", "udp", "udp6"):
            try:
                lines = Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]
            except OSError:
                continue
            for fields in map(str.split, lines):
                if f"socket:[{fields[9]}]" in inodes and not is_local(fields[2]):
                    found.add(f"{table} {fields[2]}")
    return found


def ancestors(process: int, parents: dict[int, int]) -> set[int]:
    seen = set()
    while process in parents and process not in seen:
        seen.add(process)
        process = parents[process]
    return seen


def is_local(address: str) -> bool:
    """Of /proc/net: nothing (a listener), 127.0.0.0/8 or ::1, in host byte order."""
    ip = address.split(":")[0]
    return not int(ip, 16) or ip.endswith("7F") or ip == "0" * 24 + "01000000"


@pytest.fixture(scope="module")
def offline_run(
    tmp_path_factory: pytest.TempPathFactory, tiny_target_config: TargetConfig, tiny_store: FeatureStore
) -> Path:
    """Run the command of the README in a subprocess twice, the second time to go on; no process may reach out."""
    out = tmp_path_factory.mktemp("run")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--cpu", "train.py", "model=dspark"]
    options = [
        f"output_dir={out}",
        f"store={tiny_store.folder}",
        "target=custom",
        f"target.path={tiny_target_config.path}",
    ]
    options += ["target.name=tiny", "target.dtype=float32", "target.layer_ids=[0,1,2]", "num_steps=8", "batch_size=8"]
    options += [f"target.mask_token_id={tiny_target_config.mask_token_id}", "log_every=2", "checkpoint_every=4"]
    options += ["model.num_layers=1", "model.num_draft_tokens=3", "model.markov_rank=8", "optim.learning_rate=1e-3"]
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "DS_ACCELERATOR": "cpu"}
    for extra in ([], ["num_steps=12", "extend=true"]):
        process = subprocess.Popen(
            [*launch, *options, *extra], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
        )
        reached: set[str] = set()
        over = threading.Event()

        def watch(process: subprocess.Popen = process, reached: set = reached, over: threading.Event = over) -> None:
            while not over.wait(0.2):
                reached |= internet_sockets(process.pid)

        watcher = threading.Thread(target=watch)
        watcher.start()
        errors = process.communicate(timeout=300)[1]
        over.set()
        watcher.join()
        assert process.returncode == 0, errors[-3000:]
        assert not reached
    return out


def logged(out: Path) -> tuple[list[dict[str, Any]], list[Record]]:
    """History rows of all parts of the run, and all records."""
    records = [
        record for path in sorted((out / "wandb").glob("offline-run-*/run-*.wandb")) for record in records_of(path)
    ]
    rows = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            rows.append({".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
    return rows, records


@pytest.mark.slow
def test_every_metric_of_the_local_file_is_in_the_run(offline_run: Path) -> None:
    rows, _ = logged(offline_run)
    lines = [json.loads(line) for line in (offline_run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 10, 12]
    by_step = {row["step"]: row for row in rows if "loss" in row}
    assert by_step.keys() == {line["step"] for line in lines}
    for line in lines:
        for name, value in line.items():
            assert by_step[line["step"]][name] == pytest.approx(value), name
    assert {"loss", "loss/tokens", "loss/confidence", "grad_norm", "learning_rate", "accept_rate@0"} <= lines[0].keys()
    assert {"tokens_per_second", "supervised_slots_per_second", "anchors_per_step", "padding_share"} <= lines[0].keys()
    assert {"confidence_error", "confidence_bias", "teacher_forced_acceptance_length"} <= lines[0].keys()
    assert {"tflops", "peak_memory_gib", "seconds_per_step"} <= lines[0].keys()


@pytest.mark.slow
def test_a_resumed_run_keeps_its_id_and_says_what_it_ran(offline_run: Path) -> None:
    _, records = logged(offline_run)
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert len(runs) >= 2 and len({run.run_id for run in runs}) == 1
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update if item.key}
    assert {"command", "config", "git_commit", "versions", "launcher", "num_processes"} <= config.keys()
    assert config["config"]["model"]["num_draft_tokens"] == 3 and config["versions"]["torch"]


@pytest.mark.slow
def test_rates_by_position_are_plotted(offline_run: Path) -> None:
    rows, _ = logged(offline_run)
    tables = {key for row in rows for key in row if key.startswith("by_position/")}
    for name in ("accept_rate", "top1_agreement"):
        assert any(key.startswith(f"by_position/{name}") for key in tables), tables


@pytest.mark.slow
def test_a_report_goes_to_a_run_of_its_own(
    offline_run: Path, tmp_path: Path, prompts_file: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    options = [f"output_dir={tmp_path}", f"draft={offline_run / 'checkpoints'}", "num_prompts=3", "max_new_tokens=6"]
    options.append(f"tasks=[{prompts_file}]")
    for _ in range(2):
        script("eval", *options, "temperature=[0,1]", "check_transformers=0")
    rows, records = logged(tmp_path)
    report = json.loads((tmp_path / "eval" / "report.json").read_text())
    runs = {record.run.run_id for record in records if record.WhichOneof("record_type") == "run"}
    assert len(runs) == 1 and runs != {(offline_run / "wandb_run_id").read_text()}, "measured again it is the same run"
    assert any({"rows._type", "report._type"} <= row.keys() or {"rows", "report"} <= row.keys() for row in rows)
    summary = {}
    for record in records:
        if record.WhichOneof("record_type") == "summary":
            summary |= {i.key: json.loads(i.value_json) for i in record.summary.update}
    assert summary["acceptance_length"] == pytest.approx(report["acceptance_length"])
    (page,) = {path.read_bytes() for path in (tmp_path / "wandb").rglob("*.html")} & {
        (tmp_path / "eval" / "report.html").read_bytes()
    }
    assert b"tokens a round" in page


@pytest.mark.parametrize(
    ("tracker", "mode", "environment", "expected"),
    [
        (None, None, {}, ("none", "offline")),
        (None, None, {"WANDB_MODE": "offline"}, ("wandb", "offline")),
        (None, None, {"WANDB_MODE": "disabled"}, ("none", "disabled")),
        (None, None, {"WANDB_API_KEY": "k"}, ("wandb", "offline")),
        (None, "online", {"WANDB_API_KEY": "k"}, ("wandb", "online")),
        (TrackerName.none, None, {"WANDB_MODE": "online"}, ("none", "online")),
        (TrackerName.wandb, None, {}, ("wandb", "offline")),
    ],
)
def test_wandbs_own_variables_count_where_the_config_says_nothing(
    tracker: TrackerName | None,
    mode: str | None,
    environment: dict[str, str],
    expected: tuple[str, str],
) -> None:
    chosen, wandb = choose_tracker(tracker, WandbConfig("p", mode), environment)
    assert (str(chosen), wandb.mode) == expected


def test_a_mode_that_wandb_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"wandb.mode=of does not exist.*offline, online"):
        choose_tracker(None, WandbConfig("p", "of"), {})
