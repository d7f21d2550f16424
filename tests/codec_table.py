"""The table of launch/codecs.sh: acceptance of drafters trained on stores of other rounding, and of one fed others.

Differences are paired by seed: the drafters of one seed see equal batches and anchors and start from equal weights.
"""

import json
import math
from pathlib import Path
from typing import Any

from scipy import stats

from data.inspect import reference_bytes
from data.store import FeatureStore

RUN = Path(__file__).parents[1] / "outputs" / "codecs"
CODECS, SEEDS = ("bf16", "fp8", "nf4"), (1, 2, 3)


def interval(differences: list[float]) -> tuple[float, float]:
    """95 % confidence interval of their mean (Student's t)."""
    count = len(differences)
    mean = sum(differences) / count
    spread = math.sqrt(sum((x - mean) ** 2 for x in differences) / (count - 1) / count)
    half = float(stats.t.ppf(0.975, count - 1)) * spread
    return mean - half, mean + half


def drafter_rows(folder: Path) -> list[dict[str, Any]]:
    """In the order in which eval.py was given the drafters."""
    rows = json.loads((folder / "eval" / "report.json").read_text())["rows"]
    return [row for row in rows if row["drafter"] == "dspark"]


def reference_share(store: FeatureStore) -> float:
    """Bytes a token, as a share of all states of all tokens in bf16."""
    size = sum(shard.bytes for shard in store.manifest.shards) / store.manifest.num_tokens
    return size / reference_bytes(store)


def table(run: Path) -> str:
    trained = [row["acceptance_length"] for row in drafter_rows(run)]
    assert len(trained) == len(CODECS) * len(SEEDS), f"{len(trained)} drafters in {run}"
    by_codec = {codec: trained[3 * index : 3 * index + 3] for index, codec in enumerate(CODECS)}
    fed = {codec: drafter_rows(run / f"fed_{codec}")[0]["acceptance_length"] for codec in CODECS}
    heads = ["features, last hidden", "bytes a token", "trained on it, seeds 1 2 3", "mean", "against bf16, 95 %"]
    heads.append("one drafter fed it")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for codec, values in by_codec.items():
        store = FeatureStore(run / codec / "store")
        differences = [value - base for value, base in zip(values, by_codec["bf16"], strict=True)]
        low, high = interval(differences)
        against = "" if codec == "bf16" else f"{sum(differences) / 3:+.3f} ({low:+.3f} to {high:+.3f})"
        lines.append(
            f"| {store.header.feature_dtype}, {store.header.last_hidden_dtype} | {reference_share(store):.2f} | "
            f"{' '.join(f'{value:.3f}' for value in values)} | {sum(values) / 3:.3f} | {against} | "
            f"{fed[codec]:.3f} ({100 * (fed[codec] / fed['bf16'] - 1):+.1f} %) |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(RUN), end="")  # noqa: T201
