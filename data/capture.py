"""Features kept while the target answers, so that extraction need not run it again over the same tokens.

A capture folder holds one safetensors file per batch of answers. It is a cache: extraction takes from it what fits the
target, the layers, the type and the exact token ids, computes the rest, and does not need it afterwards.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from data.store import StoreHeader
from models.files import sha256_text, write_atomic
from models.target import Target, TargetIdentity, TargetOutput

FEATURE_DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class CaptureHeader:
    """What captured features depend on besides token ids."""

    target: TargetIdentity
    layer_ids: tuple[int, ...]
    feature_dtype: str

    def digest(self) -> str:
        return sha256_text(json.dumps(asdict(self), sort_keys=True))


@dataclass(frozen=True)
class CapturedAnswer:
    """Outputs of the target at every token of one prompt and its answer."""

    input_ids: Tensor  # [S] int64
    features: Tensor  # [S, L*D]
    hidden: Tensor  # [S, D] last hidden state after the final norm


class BatchCapture:
    """Collects the forward passes of one batch of answers; rows leave the batch at different steps."""

    def __init__(self, dtype: torch.dtype, num_answers: int) -> None:
        self.dtype = dtype
        self.features: list[list[Tensor]] = [[] for _ in range(num_answers)]
        self.hidden: list[list[Tensor]] = [[] for _ in range(num_answers)]

    def add(self, answers: Sequence[int], output: TargetOutput, counts: Sequence[int]) -> None:
        """Keep the first `counts[row]` positions of each row; `answers[row]` says whose they are."""
        features, hidden = (x.to("cpu", self.dtype) for x in (output.features, output.hidden))
        for row, (answer, count) in enumerate(zip(answers, counts, strict=True)):
            self.features[answer].append(features[row, :count])
            self.hidden[answer].append(hidden[row, :count])

    def finish(self, token_ids: Sequence[Sequence[int]]) -> list[CapturedAnswer]:
        """`token_ids` of every prompt with its answer, all of which were fed."""
        captured = []
        for ids, features, hidden in zip(token_ids, self.features, self.hidden, strict=True):
            captured.append(CapturedAnswer(torch.tensor(ids), torch.cat(features), torch.cat(hidden)))
            assert len(ids) == len(captured[-1].features), (len(ids), captured[-1].features.shape)
        return captured


def write_captured(folder: Path, header: CaptureHeader, ids: Sequence[str], answers: Sequence[CapturedAnswer]) -> None:
    """One file for the batch, named by its first record, so that a repeated batch replaces its own file."""
    tensors = {}
    for index, answer in enumerate(answers):
        for name in ("input_ids", "features", "hidden"):
            tensors[f"{index}.{name}"] = getattr(answer, name).contiguous()
    metadata = {"about": json.dumps({"header": header.digest(), "ids": list(ids)})}
    path = folder / f"{sha256_text(ids[0])[:16]}.safetensors"
    write_atomic(path, lambda temporary: save_file(tensors, temporary, metadata=metadata))


class CapturedFeatures:
    """Read access to a capture folder; a missing folder captures nothing."""

    def __init__(self, folder: Path, headers: Sequence[CaptureHeader]) -> None:
        digests = {header.digest() for header in headers}
        self._places: dict[str, tuple[Path, int]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                about = json.loads(file.metadata()["about"])
            if about["header"] in digests:
                self._places |= {record: (path, index) for index, record in enumerate(about["ids"])}

    def holds(self, record_id: str, input_ids: Sequence[int]) -> bool:
        """Whether `find` would find these tokens; reads no features."""
        return self._read(record_id, input_ids, ()) is not None

    def find(self, record_id: str, input_ids: Sequence[int]) -> CapturedAnswer | None:
        """The capture of exactly these tokens, or None."""
        found = self._read(record_id, input_ids, ("features", "hidden"))
        return None if found is None else CapturedAnswer(torch.tensor(list(input_ids)), *found)

    def _read(self, record_id: str, input_ids: Sequence[int], names: Sequence[str]) -> list[Tensor] | None:
        if record_id not in self._places:
            return None
        path, index = self._places[record_id]
        with safe_open(path, framework="pt") as file:
            if file.get_tensor(f"{index}.input_ids").tolist() != list(input_ids):
                return None
            return [file.get_tensor(f"{index}.{name}").clone() for name in names]


def exact_headers(identity: TargetIdentity, header: StoreHeader, target_dtype: str) -> list[CaptureHeader]:
    """Captures from which a store of `header` is rounded as from the target itself."""
    dtypes = ["float32"]
    if target_dtype == "bfloat16" or {header.feature_dtype, header.last_hidden_dtype} == {"bf16"}:
        dtypes.append("bf16")
    return [CaptureHeader(identity, header.layer_ids, dtype) for dtype in dtypes]


def capture_header(target: Target, identity: TargetIdentity, feature_dtype: str) -> CaptureHeader:
    """Raises ValueError on a type that no store holds."""
    if feature_dtype not in FEATURE_DTYPES:
        raise ValueError(f"capture={feature_dtype} is unknown; choose one of {sorted(FEATURE_DTYPES)} or null")
    return CaptureHeader(identity, target.layer_ids, feature_dtype)
