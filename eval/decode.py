"""The decoding loop: start, propose, verify, advance; batched over ragged requests, with or without a drafter."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eval.schedule import Schedule
from eval.verify import Rule, Verdict, verify
from models.base import Proposal, Proposer
from models.sampling import Purpose, Sampler, SamplingConfig
from models.target import Target, pad_rows


@dataclass(frozen=True)
class DecodeConfig:
    """How to decode. num_draft_tokens 0 or no drafter is vanilla decoding, one token a round."""

    max_new_tokens: int
    batch_size: int
    num_draft_tokens: int
    rule: Rule
    schedule: Schedule
    sampling: SamplingConfig


@dataclass(frozen=True)
class Round:
    """One verification of one request. A round ended by an accepted stop token has no bonus token."""

    proposed: int
    accepted: int
    bonus: bool


@dataclass
class Generation:
    """One finished request. The first token comes from the prompt's own forward and belongs to no round.

    `tokens` is cut at the first stop token (kept) or at max_new_tokens; `rounds` keep the counts of the last round in
    full, also where its tokens overshoot max_new_tokens, as the reference counts them.
    """

    request_id: int
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: str = ""


@dataclass(frozen=True)
class DecodeResult:
    """Generations in the order of the prompts, and where the time went (seconds)."""

    generations: list[Generation]
    seconds: float
    draft_seconds: float
    verify_seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(len(generation.tokens) for generation in self.generations)

    @property
    def tokens_per_second(self) -> float:
        """New tokens over wall time, prompts' forward included."""
        return self.num_tokens / self.seconds


def decode(
    target: Target,
    drafter: Proposer | None,
    prompts: Sequence[list[int]],
    config: DecodeConfig,
    *,
    request_ids: Sequence[int] | None = None,
    on_finish: Callable[[Generation], object] | None = None,
) -> DecodeResult:
    """Decode token-id prompts, batched by length. A request's draws depend on its id, not on its neighbours."""
    check_requests(target, prompts, config)
    ids = list(range(len(prompts))) if request_ids is None else list(request_ids)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    done: dict[int, Generation] = {}
    clock = {"draft": 0.0, "verify": 0.0}
    began = time.perf_counter()
    with torch.inference_mode():
        for start in range(0, len(order), config.batch_size):
            members = order[start : start + config.batch_size]
            batch = _Batch(target, drafter, [prompts[i] for i in members], [ids[i] for i in members], config, clock)
            while batch.running:
                batch.step()
            for index, generation in zip(members, batch.generations, strict=True):
                done[index] = generation
                if on_finish is not None:
                    on_finish(generation)
    seconds = time.perf_counter() - began
    return DecodeResult([done[i] for i in range(len(prompts))], seconds, clock["draft"], clock["verify"])


def check_requests(target: Target, prompts: Sequence[list[int]], config: DecodeConfig) -> None:
    """Raises ValueError on a prompt that is empty or leaves no room in the target's context."""
    limit = target.spec.max_position_embeddings
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {index} has no tokens")
        if len(prompt) + config.max_new_tokens + config.num_draft_tokens > limit:
            raise ValueError(
                f"prompt {index} of {len(prompt)} tokens + max_new_tokens={config.max_new_tokens} + "
                f"num_draft_tokens={config.num_draft_tokens} exceed the target's context of {limit}"
            )
    if config.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {config.max_new_tokens}")


