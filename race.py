"""Train all drafters on equal data for equal steps, and rank them: python race.py [budget_minutes=20] [seeds=[1]]."""

import signal
import sys
from types import FrameType

import hydra
from omegaconf import DictConfig

from data.run import user_errors
from eval.cells import RaceConfig, run_race
from models.config import register, to_dataclass

register("race_schema", RaceConfig)


@hydra.main(version_base=None, config_path="conf", config_name="race")
def main(node: DictConfig) -> None:
    for ended_by in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ended_by) is signal.SIG_DFL:  # under nohup a hangup stays ignored
            signal.signal(ended_by, interrupt)
    with user_errors("race.py"):
        try:
            sys.stdout.write(run_race(to_dataclass(RaceConfig, node, section="race")))
        except KeyboardInterrupt:
            sys.stderr.write("race.py: stopped; finished cells are kept, and the same command goes on from there\n")
            sys.exit(130)


def interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
