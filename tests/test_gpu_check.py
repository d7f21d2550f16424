"""The GPU check, run small on the CPU: it passes there, notices faults, and its dense steps have our gradients."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import eval.decode as decode_module
from eval.verify import Rule, Verdict
from models import vocab_loss
from models.base import Proposal
from tests import gpu_check, gpu_steps
from tests.conftest import planted_fault
from tests.gpu_setting import setting_of
from tests.gpu_steps import dense_dspark, dense_eagle

TINY = setting_of("cpu", tiny=True)


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--device", "cpu", "--tiny", "--out", str(out), *options])
    status = gpu_check.main()
    return status, json.loads(out.read_text())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_check_passes_small_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    status, found = run(monkeypatch, tmp_path / "out" / "check.json", "--no-compile")
    lines = capsys.readouterr().out.splitlines()
    assert status == 0 and found["failed"] == [] and found["device"] == "cpu"
    assert len(lines) == len(found["checks"]) + 1 == 15
    assert all(line.startswith("PASS  ") for line in lines[:-1])
    assert sum("no backward on a CPU" in line for line in lines) == 8
    steps = {check["name"]: check["figures"] for check in found["checks"] if check["name"].startswith("bf16")}
    for figures in steps.values():
        assert figures["ours"]["mfu"] is None and figures["ours"]["tokens_per_second"] > 0
        assert figures["dense"]["first_loss"] == pytest.approx(figures["ours"]["first_loss"], rel=5e-3)


def test_one_failing_check_stops_no_other_and_shows_in_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def raises() -> Any:
        raise RuntimeError("out of luck\nand more")

    checks = [("first", raises), ("second", lambda: (False, "wrong", {})), ("third", lambda: (True, "right", {"x": 1}))]
    monkeypatch.setattr(gpu_check, "all_checks", lambda *_, **__: iter(checks))
    status, found = run(monkeypatch, tmp_path / "check.json")
    assert status == 1 and found["failed"] == ["first", "second"]
    lines = capsys.readouterr().out.splitlines()
    assert [line[:12] for line in lines[:3]] == ["FAIL  first:", "FAIL  second", "PASS  third:"]
    assert "out of luck" in lines[0] and found["checks"][2]["figures"] == {"x": 1}


@pytest.mark.parametrize(("kind", "dense"), [("dspark", dense_dspark), ("eagle3", dense_eagle)])
def test_the_dense_step_has_the_gradients_of_ours(kind: str, dense: Callable[..., torch.Tensor]) -> None:
    """Float32, packed chats."""
    _, model = gpu_steps.training_config(TINY, kind, compiled=False)
    drafter: Any = gpu_steps.build(TINY, model, (1, 9, 17, 25, 33))
    drafter.bind(drafter.embedding, drafter.head)
    drafter.embedding, drafter.head = drafter.embedding.float(), drafter.head.float()
    batch = gpu_steps.random_batch(TINY, drafter)
    batch.features, batch.last_hidden = batch.features.float(), batch.last_hidden.float()
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter *= 3  # fresh weights hardly move anything
    denominators, loss = drafter.denominators(batch), drafter(batch)
    ours = torch.stack([value / denominators[term] for term, value in loss.numerators.items()]).sum()
    theirs = dense(drafter, batch)
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-4)
    names, parameters = zip(*drafter.named_parameters(), strict=True)
    pairs = zip(torch.autograd.grad(ours, parameters), torch.autograd.grad(theirs, parameters), strict=True)
    for name, (a, b) in zip(names, pairs, strict=True):
        assert (a - b).norm() < 1e-4 * b.norm(), name


@pytest.mark.slow
def test_a_wrong_loss_fails_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        passed, text, _ = gpu_steps.check_steps(TINY, "dspark", compiled=False)
        assert passed, text

    original = vocab_loss._compare
    check()

    def doubled(*args: Any) -> Any:
        chunk = original(*args)
        return vocab_loss.replace(chunk, loss=2 * chunk.loss)

    with planted_fault(monkeypatch, vocab_loss, "_compare", doubled):
        check()


def test_identity_notices_a_verification_that_accepts_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        passed, text, _ = gpu_check.check_identity(TINY, "eagle3")
        assert passed, text

    check()
    original = decode_module.verify

    def accept_all(rule: Rule, proposal: Proposal, *args: Any, **options: Any) -> Verdict:
        return Verdict(proposal.lengths, original(rule, proposal, *args, **options).next_token)

    with planted_fault(monkeypatch, decode_module, "verify", accept_all):
        check()


def test_the_export_check_notices_another_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    original = gpu_check.load_drafter

    def damaged(*args: Any, **kwargs: Any) -> Any:
        loaded = original(*args, **kwargs)
        with torch.no_grad():
            loaded.drafter.get_parameter("fc.weight").neg_()
        return loaded

    monkeypatch.setattr(gpu_check, "load_drafter", damaged)
    passed, text, _ = gpu_check.check_export(TINY)
    assert not passed and "of 24 outputs" in text


def test_a_missing_gpu_and_full_sizes_on_a_cpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device cpu --tiny"):
        setting_of("cuda", tiny=False)
    with pytest.raises(ValueError, match="add --tiny"):
        setting_of("cpu", tiny=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_compiled_steps_pass_small_on_a_cpu() -> None:
    for kind in ("dspark", "eagle3"):
        passed, text, _ = gpu_steps.check_steps(TINY, kind, compiled=True)
        assert passed, text
