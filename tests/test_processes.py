"""What a launcher's variables may say, and what is refused rather than trained as something else."""

import pytest

from data.run import asked_for_fsdp, start_processes


def test_deepspeed_that_would_be_another_launcher_is_refused() -> None:
    """As beside ACCELERATE_USE_CPU, where Accelerate takes DDP without a word."""
    with pytest.raises(ValueError, match=r"asks for DeepSpeed but Accelerate runs .*NO: leave out ACCELERATE_USE_CPU"):
        start_processes({"ACCELERATE_USE_DEEPSPEED": "true"}, cpu=True)


def test_processes_that_do_not_know_of_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"WORLD_SIZE=2 processes but Accelerate sees 1"):
        start_processes({"WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, cpu=True)
    with pytest.raises(ValueError, match=r"MASTER_ADDR is set but WORLD_SIZE is not"):
        start_processes({"MASTER_ADDR": "localhost"}, cpu=True)


def test_one_process_needs_no_launcher() -> None:
    assert start_processes({}, cpu=True, mixed_precision="bf16").mixed_precision == "bf16"


@pytest.mark.parametrize(("environment", "asked"), [({}, False), ({"ACCELERATE_USE_FSDP": "false"}, False)])
def test_fsdp_is_asked_for_by_the_launcher_alone(environment: dict[str, str], asked: bool) -> None:
    assert asked_for_fsdp(environment) is asked
    assert asked_for_fsdp({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"})


@pytest.mark.parametrize("version", ["1", None])
def test_the_first_fsdp_is_refused(version: str | None) -> None:
    environment = {"ACCELERATE_USE_FSDP": "true"} | ({} if version is None else {"FSDP_VERSION": version})
    with pytest.raises(ValueError, match=f"FSDP version {version} is not supported: set fsdp_version: 2"):
        asked_for_fsdp(environment)


@pytest.mark.parametrize("precision", ["fp16"])
def test_a_type_that_needs_loss_scaling_is_refused(precision: str) -> None:
    with pytest.raises(ValueError, match=r"mixed_precision=fp16 is not supported: choose no or bf16"):
        start_processes({}, cpu=True, mixed_precision=precision)
