"""Train all drafters on equal data for equal steps, and rank them: python race.py [budget_minutes=20] [seeds=[1]]."""

import sys

import hydra
from omegaconf import DictConfig

from data.run import user_errors
from eval.cells import RaceConfig, run_race
from models.config import register, to_dataclass

register("race_schema", RaceConfig)


@hydra.main(version_base=None, config_path="conf", config_name="race")
def main(node: DictConfig) -> None:
    with user_errors("race.py"):
        sys.stdout.write(run_race(to_dataclass(RaceConfig, node, section="race")))


if __name__ == "__main__":
    main()