class _Batch:
    """Requests that run together; finished rows are compacted away."""

    def __init__(
        self,
        target: Target,
        drafter: Proposer | None,
        prompts: list[list[int]],
        request_ids: list[int],
        config: DecodeConfig,
        clock: dict[str, float],
    ) -> None:
        self.target, self.config, self.clock = target, config, clock
        self.drafter = drafter if config.num_draft_tokens > 0 else None
        self.generations = [Generation(request_id) for request_id in request_ids]
        self.running = list(range(len(prompts)))  # index into generations of each row
        device = target.device
        self.sampler = Sampler(config.sampling, torch.tensor(request_ids, device=device))
        self.stops = torch.tensor(target.spec.eos_token_ids, device=device)
        tokens, counts = pad_rows(prompts, device)
        # + 1 slot for the newest token and one block of drafts that may overshoot the limit
        capacity = tokens.shape[1] + config.max_new_tokens + 2 * config.num_draft_tokens + 2
        self.cache = target.new_cache(len(prompts), capacity)
        with_features = self.drafter is not None and self.drafter.needs_features
        output = target.forward(tokens, self.cache, with_features=with_features)
        self.cache.advance(counts)
        rows = torch.arange(len(prompts), device=device)
        probs = self.sampler.probs(target.logits(output.hidden[rows, counts - 1]))
        self.last = self.sampler.draw(probs, counts, Purpose.target)
        if self.drafter is not None:
            self.state = self.drafter.start(tokens, output.features, counts, capacity)
        self._commit(self.last[:, None], torch.ones_like(self.last))

    def step(self) -> None:
        """One round of every running request."""
        began = time.perf_counter()
        proposal = self._propose()
        drafted = time.perf_counter()
        num_drafts = int(proposal.lengths.max())
        fed = torch.cat((self.last[:, None], proposal.tokens[:, :num_drafts]), dim=1)
        with_features = self.drafter is not None and self.drafter.needs_features
        output = self.target.forward(fed, self.cache, with_features=with_features)
        target_probs = self.sampler.probs(self.target.logits(output.hidden))
        shown = shorten(proposal, num_drafts)
        positions = self.cache.lengths + 1
        verdict = verify(self.config.rule, shown, target_probs, positions, self.sampler)
        self.clock["verify"] += time.perf_counter() - drafted
        kept = torch.cat((shown.tokens, verdict.next_token[:, None]), dim=1)
        kept.scatter_(1, verdict.num_accepted[:, None], verdict.next_token[:, None])
        self._record_rounds(shown, verdict)
        began_advance = time.perf_counter()
        counts = verdict.num_accepted + 1
        self.cache.advance(counts)
        if self.drafter is not None:
            self.drafter.advance(self.state, fed, output.features, counts)
        self.last = verdict.next_token
        self._commit(kept, counts)
        self.clock["draft"] += drafted - began + time.perf_counter() - began_advance

    def _propose(self) -> Proposal:
        if self.drafter is None:
            nothing = torch.zeros(len(self.running), 0, dtype=torch.int64, device=self.last.device)
            probs = torch.zeros(*nothing.shape, 1, device=self.last.device)
            return Proposal(nothing, probs, torch.zeros_like(self.last))
        proposal = self.drafter.propose(self.state, self.last, self.sampler, self.config.num_draft_tokens)
        proposal.lengths = self.config.schedule.lengths(proposal)
        return proposal

    def _record_rounds(self, proposal: Proposal, verdict: Verdict) -> None:
        """Count the round; where a stop token was accepted, what follows it was neither proposed nor accepted."""
        slots = torch.arange(proposal.tokens.shape[1], device=self.stops.device)
        is_stop = torch.isin(proposal.tokens, self.stops) & (slots < verdict.num_accepted[:, None])
        has_stop = is_stop.any(1)
        until_stop = is_stop.long().argmax(1) + 1 if proposal.tokens.shape[1] else verdict.num_accepted
        proposed = torch.where(has_stop, until_stop, proposal.lengths).tolist()
        accepted = torch.where(has_stop, until_stop, verdict.num_accepted).tolist()
        for row, stopped in enumerate(has_stop.tolist()):
            round_ = Round(proposed[row], accepted[row], bonus=not stopped)
            self.generations[self.running[row]].rounds.append(round_)

    def _commit(self, tokens: Tensor, counts: Tensor) -> None:
        """Append each row's new tokens, finish rows at stop tokens and limits, and drop the finished ones."""
        stops = set(self.target.spec.eos_token_ids)
        rows = []
        for row, (new, count) in enumerate(zip(tokens.tolist(), counts.tolist(), strict=True)):
            generation = self.generations[self.running[row]]
            room = self.config.max_new_tokens - len(generation.tokens)
            new = new[: min(count, room)]
            end = next((i for i, token in enumerate(new) if token in stops), None)
            generation.tokens.extend(new if end is None else new[: end + 1])
            if end is not None:
                generation.finish_reason = "stop"
            elif len(generation.tokens) >= self.config.max_new_tokens:
                generation.finish_reason = "length"
            else:
                rows.append(row)
        if len(rows) < len(self.running):
            self._select(rows)

    def _select(self, rows: list[int]) -> None:
        index = torch.tensor(rows, dtype=torch.int64, device=self.last.device)
        self.running = [self.running[row] for row in rows]
        if not rows:
            return
        self.last, self.sampler = self.last[index], self.sampler.select(index)
        self.cache.select(index)
        if self.drafter is not None:
            self.state.select(index)


def shorten(proposal: Proposal, num_drafts: int) -> Proposal:
    """The first `num_drafts` slots of a proposal."""
    candidates = proposal.candidate_ids
    return Proposal(
        tokens=proposal.tokens[:, :num_drafts],
        probs=proposal.probs[:, :num_drafts],
        lengths=proposal.lengths,
        candidate_ids=None if candidates is None else candidates[:, :num_drafts],
        confidence=None if proposal.confidence is None else proposal.confidence[:, :num_drafts],
    )
