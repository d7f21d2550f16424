"""The decoding loop: start, propose, verify, advance; batched over ragged requests, with or without a drafter."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eval.rounds import NUM_RANKED, DecodeResult, Generation, Round
from eval.schedule import Schedule, ScheduleName, Scheduler
from eval.verify import Rule, altered_of, verify
from models.base import Proposal, Proposer, TreeProposer
from models.sampling import Purpose, Ranking, Sampler, SamplingConfig, SeenTokens
from models.target import Target, pad_rows
from models.trees import TreePolicy, ancestors, depths


@dataclass(frozen=True)
class DecodeConfig:
    """How to decode. num_draft_tokens 0 or no drafter is vanilla decoding, one token a round."""

    max_new_tokens: int
    batch_size: int
    num_draft_tokens: int
    rule: Rule
    schedule: Schedule
    sampling: SamplingConfig
    lossy_threshold: float = 1.0  # of rule=lossy_threshold
    stop_strings: tuple[str, ...] = ()
    tree: TreePolicy | None = None  # a tree instead of a chain, `num_draft_tokens` is its depth then
    cuda_graphs: bool = False  # the target's forward of a round is recorded once for every shape
    diagnose: bool = False  # rounds say how close their drafts came
    # as DeepSpec's evaluator counts: where exactly max_new_tokens are out there is one more round, without its tokens
    round_at_the_limit: bool = False

    @property
    def most_new_tokens(self) -> int:
        """At which an output ends, before it is cut to max_new_tokens."""
        return self.max_new_tokens + self.round_at_the_limit

    def __post_init__(self) -> None:
        if self.tree is not None and (self.schedule.name is not ScheduleName.fixed or self.schedule.gate):
            raise ValueError(f"a draft tree is verified whole: use schedule=fixed, got {self.schedule.name}")
        if not 0 < self.lossy_threshold <= 1:
            raise ValueError(f"lossy_threshold must be in (0, 1], got {self.lossy_threshold}")


def decode(
    target: Target,
    drafter: Proposer | None,
    prompts: Sequence[list[int]],
    config: DecodeConfig,
    *,
    request_ids: Sequence[int] | None = None,
    on_finish: Callable[[Generation], object] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> DecodeResult:
    """Decode token-id prompts, at most `batch_size` at a time: where one finishes, the next begins. A request's draws
    depend on its id, not on its neighbours. Stop strings are looked for in what `tokenizer` makes of the output."""
    check_requests(target, prompts, config)
    ends = Ends(target.spec.eos_token_ids, config.stop_strings, tokenizer)
    ids = list(range(len(prompts))) if request_ids is None else list(request_ids)
    waiting = deque(sorted(range(len(prompts)), key=lambda i: len(prompts[i])))
    done: dict[int, Generation] = {}
    run = _Run(target, drafter if config.num_draft_tokens > 0 else None, config, ends)
    began = time.perf_counter()

    def admit(count: int, room: int) -> _Batch:
        chosen = [waiting.popleft() for _ in range(min(count, len(waiting)))]
        return _Batch(run, chosen, [prompts[i] for i in chosen], [ids[i] for i in chosen], room)

    with torch.inference_mode():
        longest = max((len(prompt) for prompt in prompts), default=0)
        room = min(longest + config.most_new_tokens, target.spec.max_position_embeddings)
        batch = admit(config.batch_size, room + run.most_fed + 1) if prompts else None
        while batch is not None:
            for index, generation in batch.take_finished():
                done[index] = generation
                if on_finish is not None:
                    on_finish(generation)
            if free := batch.free_rows:
                if waiting:
                    fresh = admit(len(free), 0)
                    batch.put(free[: len(fresh.rows)], fresh)
                    continue  # the first token may have been the last
                if not batch.keep_running():
                    break
            batch.step()
    ranked = 0.0 if run.ranking is None else run.ranking.seconds
    seconds = time.perf_counter() - began - ranked - run.overlap_seconds  # without what only a diagnosis needs
    times = (seconds, run.draft_seconds - ranked, run.verify_seconds, run.prompt_seconds)
    return DecodeResult([done[i] for i in range(len(prompts))], *times, run.steps)


def check_requests(target: Target, prompts: Sequence[list[int]], config: DecodeConfig) -> None:
    """Raises ValueError on a prompt that is empty or leaves no room for a token in the target's context."""
    limit = target.spec.max_position_embeddings
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {index} has no tokens")
        if len(prompt) >= limit:
            raise ValueError(f"prompt {index} of {len(prompt)} tokens fills the target's context of {limit}")
    if config.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {config.max_new_tokens}")


