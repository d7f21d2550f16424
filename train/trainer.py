"""The training loop: one optimiser step is one fixed list of records, whatever runs it."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from data.collate import collate
from data.dataset import RankSampler, StepPlan, TrainingData
from data.run import StopRequest
from data.store import FeatureSource
from models.base import DraftBatch, Drafter
from models.checkpoint import step_folder
from models.target import TargetIdentity
from train.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint, trajectory
from train.config import TrainConfig
from train.metrics import MetricSums
from train.optim import build_optimizer, learning_rate
from train.tracking import Tracker, build_trackers

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """What the loop works on; built by `train`."""

    config: TrainConfig
    accelerator: Accelerator
    drafter: Drafter
    model: torch.nn.Module  # the drafter as the launcher wraps it
    optimizer: Any
    plan: StepPlan
    num_steps: int
    identity: TargetIdentity
    options: dict[str, Any]  # those that fix the trajectory
    trackers: list[Tracker]

    @property
    def checkpoints(self) -> Path:
        return Path(self.config.output_dir) / "checkpoints"


def train(
    config: TrainConfig,
    drafter: Drafter,
    store: FeatureSource,
    identity: TargetIdentity,
    accelerator: Accelerator,
    *,
    run_config: Mapping[str, Any],
) -> Path:
    """Train from the start or from a checkpoint to the last step; returns the newest checkpoint's folder.

    A SIGTERM ends the run early with a checkpoint, from which the same command goes on.
    """
    store.check_target(identity, drafter.target_layer_ids)
    folder = Path(config.output_dir)
    plan = StepPlan(store.lengths, config.batch_size, config.micro_batch_size, config.seed)
    num_steps = config.num_steps if config.num_steps is not None else int(config.num_epochs * plan.steps_per_epoch)
    if num_steps < 1:
        raise ValueError(f"num_steps={config.num_steps} and num_epochs={config.num_epochs} give no training step")
    options = trajectory(config, num_steps)
    drafter.to(accelerator.device)
    optimizer = build_optimizer(drafter.parameters(), config.optim)
    found = find_checkpoint(config.resume, folder / "checkpoints")
    first_step = load_checkpoint(found, drafter, optimizer, options) if found else 0
    if found:
        state = "finished" if first_step == num_steps else "resumed"
        log.info("train: %s at step %d of %d", state, first_step, num_steps)
        if first_step == num_steps:
            return found
    model, prepared = accelerator.prepare(drafter, optimizer)
    trackers: list[Tracker] = []
    if accelerator.is_main_process:
        trackers = build_trackers(config.tracker, config.wandb, folder, run_config, first_step=first_step)
    run = Run(config, accelerator, drafter, model, prepared, plan, num_steps, identity, options, trackers)
    done = run_steps(run, store, first_step)
    for tracker in trackers:
        tracker.close()
    return step_folder(run.checkpoints, done)


def run_steps(run: Run, store: FeatureSource, first_step: int) -> int:
    """The loop; returns the number of steps done, the last of which has a checkpoint."""
    config, accelerator, num_steps = run.config, run.accelerator, run.num_steps
    batches = micro_batches(run, store, first_step)
    window, stop, done = MetricSums(), StopRequest(), first_step
    logged_at = (first_step, time.perf_counter())
    with tqdm(
        total=num_steps, initial=first_step, desc="train", unit="step", disable=not accelerator.is_main_process
    ) as progress:
        while done < num_steps:
            values = optimiser_step(run, [next(batches) for _ in range(micro_batches_per_step(run))], done, window)
            done += 1
            progress.update()
            is_log_step = done % config.log_every == 0 or done == num_steps
            if is_log_step:
                now = time.perf_counter()
                report(run, window, done, values, (now - logged_at[1]) / (done - logged_at[0]), progress)
                logged_at = (done, now)
            # Several processes only agree where they wait for each other anyway.
            is_stopped = (is_log_step or accelerator.num_processes == 1) and agreed(stop, accelerator)
            if done % config.checkpoint_every == 0 or done == num_steps or is_stopped:
                checkpoint(run, done)
            if is_stopped and done < num_steps:
                log.info("train: asked to stop, saved step %d; the same command goes on from there", done)
                break
    return done


def agreed(stop: StopRequest, accelerator: Accelerator) -> bool:
    """Whether any process was asked to stop; a collective call where there are several."""
    if accelerator.num_processes == 1:
        return stop.received
    flag = torch.tensor(float(stop.received), device=accelerator.device)
    return float(cast(Tensor, accelerator.reduce(flag, "sum"))) > 0


def checkpoint(run: Run, step: int) -> None:
    """Save on the main process while the others wait."""
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:
        save_checkpoint(
            run.checkpoints,
            step=step,
            drafter=run.drafter,
            optimizer=run.optimizer.optimizer,
            identity=run.identity,
            options=run.options,
            keep=run.config.keep_checkpoints,
        )
    run.accelerator.wait_for_everyone()


def micro_batches_per_step(run: Run) -> int:
    return run.config.batch_size // run.config.micro_batch_size // run.accelerator.num_processes


def micro_batches(run: Run, store: FeatureSource, first_step: int) -> Iterator[DraftBatch]:
    """This process's micro-batches from `first_step` on, on its device."""
    config, accelerator = run.config, run.accelerator
    loader = DataLoader(
        TrainingData(store, layer_ids=run.drafter.target_layer_ids, num_anchors=config.num_anchors, seed=config.seed),
        batch_sampler=RankSampler(
            run.plan,
            first_step=first_step,
            last_step=run.num_steps,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
        ),
        collate_fn=collate,
        num_workers=config.num_workers,
        pin_memory=accelerator.device.type == "cuda",
    )
    for batch in loader:
        yield batch.to(accelerator.device)


