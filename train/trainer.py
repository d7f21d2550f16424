"""The training loop: one optimiser step is one fixed list of records, whatever runs it."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from data.collate import collate
from data.dataset import RankSampler, StepPlan, TrainingData, prefetched, stable_seed
from data.run import StopRequest
from data.store import FeatureSource
from data.tracking import PROBE_PREFIX
from models.base import DraftBatch, Drafter, SampledVocabulary
from models.drafter_files import step_folder
from models.files import write_json
from models.losses import sample_vocabulary, tokens_of
from models.target import TargetIdentity
from train.checkpoint import (
    PROBE,
    Progress,
    random_state,
    read_probe,
    restore_process,
    save_checkpoint,
    save_probe,
    set_random_state,
    tidy,
)
from train.config import ONLINE, TrainConfig, check_ranges
from train.metrics import MetricSums, Throughput
from train.optim import Schedule, learning_rate
from train.parallel import Shared, share
from train.resume import Found, alone_in, find_checkpoint, fingerprint, on_main, put_aside, read_progress, trajectory
from train.setup import set_up_compute, start_from_folder
from train.tracking import Tracker, build_trackers

log = logging.getLogger(__name__)

Probe = Callable[[Path], dict[str, float]]  # a checkpoint's folder -> what was measured, acceptance_length among it


@dataclass
class Run:
    """What the loop works on; built by `train`."""

    config: TrainConfig
    accelerator: Accelerator
    shared: Shared
    plan: StepPlan
    schedule: Schedule
    identity: TargetIdentity
    options: dict[str, Any]  # those that fix the trajectory
    probe: Probe | None
    throughput: Throughput
    trackers: list[Tracker] = field(default_factory=list)
    window: MetricSums = field(default_factory=MetricSums)

    @property
    def drafter(self) -> Drafter:
        return self.shared.drafter

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
    fsdp: bool = False,
    probe: Probe | None = None,
) -> Path:
    """Train from the start or from a checkpoint to the last step; returns the newest checkpoint's folder.

    A SIGTERM ends the run early with a checkpoint, from which the same command goes on.
    """
    with alone_in(Path(config.output_dir), accelerator):
        store.check_target(identity, drafter.target_layer_ids)
        folder, options = Path(config.output_dir), {**trajectory(config), "records": fingerprint(store)}
        plan = step_plan(config, store, accelerator.num_processes)
        num_steps = config.num_steps if config.num_steps is not None else int(config.num_epochs * plan.steps_per_epoch)
        if num_steps < 1:
            raise ValueError(f"num_steps={config.num_steps} and num_epochs={config.num_epochs} give no training step")
        check_ranges(config)
        found = on_main(accelerator, lambda: find(config, options, num_steps))
        progress = found.progress if found else Progress(0, Schedule(0, num_steps))
        if found:
            state = "finished" if progress.is_finished else "resumed"
            log.info("train: %s at step %d of %d", state, progress.step, num_steps)
            may_measure = probe is not None and found.is_in(folder / "checkpoints")
            if progress.is_finished and not (may_measure and lacks_probe(config, found.folder, progress)):
                on_main(accelerator, lambda: settle(config, found))
                return found.folder
        if config.init is not None and not found:
            start_from_folder(drafter, config.init, allow_pickle=config.allow_pickle)
        drafter.to(accelerator.device)
        set_up_compute(drafter, config, accelerator)
        shared = share(drafter, config.optim, accelerator, fsdp=fsdp)
        where = accelerator.device.type
        world = where if accelerator.num_processes == 1 else f"{accelerator.num_processes} processes on {where}"
        log.info("train: %s, %s", shared.name, world)
        throughput = Throughput(config.peak_tflops, accelerator)
        run = Run(config, accelerator, shared, plan, progress.schedule, identity, options, probe, throughput)
        if found:
            load(run, found)
        on_main(accelerator, lambda: settle(config, found))  # after all that may refuse to go on
        if accelerator.is_main_process:
            write_json(folder / "train_provenance.json", run_config)
            about = {**run_config, "launcher": shared.name, "num_processes": accelerator.num_processes}
            run.trackers = build_trackers(config.tracker, config.wandb, folder, about, first_step=progress.step)
        try:
            if found and found.is_in(run.checkpoints):  # a kill may have come before its probe
                measure(run, found.folder, progress.step)
            run.throughput.pause()  # what was done since the last step is no training time
            done = run_steps(run, store, progress.step)
        finally:
            for tracker in run.trackers:
                tracker.close()
        if done == num_steps:
            log.info("train: finished %d steps; weights in %s", done, step_folder(run.checkpoints, done))
        return step_folder(run.checkpoints, done)


def step_plan(config: TrainConfig, store: FeatureSource, num_processes: int) -> StepPlan:
    return StepPlan(
        store.lengths,
        config.batch_size,
        config.tokens_per_batch,
        packing=config.packing,
        num_processes=num_processes,
        seed=config.seed,
    )


def find(config: TrainConfig, options: Mapping[str, Any], num_steps: int) -> Found | None:
    """The checkpoint to go on from, whole and of this run."""
    folder = find_checkpoint(config.resume, Path(config.output_dir) / "checkpoints")
    return folder and read_progress(folder, options, num_steps=num_steps, extend=config.extend)


def settle(config: TrainConfig, found: Found | None) -> None:
    """Make the run folder that of a run which goes on from `found`."""
    if config.resume != "auto" and not (found and found.progress.is_finished):
        put_aside(Path(config.output_dir), found=found)
    tidy(Path(config.output_dir) / "checkpoints", config.keep_checkpoints)


def load(run: Run, found: Found) -> None:
    """Everything that the loop changes, as it was at the checkpoint."""
    run.shared.load(found.folder, num_processes=found.num_processes, launcher=found.launcher)
    window = restore_process(found.folder, run.accelerator.process_index)
    # Of other processes than these, sums would be counted twice or be missing: the next report begins here then.
    if window is not None and found.num_processes == run.accelerator.num_processes:
        run.window.restore(window["metrics"], run.accelerator.device)
        run.throughput.restore(window["throughput"])


def run_steps(run: Run, store: FeatureSource, first_step: int) -> int:
    """The loop; returns the number of steps done, the last of which has a checkpoint."""
    config, accelerator, num_steps = run.config, run.accelerator, run.schedule.num_steps
    batches = micro_batches(run, store, first_step)
    stop, done = StopRequest(), first_step
    with tqdm(
        total=num_steps, initial=first_step, desc="train", unit="step", disable=not accelerator.is_main_process
    ) as progress:
        while done < num_steps:
            count = len(run.plan.micro_batches(done)[accelerator.process_index])
            optimiser_step(run, [next(batches) for _ in range(count)], done)
            done += 1
            progress.update()
            is_log_step = done % config.log_every == 0 or done == num_steps
            if is_log_step:
                report(run, done, progress)
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
    """Save, and measure where it is time for that; a collective call."""
    plan = run.plan
    run.throughput.wait()
    folder = save_checkpoint(
        run.checkpoints,
        progress=Progress(step, run.schedule),
        shared=run.shared,
        identity=run.identity,
        options=run.options,
        position={"epoch": step // plan.steps_per_epoch, "record": step % plan.steps_per_epoch * plan.batch_size},
        window={"metrics": run.window.state(), "throughput": run.throughput.state()},
    )
    measure(run, folder, step)
    run.throughput.pause()


def measure(run: Run, folder: Path, step: int) -> None:
    """Probe a checkpoint where that is due, log what was measured, now or before a kill, and drop those that are
    neither new nor best; a collective call."""
    if run.accelerator.is_main_process:
        values, before = None, random_state()
        if run.probe is not None and lacks_probe(run.config, folder, Progress(step, run.schedule)):
            values = run.probe(folder)
        elif (folder / PROBE).is_file():
            values = read_probe(folder)
        set_random_state(before)  # training goes on the same whether it probed or resumed
        if values is not None:
            for tracker in run.trackers:
                tracker.log(step, {f"{PROBE_PREFIX}{name}": value for name, value in values.items()})
            save_probe(folder, values)  # last: where it is there, it was logged
        tidy(run.checkpoints, run.config.keep_checkpoints)
    run.accelerator.wait_for_everyone()


def lacks_probe(config: TrainConfig, folder: Path, progress: Progress) -> bool:
    every = config.probe.every
    is_due = every is not None and (progress.step % every == 0 or progress.is_finished)
    return is_due and not (folder / PROBE).is_file()


def micro_batches(run: Run, store: FeatureSource, first_step: int) -> Iterator[DraftBatch]:
    """This process's micro-batches from `first_step` on, on its device; the next one is made in the background."""
    config, accelerator = run.config, run.accelerator
    loader = DataLoader(
        TrainingData(store, layer_ids=run.drafter.target_layer_ids, num_anchors=config.num_anchors, seed=config.seed),
        batch_sampler=RankSampler(
            run.plan, first_step=first_step, last_step=run.schedule.num_steps, rank=accelerator.process_index
        ),
        collate_fn=partial(collate, packing=config.packing),
        num_workers=config.num_workers,
        generator=torch.Generator(),  # for seeds that nothing uses: a resumed run would draw them again
        pin_memory=accelerator.device.type == "cuda",
    )
    # A target in this process computes on the same device: nothing is gained by doing that beside a step.
    batches = iter(loader) if config.store == ONLINE or config.num_workers else prefetched(iter(loader))
    for batch in batches:
        yield batch.to(accelerator.device)


