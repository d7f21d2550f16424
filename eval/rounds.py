"""What decoding yields: outputs, and of every verification what was proposed and what came of it."""

from dataclasses import dataclass, field, replace

NUM_RANKED = 16  # likeliest tokens of a slot among which the output's own is looked for


@dataclass(frozen=True)
class Round:
    """One verification of one request. A round ended by an accepted stop token has no bonus token. Of a tree, what is
    proposed is its depth."""

    proposed: int
    accepted: int
    bonus: bool
    # of every drafted slot, sent to verification or not, before calibration
    confidence: tuple[float, ...] = field(default=(), compare=False)
    # with `DecodeConfig.diagnose`, of every proposed slot: the chance that it is accepted where those before it were
    # (one minus the total variation distance), and the place of the output's token among the drafter's likeliest
    # NUM_RANKED (NUM_RANKED: not among them), as far as the output goes
    overlap: tuple[float, ...] = field(default=(), compare=False)
    ranks: tuple[int, ...] = field(default=(), compare=False)
    # likewise with a lossy rule: how far what comes out of every proposed slot, where it is decided, is from the
    # target's own distribution (total variation)
    altered: tuple[float, ...] = field(default=(), compare=False)
    # of a round that an accepted stop token ended: drafts proposed and accepted behind it, which engines count
    behind: tuple[int, ...] = field(default=(), compare=False)


@dataclass
class Generation:
    """One finished request. The first token comes from the prompt's own forward and belongs to no round.

    `tokens` is cut at the first stop token, or the token that completes a stop string (kept), or at the limit; `rounds`
    keep the counts of the last round in full, also where its tokens overshoot the limit, as the reference counts them.
    """

    request_id: int
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: str = ""  # stop, or length: max_new_tokens or the target's context
    # seconds since the request was taken: when the prompt's forward had given the first token, when every round ended
    first_token_seconds: float = field(default=0.0, compare=False)
    round_end_seconds: list[float] = field(default_factory=list, compare=False)

    # while it runs: the clock when it was taken; (round, place of its first slot in the output, likeliest tokens of
    # each slot)
    began: float = field(default=0.0, compare=False, repr=False)
    ranked: list[tuple[int, int, list[list[int]]]] = field(default_factory=list, compare=False, repr=False)

    def place_ranks(self) -> None:
        """`Round.ranks`, now that the output is known."""
        for index, first, slots in self.ranked:
            known = zip(slots, self.tokens[first:], strict=False)
            ranks = tuple(likely.index(token) if token in likely else NUM_RANKED for likely, token in known)
            self.rounds[index] = replace(self.rounds[index], ranks=ranks)
        self.ranked.clear()


@dataclass(frozen=True)
class DecodeResult:
    """Generations in the order of the prompts, and where the time went (seconds): the prompts' own forward, drafting,
    verifying; the rest is this loop's. What only a diagnosis needs is left out. `steps` are rounds of a batch."""

    generations: list[Generation]
    seconds: float
    draft_seconds: float
    verify_seconds: float
    prompt_seconds: float = 0.0
    steps: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(generation.tokens) for generation in self.generations)

    @property
    def tokens_per_second(self) -> float:
        """New tokens over wall time, prompts' forward included."""
        return self.num_tokens / self.seconds