def optimiser_step(run: Run, batches: list[DraftBatch], step: int, window: MetricSums) -> dict[str, Tensor | float]:
    """One update. Denominators are summed over all micro-batches and processes first, so that how the batch is split
    changes no gradient."""
    accelerator, world_size = run.accelerator, run.accelerator.num_processes
    rate = learning_rate(step, run.num_steps, run.config.optim)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    denominators = global_denominators(run, batches)
    total = torch.zeros((), dtype=torch.float64, device=accelerator.device)
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        with nullcontext() if is_last else accelerator.no_sync(run.model):
            with accelerator.autocast():
                loss = run.model(batch)
            # world_size undoes the launcher's mean over processes: these are sums over the whole step.
            mean = torch.stack([loss.numerators[term] / denominators[term] for term in loss.numerators]).sum()
            accelerator.backward(mean * world_size)
        window.add(loss)
        total += mean.detach().double()
    grad_norm = accelerator.clip_grad_norm_(run.model.parameters(), run.config.optim.max_grad_norm)
    assert grad_norm is not None
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return {"loss": total, "learning_rate": rate, "grad_norm": grad_norm}


def global_denominators(run: Run, batches: list[DraftBatch]) -> dict[str, Tensor]:
    """Supervised weight of the whole optimiser step per loss term; a step without supervision divides by one."""
    local = [run.drafter.denominators(batch) for batch in batches]
    terms = list(local[0])
    summed = torch.stack([torch.stack([part[term] for part in local]).sum() for term in terms])
    summed = cast(Tensor, run.accelerator.reduce(summed, "sum"))
    return {term: torch.where(value > 0, value, 1.0).float() for term, value in zip(terms, summed, strict=True)}


def report(
    run: Run, window: MetricSums, step: int, values: dict[str, Tensor | float], seconds_per_step: float, progress: Any
) -> None:
    """Reduce, log and show; the only place between checkpoints that waits for the device."""
    means = window.report(run.accelerator)
    loss = cast(Tensor, run.accelerator.reduce(values["loss"], "sum"))
    line = {
        **means,
        "loss": float(loss),
        "learning_rate": float(values["learning_rate"]),
        "grad_norm": float(values["grad_norm"]),
        "seconds_per_step": seconds_per_step,
    }
    progress.set_postfix_str(f"loss {line['loss']:.3f}")
    for tracker in run.trackers:
        tracker.log(step, line)