def optimiser_step(run: Run, batches: list[DraftBatch], step: int) -> None:
    """One update. Denominators are summed over all micro-batches and processes first, so that how the batch is split
    changes no gradient."""
    shared, world_size = run.shared, run.accelerator.num_processes
    rate = learning_rate(step, run.schedule, run.config.optim)
    shared.set_rate(rate)
    denominators, vocabulary = global_denominators(run, batches), step_vocabulary(run, batches, step)
    terms: dict[str, Tensor] = {}
    for index, batch in enumerate(batches):
        batch.vocabulary = vocabulary
        with shared.accumulating(is_last=index == len(batches) - 1):
            loss = shared(batch)
            means = {term: value / denominators[term] for term, value in loss.numerators.items()}
            # world_size undoes the launcher's mean over processes: these are sums over the whole step.
            shared.backward(torch.stack(list(means.values())).sum() * world_size)
        run.window.add(loss.metrics)
        run.throughput.add(batch, loss, run.drafter.training_flops(batch))
        for term, value in means.items():
            terms[term] = terms.get(term, 0) + value.detach().double()
    grad_norm = shared.update(run.config.optim.max_grad_norm)
    run.throughput.step()
    # Each process holds its share of a sum, and counts an equal share of the step.
    share_of_step = torch.full((), 1 / world_size, dtype=torch.float64, device=run.accelerator.device)
    values = {f"loss/{term}": value for term, value in terms.items()} | {
        "loss": torch.stack(list(terms.values())).sum()
    }
    run.window.add({name: (value, share_of_step) for name, value in values.items()})
    run.window.add(
        {
            "grad_norm": (grad_norm.detach().double() * share_of_step, share_of_step),
            "learning_rate": (rate * share_of_step, share_of_step),
        }
    )


