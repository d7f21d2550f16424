"""What every drafter promises, and the records that pass between data, training and decoding.

Shape legend of the whole project
    B batch (rows)          S sequence (positions)      A anchors (blocks) per row
    K draft tokens of a block (num_draft_tokens)        Q query slots of a block (K, or K + 1 in the in_place layout)
    L captured target layers    D hidden size           H heads         N cache slots
    V target vocabulary     W draft vocabulary          C candidates    R supervised rows
Masks are True = keep. Layer ids are 0-based indices of the decoder layer whose output is taken.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.sampling import Sampler
from models.spec import TargetSpec


class SlotLayout(StrEnum):
    """Where a block's predictions sit.

    anchor_first (DeepSpec): K slots; slot 0 holds the newest known token and slot j predicts the token after slot j.
    in_place (z-lab): K + 1 slots; slot 0 only holds the newest known token and slot j predicts the token at slot j.
    """

    anchor_first = "anchor_first"
    in_place = "in_place"


@dataclass(frozen=True)
class SampledVocabulary:
    """Columns of the head that stand for all of it in one loss: some for sure, the rest drawn uniformly.

    A drawn column stands for (V - sure) / drawn others, so log of that is added to its logits and the softmax
    normaliser keeps its expectation. Cross-entropy and L1 become estimates with a small bias (log of a mean).
    """

    ids: Tensor  # [C] int64 ascending
    log_weights: Tensor  # [C]

    def places(self, token_ids: Tensor) -> Tensor:
        """Column of each token; every one must be in `ids`."""
        return torch.searchsorted(self.ids, token_ids)


@dataclass
class DraftBatch:
    """Training batch of packed rows, right-padded: the documents of a row stand one after another.

    Record ids stay in the data set; `anchors` were drawn from them by the collator. What is small stays in host memory
    as well, so that choosing rows and building masks waits for no device.
    """

    input_ids: Tensor  # [B, S] int64
    position_ids: Tensor  # [B, S] int64, restarting with every document
    document_ids: Tensor  # [B, S] int64, -1 = padding
    loss_mask: Tensor  # [B, S] bool, True = the token at this position is supervised
    features: Tensor  # [B, S, L*D], layers concatenated in ascending order
    last_hidden: Tensor  # [R, D] target's last hidden state after the final norm, supervised rows only
    last_hidden_ids: Tensor  # [B, S] int64, row of last_hidden that predicts the token after this position, or -1
    anchors: Tensor  # [B, A] int64 positions, ascending, then -1 = unused

    def to(self, device: torch.device) -> "DraftBatch":
        moved = DraftBatch(**{name: tensor.to(device, non_blocking=True) for name, tensor in self.tensors().items()})
        moved._host = self.host
        return moved

    def pin_memory(self) -> "DraftBatch":
        """What a DataLoader calls: copies from pinned memory do not wait for the device."""
        return DraftBatch(**{name: tensor.pin_memory() for name, tensor in self.tensors().items()})

    def __post_init__(self) -> None:
        self._host: DraftBatch | None = None
        self.vocabulary: SampledVocabulary | None = None  # of losses; the step's, set after `to`. None = all tokens

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def host(self) -> "DraftBatch":
        """This batch in host memory: itself, or what it was moved from."""
        if self._host is not None:
            return self._host
        assert self.input_ids.device.type == "cpu", "a batch is made in host memory and moved with `to`"
        return self


class DraftLoss(NamedTuple):
    """Sums, not means: the trainer divides by denominators taken over the whole optimiser step. A tuple, because
    launchers look for tensors inside what `forward` returns.

    `numerators[term]` is differentiable and carries the term's weight; its denominator is
    `Drafter.denominators(batch)[term]`. `metrics[name]` is (sum, count), scalars or one entry per slot.
    """

    numerators: dict[str, Tensor]
    metrics: dict[str, tuple[Tensor, Tensor]]


def stacked(slots: list[Tensor | None]) -> Tensor | None:
    """Of each slot [B, ...], in dimension 1; None where a slot has none."""
    found = [slot for slot in slots if slot is not None]
    return torch.stack(found, dim=1) if found and len(found) == len(slots) else None


@dataclass
class Proposal:
    """Draft tokens and the exact probabilities they were sampled from (float32)."""

    tokens: Tensor  # [B, K] int64
    probs: Tensor  # [B, K, V] or, with candidate_ids, [B, K, C]
    lengths: Tensor  # [B] int64, tokens beyond are not proposed
    candidate_ids: Tensor | None = None  # [B, K, C] int64 target ids of the columns of probs
    confidence: Tensor | None = None  # [B, K] predicted P(accepted | prefix accepted)
    parents: Tensor | None = None  # [B, K] int64 index of the parent draft token, -1 = root; None = a chain
    ranked: Tensor | None = None  # [B, K, N] int64 likeliest tokens of each slot, if `Sampler.ranking` asks


class DraftState(Protocol):
    """A drafter's memory of B running requests: rolls back by length, compacts by index."""

    @property
    def lengths(self) -> Tensor:
        """[B] int64, positions whose features it has seen."""
        ...

    def select(self, rows: Tensor) -> None:
        """Keep only these rows, in this order (int64 indices)."""
        ...

    def put(self, rows: Tensor, other: Any) -> None:
        """Replace these rows by all rows of another state, of requests that have just started."""
        ...


