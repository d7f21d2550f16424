"""EAGLE-3 (arXiv 2503.01840): one decoder layer that drafts token by token, trained on its own outputs.

Unusual: every input is a pair (embedding of the next token, hidden state); the first hidden state of a chain is the
fusion of several target layers, every later one the layer's own output. Training unrolls that chain from every position
at once (training-time test): step s of the chain at position t sees the target's features up to t and its own steps up
to s, and gradients flow through all of it.

Unlike in the reference (DeepSpec), the loss mask is aligned with the label (step s at t predicts token t + 2 + s; there
the mask of token t + s counts, so the first two answer tokens are never trained) and each step is divided by its own
number of supervised positions (there by padded batch size times length).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import Mixer, cache_mixer, training_mixer
from models.base import DraftBatch, DraftLoss, Engine, Proposal, Serving, check_layer_ids, stacked
from models.cache import KVCache
from models.config import to_dataclass
from models.draft_vocabulary import VocabularyDrafter
from models.engines import as_speculators, check_style, frozen_copies, gemma4_fields, layer_fields, refusal
from models.flops import attention_flops, loss_columns, num_tokens, vocabulary_flops
from models.gguf import pair_layer_file
from models.layer_styles import LayerStyle
from models.layers import PairLayer, Rotary
from models.losses import LossWeights, check_sampled_vocabulary, check_terms, find_chains
from models.masks import cache_mask
from models.packed import Linear, linear
from models.sampling import Purpose, Sampler
from models.spec import TargetSpec, fused_layers
from models.trees import TreePolicy, grow_tree
from models.vocab_loss import VocabLoss, vocab_loss

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # fields that engines know by these names


@dataclass(frozen=True)
class Eagle3Config:
    """Options of EAGLE-3; conf/model/eagle3.yaml lists every value with a remark."""

    num_draft_tokens: int
    num_fused_layers: int | None
    step_decay: float
    loss: LossWeights
    layer_style: LayerStyle
    qk_norm: bool
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    draft_vocab_size: int | None
    own_head: bool
    sampled_vocabulary: int | None

    def build(self, spec: TargetSpec, *, target_layer_ids: tuple[int, ...], mask_token_id: int | None) -> "Eagle3":  # noqa: ARG002
        return Eagle3(self, spec, target_layer_ids=fused_layers(target_layer_ids, self.num_fused_layers))


@dataclass
class Eagle3State:
    """The pair at position p is (features of p, token p + 1); the newest position still lacks its token."""

    cache: KVCache  # keys and values of whole pairs, all with the target's features
    hidden: Tensor  # [B, D] fused features of the newest position

    @property
    def lengths(self) -> Tensor:
        return self.cache.lengths + 1

    def select(self, rows: Tensor) -> None:
        self.cache.select(rows)
        self.hidden = self.hidden[rows]

    def put(self, rows: Tensor, other: "Eagle3State") -> None:
        self.cache.put(rows, other.cache)
        self.hidden = self.hidden.index_copy(0, rows, other.hidden)


class Unrolled:
    """Chains that go on from a state, side by side."""

    def __init__(self, drafter: "Eagle3", state: Eagle3State) -> None:
        self.drafter, self.hidden, self.context = drafter, state.hidden[:, None], state.cache.read(0)
        self.steps, self.positions = list[tuple[Tensor, Tensor]](), state.cache.lengths[:, None]
        self.mix = cache_mixer(cache_mask(state.cache.lengths, self.context[0].shape[2]))

    def logits(self, tokens: Tensor, behind: Tensor | None = None) -> Tensor:
        """A step by tokens [B, N] of chains that go on from those before, behind [B, N] (None: each from its own)."""
        if behind is not None:
            rows = torch.arange(len(behind), device=behind.device)[:, None]
            self.hidden, self.steps = (
                self.hidden[rows, behind],
                [(k[rows, behind], v[rows, behind]) for k, v in self.steps],
            )
        drafter, own = self.drafter, self.drafter.draft_head()
        positions = (self.positions + len(self.steps)).expand_as(tokens)
        hidden = drafter.step(tokens, self.hidden, positions, self.steps, self.context, self.mix)
        normed = drafter.norm(hidden)
        self.hidden = normed if drafter.config.norm_output else hidden
        return drafter.capped(linear(normed, drafter.head if own is None else own.weight))


class Eagle3(VocabularyDrafter):
    """Autoregressive drafter: a chain of pairs through one layer."""

    training_options = frozenset({"step_decay", "loss", "sampled_vocabulary"})

    def __init__(self, config: Eagle3Config, spec: TargetSpec, *, target_layer_ids: tuple[int, ...]) -> None:
        super().__init__()
        check_options(config, spec)
        check_layer_ids(target_layer_ids, spec)
        spec, style = config.layer_style.spec_of_layers(spec), config.layer_style.classes
        self.config, self.spec, self.target_layer_ids = config, spec, target_layer_ids
        self.num_draft_tokens = config.num_draft_tokens
        self.sampled_vocabulary = config.sampled_vocabulary
        size, num_fused = spec.hidden_size, len(target_layer_ids)
        self.input_norm = style.norm(num_fused * size, spec.rms_norm_eps) if config.norm_before_fc else None
        norms = [style.norm(size, spec.rms_norm_eps) for _ in target_layer_ids] if config.fc_norm else []
        self.fc_norm = nn.ModuleList(norms)
        self.fc = Linear(num_fused * size, size, bias=False)
        options = {"qk_norm": config.qk_norm, "norm_before_residual": config.norm_before_residual}
        self.layers = nn.ModuleList([style.pair(spec, **options)])
        self.norm = style.norm(size, spec.rms_norm_eps)
        self.rotary = Rotary(spec)
        self.add_head(config.draft_vocab_size, own_head=config.own_head)
        self.apply(self.init_weights)

    @property
    def layer(self) -> PairLayer:
        layer = self.layers[0]
        assert isinstance(layer, PairLayer)
        return layer

    # ---- shared by training and decoding

    def fuse(self, features: Tensor) -> Tensor:
        """features [..., L*D] -> [..., D]."""
        x = features.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            x = self.input_norm(x)
        if len(self.fc_norm):
            parts = x.unflatten(-1, (len(self.fc_norm), -1)).unbind(-2)
            x = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(x)

    def pair_context(self, tokens: Tensor, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H_kv, S, d] of pairs: tokens [B, S] are those after the positions of hidden [B, S, D]."""
        pairs, _ = self.layer.pair(self.embed(tokens), hidden)
        return self.layer.self_attn.context(pairs, *self.rotary(position_ids))

    def step(
        self,
        tokens: Tensor,  # [B, N] int64 the chain's newest token
        hidden: Tensor,  # [B, N, D] what predicted it
        positions: Tensor,  # [B, N] int64 position of `hidden`
        chain: list[tuple[Tensor, Tensor]],  # keys and values [B, N, H_kv, d] of the chain's earlier steps; extended
        context: tuple[Tensor, Tensor],  # each [B, H_kv, S, d]
        mix: Mixer,
    ) -> Tensor:
        """One step of N chains a row -> the layer's output [B, N, D] before the final norm."""
        pairs, residual = self.layer.pair(self.embed(tokens), hidden)
        rotary = self.rotary(positions)
        chain.append(self.layer.self_attn.keys_values(pairs, *rotary))
        keys, values = (torch.stack(parts, dim=2) for parts in zip(*chain, strict=True))  # [B, N, M, H_kv, d]
        queries = self.layer.self_attn.queries(pairs, *rotary)
        mixed = mix(queries[:, :, None], (keys, values), context)
        return self.layer.finish(residual, mixed.flatten(2))

    # ---- training

    def forward(self, batch: DraftBatch) -> DraftLoss:
        fused, device = self.fuse(batch.features), batch.input_ids.device
        next_tokens = F.pad(batch.input_ids[:, 1:], (0, 1))
        context = self.pair_context(next_tokens, fused, batch.position_ids)
        chains, supervised = find_chains(batch.host, self.num_draft_tokens)
        mix = training_mixer(chains, batch.host.document_ids, device, num_slots=1, flex=self.flex_attention)
        row_ids = [rows.flatten().nonzero().squeeze(1).to(device, non_blocking=True) for rows in supervised.unbind(-1)]
        starts = chains.clamp(min=0).to(device, non_blocking=True)
        positions = batch.position_ids.gather(1, starts)
        hidden = fused.gather(1, starts[..., None].expand(-1, -1, fused.shape[-1]))
        states: list[Tensor] = []  # [R_s, D] of the supervised chains, step by step
        teacher_rows: list[Tensor] = []  # [R_s]
        chain: list[tuple[Tensor, Tensor]] = []
        for step in range(self.num_draft_tokens):
            ids = (starts + 1 + step).clamp(max=batch.input_ids.shape[1] - 1)  # of the token that this step consumes
            hidden = self.step(batch.input_ids.gather(1, ids), hidden, positions + step, chain, context, mix)
            normed, rows = self.norm(hidden), row_ids[step]
            states.append(normed.flatten(0, 1)[rows])
            teacher_rows.append(batch.last_hidden_ids.gather(1, ids).flatten()[rows])
            if self.config.norm_output:
                hidden = normed
        loss = self.chain_loss(batch, states, teacher_rows)
        numerators = {f"step_{s}": self.config.step_decay**s * total for s, total in enumerate(loss.totals)}
        step_ids = torch.cat([torch.full_like(rows, step) for step, rows in enumerate(teacher_rows)])
        return DraftLoss(numerators, loss.metrics(step_ids, len(states)))

    def chain_loss(self, batch: DraftBatch, states: list[Tensor], teacher_rows: list[Tensor]) -> VocabLoss:
        """One total a step, rows in the order of the steps. All steps that predict a token share the target's
        distribution; only a head in training, whose gradient sums over rows, needs a pass for every step."""
        columns = batch.vocabulary

        def loss_of(steps: list[int]) -> VocabLoss:
            ids = [torch.full_like(teacher_rows[step], place) for place, step in enumerate(steps)]
            return vocab_loss(
                torch.cat([states[step] for step in steps]),
                batch.last_hidden,
                head=self.head if columns is None else self.head[columns.ids],
                weights=torch.ones_like(torch.cat(ids), dtype=torch.float32),
                terms=self.config.loss,
                teacher_ids=torch.cat([teacher_rows[step] for step in steps]),
                group_ids=torch.cat(ids),
                num_groups=len(steps),
                draft_head=self.draft_head(),
                softcap=self.spec.logit_softcap,
                log_weights=None if columns is None else columns.log_weights,
                compiled=self.compiled,
            )

        passes = [[*range(len(states))]] if self.lm_head is None else [[step] for step in range(len(states))]
        parts = [loss_of(steps) for steps in passes]
        return VocabLoss(*(torch.cat(values) for values in zip(*(vars(part).values() for part in parts), strict=True)))

    def denominators(self, batch: DraftBatch) -> dict[str, Tensor]:
        """Supervised positions of each step; the step weight stands in the numerators only."""
        counts = find_chains(batch.host, self.num_draft_tokens)[1].double().sum((0, 1)).to(batch.input_ids.device)
        return {f"step_{s}": count for s, count in enumerate(counts)}

    def training_flops(self, batch: DraftBatch) -> float:
        host, spec, steps = batch.host, self.spec, self.num_draft_tokens
        chains, supervised = find_chains(host, steps)
        of_layer = sum(p.numel() for p in self.layers.parameters() if p.dim() > 1)
        # features need no gradient, unless a trained norm stands before the fusion
        of_fusion = 4 if self.input_norm is None and not len(self.fc_norm) else 6
        of_token = of_fusion * self.fc.weight.numel() + 6 * self.layer.self_attn.context_size
        size, trains_head = spec.num_heads * spec.head_dim, self.lm_head is not None
        columns = loss_columns(batch, self.draft_vocab_size or spec.vocab_size)
        attention = [attention_flops(host, chains, size=size, num_queries=1, num_keys=s + 1) for s in range(steps)]
        rows = vocabulary_flops(
            int(supervised.sum()), 0, size=spec.hidden_size, columns=columns, trains_head=trains_head
        )
        columns = loss_columns(batch, spec.vocab_size)
        num_teachers = len(host.last_hidden) * (steps if trains_head else 1)
        rows += vocabulary_flops(0, num_teachers, size=spec.hidden_size, columns=columns)
        return float(of_token) * num_tokens(host) + 6.0 * self.layer_rows(batch) * of_layer + sum(attention) + rows

    def layer_rows(self, batch: DraftBatch) -> int:
        return self.num_draft_tokens * int((find_chains(batch.host, self.num_draft_tokens)[0] >= 0).sum())

    # ---- decoding

    def start(self, tokens: Tensor, features: Tensor, counts: Tensor, capacity: int) -> Eagle3State:
        batch, fused = tokens.shape[0], self.fuse(features)
        cache = KVCache(1, batch, capacity, tokens.device)
        positions = cache.begin(tokens.shape[1] - 1)
        cache.write(0, *self.pair_context(tokens[:, 1:], fused[:, :-1], positions))
        cache.advance(counts - 1)
        return Eagle3State(cache, fused[torch.arange(batch, device=tokens.device), counts - 1])

    def advance(self, state: Eagle3State, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        """Whatever the chain had in place of features is forgotten: every cached pair is made of the target's."""
        fused = self.fuse(features)
        positions = state.cache.begin(tokens.shape[1])
        hidden = torch.cat((state.hidden[:, None], fused[:, :-1]), dim=1)
        state.cache.write(0, *self.pair_context(tokens, hidden, positions))
        state.cache.advance(counts)
        state.hidden = fused[torch.arange(len(counts), device=counts.device), counts - 1]

    def propose(self, state: Eagle3State, last: Tensor, sampler: Sampler, num_draft_tokens: int) -> Proposal:
        """A chain; behind a drawn stop token nothing is proposed."""
        unrolled, own, drafted, probs, ranked = Unrolled(self, state), self.draft_head(), last[:, None], [], []
        for slot in range(num_draft_tokens):
            logits = unrolled.logits(drafted[:, -1:])[:, 0]
            ranked.append(sampler.ranked(logits, self.draft_ids))
            probs.append(sampler.probs(logits, drafted[:, 1:], columns=self.draft_ids))
            token = sampler.draw(probs[-1], state.lengths + 1 + slot, Purpose.draft)
            drafted = torch.cat((drafted, (token if own is None else own.ids[token])[:, None]), dim=1)
        tokens = drafted[:, 1:]
        is_stop = torch.isin(tokens, torch.tensor(self.spec.eos_token_ids, device=last.device))
        return Proposal(
            tokens=tokens,
            probs=torch.stack(probs, dim=1),
            lengths=((~is_stop).long().cumprod(1).sum(1) + 1).clamp(max=num_draft_tokens),
            candidate_ids=None if self.draft_ids is None else self.draft_ids.expand(*tokens.shape, -1),
            ranked=stacked(ranked),
        )

    def propose_tree(self, state: Eagle3State, last: Tensor, policy: TreePolicy) -> Proposal:
        return grow_tree(policy, last, Unrolled(self, state).logits, self.draft_ids)

    # ---- checkpoints

    def native_config(self) -> dict[str, Any]:
        return {**asdict(self.config), "slot_layout": None, "target_layer_ids": list(self.target_layer_ids)}

    @classmethod
    def from_native(cls, config: Mapping[str, Any], spec: TargetSpec) -> "Eagle3":
        own = {key: value for key, value in config.items() if key not in ("target_layer_ids", "slot_layout")}
        typed = to_dataclass(Eagle3Config, own, section="of the checkpoint")
        return cls(typed, spec, target_layer_ids=tuple(config["target_layer_ids"]))

    def serving(self, engine: Engine) -> Serving:
        config, spec, ids = self.config, self.spec, list(self.target_layer_ids)
        if engine is Engine.gguf:
            return self._gguf()
        check_style(config.layer_style, spec, engine, served=(Engine.deepspec,))
        if engine is Engine.deepspec:
            return self._deepspec()
        if engine is Engine.sglang and (config.qk_norm or config.norm_before_residual or len(ids) == 1):
            what = "model.qk_norm=true, model.norm_before_residual=true or a single fused layer"
            raise refusal(engine, what, "SGLang would leave them out without a word; train without, or choose vllm")
        fields = layer_fields(spec, "qwen3" if config.qk_norm else "llama", num_layers=1)
        tensors = self.engine_tensors(always_head=engine is Engine.speculators)
        width = len(tensors["lm_head.weight"]) if "lm_head.weight" in tensors else None
        counts: list[int] = [index + 1 for index in ids]  # of layers passed
        own = {name: value for name, value in asdict(config).items() if name in FLAGS}
        own |= {"num_target_layers": spec.num_layers, "target_hidden_size": spec.hidden_size}
        if engine is Engine.speculators:
            fields["num_aux_hidden_states"] = len(ids)  # which vLLM reads there alone, and takes three otherwise
            own |= {"draft_vocab_size": width, "eagle_aux_hidden_state_layer_ids": counts, "embed_requires_grad": False}
            made = as_speculators("eagle3", fields, own, num_draft_tokens=self.num_draft_tokens)
            return Serving(made, {**tensors, "embed_tokens.weight": self.embedding})
        own |= {
            "architectures": ["Eagle3Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLMEagle3"],
            "draft_vocab_size": width,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "norm_before_fc": config.norm_before_fc,
                "eagle_aux_hidden_state_layer_ids": counts if engine is Engine.vllm else ids,
            },
            "num_aux_hidden_states": len(ids),
            "target_layer_ids": ids,
            "ttt_length": self.num_draft_tokens,
        }
        if engine is Engine.vllm:  # SGLang takes the lack of a size for the target's head
            own |= {"draft_vocab_size": width or spec.vocab_size, "eagle_aux_hidden_state_layer_ids": counts}
        if not config.qk_norm:
            tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
        return Serving(fields | own, tensors)

    def _deepspec(self) -> Serving:
        config = self.config
        plain = not (config.norm_before_residual or config.norm_before_fc or config.fc_norm or config.norm_output)
        if not (plain and config.qk_norm and self.draft_head() is None and len(self.target_layer_ids) == 5):
            raise ValueError(
                "the deepspec format takes only the reference's EAGLE-3: five fused layers, qk_norm=true, no other "
                "norm, the target's own head and vocabulary"
            )
        is_qwen3 = config.layer_style is LayerStyle.qwen3
        own = {
            "architectures": ["Qwen3Eagle3Model" if is_qwen3 else "Gemma4Eagle3Model"],
            "draft_num_hidden_layers": 1,
            "num_target_layers": self.spec.num_layers,
            "step_loss_decay": config.step_decay,
            "target_layer_ids": list(self.target_layer_ids),
            "ttt_length": self.num_draft_tokens,
        }
        sizes = layer_fields(self.spec, "qwen3", num_layers=1) if is_qwen3 else gemma4_fields(self.spec, num_layers=1)
        return Serving(sizes | own, {**self.state_dict(), **frozen_copies(self)})

    def _gguf(self) -> Serving:
        """llama.cpp's `eagle3`: three layers, no norm but its own."""
        config, num_fused = self.config, len(self.target_layer_ids)
        for wrong, what, need in (
            (num_fused != 3, f"{num_fused} fused layers", "needs model.num_fused_layers=3"),
            (config.qk_norm, "model.qk_norm=true", "has no such norms; train with false"),
            (config.fc_norm, "model.fc_norm=true", "has no such norms; train with false"),
            (config.norm_output, "model.norm_output=true", "feeds back what stands before the norm; train with false"),
        ):
            if wrong:
                raise refusal(Engine.gguf, what, f"llama.cpp {need}")
        flags = {"norm_before_residual": config.norm_before_residual, "norm_before_fc": config.norm_before_fc}
        return pair_layer_file(self.spec, self.target_layer_ids, self.engine_tensors(always_head=False), flags)