def global_denominators(run: Run, batches: list[DraftBatch]) -> dict[str, Tensor]:
    """Supervised weight of the whole optimiser step per loss term; a step without supervision divides by one."""
    local = [run.drafter.denominators(batch) for batch in batches]
    terms = list(local[0])
    summed = torch.stack([torch.stack([part[term] for part in local]).sum() for term in terms])
    summed = cast(Tensor, run.accelerator.reduce(summed, "sum"))
    return {term: torch.where(value > 0, value, 1.0).float() for term, value in zip(terms, summed, strict=True)}


def step_vocabulary(run: Run, batches: list[DraftBatch], step: int) -> SampledVocabulary | None:
    """Columns of the step's losses where a drafter asks for a sample: the tokens of its records and drawn ones."""
    num_drawn = run.drafter.sampled_vocabulary
    if num_drawn is None:
        return None
    sure = tokens_of(batches, run.drafter.spec.vocab_size).float().to(run.accelerator.device)
    sure = cast(Tensor, run.accelerator.reduce(sure, "sum")) > 0
    generator = torch.Generator().manual_seed(stable_seed(run.config.seed, "vocabulary", step))
    return sample_vocabulary(sure, num_drawn, generator)


def report(run: Run, step: int, progress: Any) -> None:
    """Means since the last report, to trackers; the only place between checkpoints that waits for the device."""
    line = run.window.report(run.accelerator) | run.throughput.report()
    progress.set_postfix_str(f"loss {line['loss']:.3f}")
    for tracker in run.trackers:
        tracker.log(step, line)