class Proposer(Protocol):
    """The three callables of speculative decoding; every argument and result is batched and ragged."""

    needs_features: bool
    num_draft_tokens: int

    def start(self, tokens: Tensor, features: Tensor, counts: Tensor, capacity: int) -> Any:
        """A `DraftState` with room for `capacity` positions, from the prompts' tokens [B, S] and features [B, S, L*D],
        of which counts [B] are valid."""
        ...

    def propose(self, state: Any, last: Tensor, sampler: Sampler, num_draft_tokens: int) -> Proposal:
        """last [B]: the newest committed token, at position `state.lengths`, not yet seen by the target."""
        ...

    def advance(self, state: Any, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        """tokens [B, Q] just verified with the features [B, Q, L*D] of their positions; counts [B] of them are kept."""
        ...


@runtime_checkable
class TreeProposer(Proposer, Protocol):
    """One that can also draft a tree: `Proposal.parents`."""

    def propose_tree(self, state: Any, last: Tensor, policy: Any) -> Proposal:
        """`policy` is a `models.trees.TreePolicy`."""
        ...


class Engine(StrEnum):
    """Whose layout `export.py` writes."""

    deepspec = "deepspec"
    vllm = "vllm"
    speculators = "speculators"
    sglang = "sglang"
    gguf = "gguf"


@dataclass(frozen=True)
class Serving:
    """What an engine's files hold: fields of its config.json (GGUF: metadata), and tensors under its names."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


class Drafter(nn.Module, ABC):
    """A trainable drafter. One subclass = one file in models/ and one yaml in conf/model/.

    The target's frozen embedding and head are bound as plain tensors, so they stay outside sharding, the optimiser
    and checkpoints; `bind` must be called before any forward.
    """

    needs_features = True
    flex_attention = False  # how training attends; set by whoever trains, not part of a checkpoint
    compiled = False  # torch.compile for the arithmetic of layers and losses; likewise
    training_options: ClassVar[frozenset[str]]  # fields of its config that say how it learns, not what it is
    num_draft_tokens: int
    target_layer_ids: tuple[int, ...]
    slot_layout: SlotLayout | None = None  # None: a chain, which has no block
    draft_vocab_size: int | None = None  # None: all of the target's tokens
    sampled_vocabulary: int | None = None  # tokens drawn for `DraftBatch.vocabulary` of every step; None: exact losses
    spec: TargetSpec
    embedding: Tensor  # [V, D]
    head: Tensor  # [V, D]

    def bind(self, embedding: Tensor, head: Tensor) -> Self:
        """Lend the target's embedding [V, D] and head [V, D]; they are never trained, moved or saved.

        Raises ValueError on other shapes, and on other values than a drafter was bound to before.
        """
        expected = (self.spec.vocab_size, self.spec.hidden_size)
        for name, tensor in (("embedding", embedding), ("head", head)):
            if tuple(tensor.shape) != expected:
                raise ValueError(f"target {name} has shape {tuple(tensor.shape)}, the drafter was built for {expected}")
            before = self.__dict__.get(name)
            if before is not None and differ(before, tensor):
                raise ValueError(
                    f"the drafter came with another {name} than this target's: it was trained for other weights; "
                    "name the target that it was trained for"
                )
        # Plain tensors, which no optimiser or checkpoint sees; one that is plain stays the same object, so that
        # target and drafter share what `models.packed` keeps of it.
        self.embedding, self.head = (x.detach() if isinstance(x, nn.Parameter) else x for x in (embedding, head))
        return self

    def use_draft_vocabulary(self, token_ids: Tensor) -> None:  # noqa: ARG002
        """Take the target tokens [W] int64, ascending, that a drafter with a `draft_vocab_size` drafts from."""
        raise ValueError(f"{type(self).__name__} has no reduced draft vocabulary")

    def copy_from_bound(self) -> None:
        """Called once on a fresh drafter, after `bind`: weights that begin as copies of the target's take them now."""

    def check_weights(self) -> None:
        """Raises ValueError where loaded tensors contradict each other."""

    @abstractmethod
    def forward(self, batch: DraftBatch) -> DraftLoss: ...

    @abstractmethod
    def denominators(self, batch: DraftBatch) -> dict[str, Tensor]:
        """Supervised slots times static position weight per term, known before the forward (float64 scalars)."""

    @abstractmethod
    def training_flops(self, batch: DraftBatch) -> float:
        """Floating-point operations that forward and backward over the batch need: 2 a multiply-add, products only,
        nothing that masks hide and nothing twice."""

    @abstractmethod
    def layer_rows(self, batch: DraftBatch) -> int:
        """Rows that a forward pass over the batch sends through a decoder layer, once for every layer and step."""

    @property
    def extra_row_bytes(self) -> int:
        """What a layer keeps of a row for the backward pass, beyond what a plain decoder layer does."""
        return 0

    @abstractmethod
    def start(self, tokens: Tensor, features: Tensor, counts: Tensor, capacity: int) -> DraftState: ...

    @abstractmethod
    def propose(self, state: Any, last: Tensor, sampler: Sampler, num_draft_tokens: int) -> Proposal: ...

    @abstractmethod
    def advance(self, state: Any, tokens: Tensor, features: Tensor, counts: Tensor) -> None: ...

    @abstractmethod
    def native_config(self) -> dict[str, Any]:
        """The drafter's own fields of our config.json (JSON values only); `from_native` is its inverse."""

    @classmethod
    @abstractmethod
    def from_native(cls, config: Mapping[str, Any], spec: TargetSpec) -> "Drafter": ...

    @abstractmethod
    def serving(self, engine: Engine) -> Serving:
        """Raises ValueError that says what `engine` cannot serve, and what it could."""

    @property
    def sharded_layers(self) -> nn.ModuleList | None:
        """Layers that are called as whole modules in training, so that FSDP2 may gather them one at a time."""
        return None

    def warm_start_layers(self) -> nn.ModuleList | None:
        """Decoder layers with Hugging Face parameter names that may start from the target's last ones."""
        return None

    def init_weights(self, module: nn.Module) -> None:
        """For `apply`: linear layers and embeddings as the target's family starts them, biases zero."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.spec.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Frozen target embedding [..., D], scaled as the target scales it."""
        scale = torch.tensor(self.spec.embedding_scale, dtype=self.embedding.dtype)  # Gemma rounds it, too
        return F.embedding(token_ids, self.embedding) * scale

    def capped(self, logits: Tensor) -> Tensor:
        """Float32 logits, soft-capped as the target's."""
        cap = self.spec.logit_softcap
        return logits.float() if cap is None else cap * torch.tanh(logits.float() / cap)


def differ(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two [V, D] matrices are other weights, not another rounding: some rows compared, to 2 % of their size."""
    rows = slice(None, None, max(1, len(ours) // 256))
    a, b = ours[rows].float(), theirs[rows].to(ours.device).float()
    return bool((a - b).abs().mean() > 0.02 * a.abs().mean())


def check_layer_ids(layer_ids: tuple[int, ...], spec: TargetSpec) -> None:
    """Raises ValueError unless ids are ascending, unique and among the target's layers."""
    ids = list(layer_ids)
    if not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= spec.num_layers:
        raise ValueError(
            f"target_layer_ids must be ascending, unique and in 0..{spec.num_layers - 1} (the target's layers), "
            f"got {ids}"
        )