class Ends:
    """Where an output ends before its limit."""

    def __init__(
        self, token_ids: Sequence[int], strings: Sequence[str], tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        self.token_ids, self.strings = frozenset(token_ids), tuple(strings)
        if strings and (tokenizer is None or not all(strings)):
            raise ValueError(f"stop strings {list(strings)} must have text, and need the target's tokenizer")
        self._text = partial(tokenizer.decode, clean_up_tokenization_spaces=False) if tokenizer is not None else None

    def find(self, tokens: list[int], new: list[int]) -> int | None:
        """Index in `new`, which follow the output `tokens`, of the first stop token or the first that completes a stop
        string."""
        end = next((i for i, token in enumerate(new) if token in self.token_ids), None)
        if not self.strings or self._text is None:
            return end
        last = len(new) if end is None else end
        if self._holds([*tokens, *new[:last]]):
            return next(i for i in range(last) if self._holds([*tokens, *new[: i + 1]]))
        return end

    def _holds(self, tokens: list[int]) -> bool:
        assert self._text is not None
        text = self._text(tokens)
        return any(string in text for string in self.strings)


class _Run:
    """What all batches of one call of `decode` share."""

    def __init__(self, target: Target, drafter: Proposer | None, config: DecodeConfig, ends: Ends) -> None:
        self.target, self.drafter, self.config, self.ends = target, drafter, config, ends
        self.scheduler = Scheduler(config.schedule)
        self.with_features = drafter is not None and drafter.needs_features
        self.draft_seconds = self.verify_seconds = self.prompt_seconds = self.overlap_seconds = 0.0
        self.steps = 0
        self.ranking = Ranking(NUM_RANKED) if config.diagnose else None
        if config.tree is not None and not isinstance(drafter, TreeProposer):
            raise ValueError(f"a draft tree needs a drafter that grows one (EAGLE-3), got {type(drafter).__name__}")

    @property
    def most_fed(self) -> int:
        """Tokens of one request in one forward at most."""
        tree = self.config.tree
        return 1 + (self.config.num_draft_tokens if tree is None else tree.num_nodes)


class _Batch:
    """Requests that run together. A finished one leaves its row to another, or the rows close up."""

    def __init__(
        self, run: _Run, indices: list[int], prompts: list[list[int]], request_ids: list[int], room: int
    ) -> None:
        """`room`: slots of every row at least; one that is only put into another batch needs none."""
        self.run, self.config = run, run.config
        began = time.perf_counter()
        self.rows: list[Generation | None] = [Generation(request_id, began=began) for request_id in request_ids]
        self.indices = indices
        target, device = run.target, run.target.device
        limit = target.spec.max_position_embeddings
        self.limits = [min(self.config.most_new_tokens, limit - len(prompt)) for prompt in prompts]
        tokens, counts = pad_rows(prompts, device)
        seen = None
        if self.config.sampling.has_penalties:
            seen = SeenTokens.of_prompts(tokens, counts, target.spec.vocab_size)
        self.sampler = Sampler(self.config.sampling, torch.tensor(request_ids, device=device), seen, run.ranking)
        capacity = max(room, tokens.shape[1])
        self.cache = target.new_cache(len(prompts), capacity, is_static=self.config.cuda_graphs)
        output = target.forward(tokens, self.cache, with_features=run.with_features)
        self.cache.advance(counts)
        places = torch.arange(len(prompts), device=device)
        probs = self.sampler.probs(target.logits(output.hidden[places, counts - 1]))
        self.last = self.sampler.draw(probs, counts, Purpose.target)
        self.state = None if run.drafter is None else run.drafter.start(tokens, output.features, counts, capacity)
        self._commit(self.last[:, None], torch.ones_like(self.last))
        run.prompt_seconds += time.perf_counter() - began

    @property
    def free_rows(self) -> list[int]:
        return [row for row, generation in enumerate(self.rows) if generation is None]

    def take_finished(self) -> list[tuple[int, Generation]]:
        """(index of the prompt, generation) of rows that finished; they are free from now on."""
        found = []
        for row, generation in enumerate(self.rows):
            if generation is not None and generation.finish_reason:
                found.append((self.indices[row], generation))
                self.rows[row] = None
                self.run.scheduler.forget(generation.request_id)
        return found

    def put(self, rows: list[int], fresh: "_Batch") -> None:
        """Give free rows to requests that have just started."""
        places = torch.tensor(rows, device=self.last.device)
        for row, generation, index, limit in zip(rows, fresh.rows, fresh.indices, fresh.limits, strict=True):
            self.rows[row], self.indices[row], self.limits[row] = generation, index, limit
        self.cache.put(places, fresh.cache)
        self.last = self.last.index_copy(0, places, fresh.last)
        self.sampler = self.sampler.put(places, fresh.sampler)
        if self.state is not None:
            self.state.put(places, fresh.state)

    def keep_running(self) -> bool:
        """Drop free rows; whether any is left."""
        kept = [row for row, generation in enumerate(self.rows) if generation is not None]
        self.rows, self.indices = [self.rows[row] for row in kept], [self.indices[row] for row in kept]
        self.limits = [self.limits[row] for row in kept]
        if kept:
            places = torch.tensor(kept, device=self.last.device)
            self.last, self.sampler = self.last[places], self.sampler.select(places)
            self.cache.select(places)
            if self.state is not None:
                self.state.select(places)
        return bool(kept)

    def step(self) -> None:
        """One round of every request."""
        run, target = self.run, self.run.target
        began = time.perf_counter()
        proposal = self._propose()
        drafted = time.perf_counter()
        shortest, width = (int(x) for x in torch.aminmax(proposal.lengths))
        shown = shorten(proposal, width)
        fed = torch.cat((self.last[:, None], shown.tokens), dim=1)
        output = target.forward(
            fed,
            self.cache,
            with_features=run.with_features,
            parents=shown.parents,
            counts=None if shortest == width or shown.parents is not None else shown.lengths + 1,
            replay=self.config.cuda_graphs,
        )
        behind = None
        if shown.parents is not None and self.sampler.seen is not None:  # penalties look at what a slot stands behind
            reach = ancestors(shown.parents)
            behind = torch.cat((torch.zeros_like(reach[:, :1]), reach), dim=1)
        target_probs = self.sampler.probs(target.logits(output.hidden, output.tokens), shown.tokens, behind=behind)
        threshold, positions = self.config.lossy_threshold, self.cache.lengths + 1
        verdict = verify(self.config.rule, shown, target_probs, positions, self.sampler, threshold=threshold)
        verified = time.perf_counter()
        evidence = self._evidence(shown, target_probs)
        began_advance = time.perf_counter()
        run.verify_seconds += verified - drafted
        run.overlap_seconds += began_advance - verified
        run.steps += 1
        counts, features = verdict.num_accepted + 1, output.features
        if verdict.path is None:
            self.cache.advance(counts)
            accepted = shown.tokens
        else:  # the accepted nodes of each row, as if they were its chain
            accepted = shown.tokens.gather(1, verdict.path)
            path = torch.cat((torch.zeros_like(counts)[:, None], verdict.path + 1), dim=1)
            self.cache.keep_path(path, counts)
            fed = fed.gather(1, path)
            features = features.gather(1, path[..., None].expand(-1, -1, features.shape[-1]))
        if run.drafter is not None:
            run.drafter.advance(self.state, fed, features, counts)
        run.draft_seconds += drafted - began + time.perf_counter() - began_advance
        kept = torch.cat((accepted, verdict.next_token[:, None]), dim=1)
        kept.scatter_(1, verdict.num_accepted[:, None], verdict.next_token[:, None])
        self.last = verdict.next_token
        self._commit(kept, counts, proposal, evidence)

    def _evidence(self, proposal: Proposal, target_probs: Tensor) -> Tensor | None:
        """[B, 1 or 2, K] of a chain, where that is recorded: `Round.overlap`, and of a lossy rule `Round.altered`."""
        if not self.config.diagnose or proposal.parents is not None:
            return None
        measures = [overlap_of(proposal, target_probs)]
        if not self.config.rule.is_lossless:
            measures.append(altered_of(proposal, target_probs, self.config.lossy_threshold))
        return torch.stack(measures, dim=1)

    def _propose(self) -> Proposal:
        run, ids = self.run, [generation.request_id for generation in self.rows if generation is not None]
        length = 0 if run.drafter is None else run.scheduler.draft_length(ids, self.config.num_draft_tokens)
        if run.drafter is None or not length:
            nothing = self.last[:, None][:, :0]
            return Proposal(nothing, torch.zeros(*nothing.shape, 1, device=nothing.device), torch.zeros_like(self.last))
        # a draft that would stand at the end of the context could not be followed by anything
        room = run.target.spec.max_position_embeddings - 1 - self.cache.lengths
        if self.config.tree is not None:
            assert isinstance(run.drafter, TreeProposer)
            proposal = run.drafter.propose_tree(self.state, self.last, self.config.tree)
            assert proposal.parents is not None
            is_inside = depths(proposal.parents) <= room[:, None]
            proposal.lengths = torch.minimum(proposal.lengths, is_inside.long().cumprod(1).sum(1))
            return proposal
        proposal = run.drafter.propose(self.state, self.last, self.sampler, length)
        proposal.lengths = torch.minimum(run.scheduler.lengths(proposal, ids), room)
        return proposal

    def _commit(
        self, tokens: Tensor, counts: Tensor, proposal: Proposal | None = None, evidence: Tensor | None = None
    ) -> None:
        """Append each row's new tokens, of a round's `proposal`, and finish rows at their ends and limits."""
        if self.sampler.seen is not None:
            self.sampler.seen.add(tokens, counts)
        confidences, measured = None, [] if evidence is None else evidence.tolist()
        if proposal is not None:
            proposed = proposal.lengths
            if proposal.parents is not None:
                nodes = torch.arange(proposal.parents.shape[1], device=proposed.device)
                proposed = depths(proposal.parents).masked_fill(nodes >= proposed[:, None], 0).amax(1)
            proposed = proposed.tolist()
            confidences = None if proposal.confidence is None else proposal.confidence.tolist()
        news, now = tokens.tolist(), time.perf_counter()
        for row, (new, count) in enumerate(zip(news, counts.tolist(), strict=True)):
            generation = self.rows[row]
            assert generation is not None
            new, accepted = new[:count], count - 1
            end = self.run.ends.find(generation.tokens, new)
            if proposal is not None:
                sure = () if confidences is None else tuple(confidences[row])
                stopped = end is not None and end < accepted  # what follows was neither proposed nor accepted
                counted = (end + 1, end + 1) if stopped else (proposed[row], accepted)  # type: ignore[operator]
                close = [tuple(values[: counted[0]]) for values in (measured[row] if measured else ())]
                about = dict(zip(("overlap", "altered"), close, strict=False))
                if stopped:
                    about["behind"] = (proposed[row] - counted[0], accepted - counted[1])  # type: ignore[index]
                generation.rounds.append(Round(*counted, bonus=not stopped, confidence=sure, **about))
                generation.round_end_seconds.append(now - generation.began)
                if proposal.ranked is not None and proposal.parents is None:
                    slots = proposal.ranked[row, : counted[0]].tolist()
                    generation.ranked.append((len(generation.rounds) - 1, len(generation.tokens), slots))
            else:
                generation.first_token_seconds = now - generation.began
            room = self.limits[row] - len(generation.tokens)
            is_end = end is not None and end < room
            generation.tokens.extend(new[: end + 1] if is_end else new[:room])  # type: ignore[operator]
            if is_end:
                generation.finish_reason = "stop"
            elif len(generation.tokens) >= self.limits[row]:
                generation.finish_reason = "length"
            if generation.finish_reason:
                generation.place_ranks()
                if len(generation.tokens) > self.config.max_new_tokens:
                    del generation.tokens[self.config.max_new_tokens :]
                    generation.finish_reason = "length"


def overlap_of(proposal: Proposal, target_probs: Tensor) -> Tensor:
    """sum of min(target, draft) [B, K] of each slot of a chain: its chance to be accepted by `ratio`."""
    target = target_probs[:, :-1]
    if proposal.candidate_ids is not None:
        target = target.gather(2, proposal.candidate_ids)
    return torch.minimum(target, proposal.probs).sum(-1)


def shorten(proposal: Proposal, num_drafts: int) -> Proposal:
    """The first `num_drafts` slots of a proposal."""
    candidates = proposal.candidate_ids
    return Proposal(
        tokens=proposal.tokens[:, :num_drafts],
        probs=proposal.probs[:, :num_drafts],
        lengths=proposal.lengths,
        candidate_ids=None if candidates is None else candidates[:, :num_drafts],
        confidence=None if proposal.confidence is None else proposal.confidence[:, :num_drafts],
        parents=None if proposal.parents is None else proposal.parents[:, :num_drafts],
        ranked=None if proposal.ranked is None else proposal.ranked[:, :num_drafts],
    )