def check_options(config: Eagle3Config, spec: TargetSpec) -> None:
    """Raises ValueError naming the option, its value and its limits."""
    if config.num_draft_tokens < 1:
        raise ValueError(f"model.num_draft_tokens must be at least 1, got {config.num_draft_tokens}")
    if not 0 < config.step_decay <= 1:
        raise ValueError(f"model.step_decay must be in (0, 1], got {config.step_decay}")
    check_terms(config.loss)
    if config.loss.cross_entropy:
        raise ValueError("model.loss.cross_entropy is for block drafters; EAGLE-3 learns model.loss.soft_cross_entropy")
    if config.norm_before_fc and config.fc_norm:
        raise ValueError("model.norm_before_fc=true and model.fc_norm=true exclude each other: choose one")
    size = config.draft_vocab_size
    if size is not None and not len(spec.eos_token_ids) < size <= spec.vocab_size:
        raise ValueError(
            f"model.draft_vocab_size must be null or more than the {len(spec.eos_token_ids)} stop tokens and at most "
            f"the target's {spec.vocab_size}, got {size}"
        )
    if config.sampled_vocabulary is not None and (config.own_head or size is not None):
        raise ValueError("model.sampled_vocabulary needs model.own_head=false and model.draft_vocab_size=null")
    check_sampled_vocabulary(config.sampled_vocabulary)
