"""What eval.py measures: a drafter from a folder, or a baseline by name."""

from dataclasses import dataclass
from pathlib import Path

import torch

from models.base import Drafter, Proposer
from models.checkpoint import WEIGHTS, check_target, load_drafter, resolve_folder
from models.files import sha256_file
from models.ngram import NgramDrafter
from models.target import Target, TargetConfig, TargetIdentity, dtype_of, load_spec

NGRAM_DRAFT_TOKENS = 7


@dataclass(frozen=True)
class Subject:
    """A drafter (None = vanilla decoding) and what names it in reports and in kept passes."""

    name: str
    drafter: Proposer | None
    slot_layout: str | None
    fingerprint: str

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Target layers whose output it is fed."""
        return self.drafter.target_layer_ids if isinstance(self.drafter, Drafter) else ()

    def bind(self, target: Target) -> None:
        """Lend a drafter the target's embedding and head."""
        if isinstance(self.drafter, Drafter):
            self.drafter.bind(target.embedding, target.head)


VANILLA = Subject("vanilla", None, None, "vanilla")


def ngram(num_draft_tokens: int = NGRAM_DRAFT_TOKENS) -> Subject:
    return Subject("ngram", NgramDrafter(num_draft_tokens), None, f"ngram{num_draft_tokens}")


def load_subject(draft: str, config: TargetConfig, identity: TargetIdentity, device: torch.device) -> Subject:
    """`vanilla`, `ngram`, or a folder that `load_drafter` knows. Raises ValueError on another target's drafter."""
    if draft == "vanilla":
        return VANILLA
    if draft == "ngram":
        return ngram()
    folder = resolve_folder(Path(draft))
    drafter = load_drafter(folder, dtype=dtype_of(config.dtype), target=load_spec(config)).drafter.to(device)
    check_target(folder, drafter, config, identity)
    name = type(drafter).__name__.lower()
    layout = None if drafter.slot_layout is None else str(drafter.slot_layout)
    return Subject(name, drafter, layout, sha256_file(folder / WEIGHTS))
