"""What eval.py measures: a drafter from a folder, or a baseline by name."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from eval.calibrate import load_scaling
from eval.schedule import Scaling
from models.base import Drafter, Proposer
from models.checkpoint import check_target, load_drafter
from models.drafter_files import CONFIG, download, fingerprint, looks_like_hub_name, resolve_folder
from models.files import read_json, sha256_file, sha256_text
from models.independent import FirstLayersDrafter, IndependentDrafter
from models.ngram import NgramDrafter
from models.published import known_architecture
from models.spec import TargetSpec
from models.target import Target, TargetConfig, TargetIdentity, dtype_of, load_spec, load_target, load_tokenizer

NGRAM_DRAFT_TOKENS = 7
INDEPENDENT_DRAFT_TOKENS = 4
FIRST_LAYERS = "first_layers:"


@dataclass(frozen=True)
class Subject:
    """A drafter (None = vanilla decoding) and what names it in reports and in kept passes."""

    name: str
    drafter: Proposer | None
    slot_layout: str | None
    fingerprint: str
    folder: Path | None = None  # of a drafter
    scaling: Scaling | None = None  # of its confidences, where calibrated

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Target layers whose output it is fed."""
        return self.drafter.target_layer_ids if isinstance(self.drafter, Drafter) else ()

    def bind(self, target: Target) -> None:
        """Lend a drafter what it takes from the target: embedding and head, or its first layers."""
        if isinstance(self.drafter, Drafter):
            self.drafter.bind(target.embedding, target.head)
        elif isinstance(self.drafter, FirstLayersDrafter):
            self.drafter.bind(target)


VANILLA = Subject("vanilla", None, None, "vanilla")


def ngram(num_draft_tokens: int = NGRAM_DRAFT_TOKENS) -> Subject:
    return Subject("ngram", NgramDrafter(num_draft_tokens), None, f"ngram{num_draft_tokens}")


def load_subject(
    draft: str, config: TargetConfig, identity: TargetIdentity, device: torch.device, *, allow_pickle: bool = False
) -> Subject:
    """`vanilla`, `ngram`, `first_layers:N` of the target, a drafter that `load_drafter` knows or a causal LM with the
    target's tokenizer, either by folder or Hugging Face name. Raises ValueError on another target's drafter."""
    if draft == "vanilla":
        return VANILLA
    if draft == "ngram":
        return ngram()
    if draft.startswith(FIRST_LAYERS):
        return own_first_layers(draft, load_spec(config))
    if is_language_model(draft):
        return independent(draft, config, device)
    folder = resolve_folder(draft, allow_pickle=allow_pickle)
    loading = {"dtype": dtype_of(config.dtype), "target": load_spec(config)}
    drafter = load_drafter(folder, **loading, allow_pickle=allow_pickle).drafter.to(device)
    check_target(folder, drafter, config, identity)
    name = type(drafter).__name__.lower()
    layout = None if drafter.slot_layout is None else str(drafter.slot_layout)
    scaling = load_scaling(folder, drafter.num_draft_tokens)
    return Subject(name, drafter, layout, fingerprint(folder, allow_pickle=allow_pickle), folder, scaling)


def told_apart(subjects: Sequence[Subject]) -> list[Subject]:
    """With the run's name, and where that is not enough the folder's, in names that several have."""
    found = list(subjects)
    for added in (_run_name, lambda folder: folder.name):
        names = [subject.name for subject in found]
        found = [
            s if names.count(s.name) == 1 or s.folder is None else replace(s, name=f"{s.name} {added(s.folder)}")
            for s in found
        ]
    return found


def _run_name(folder: Path) -> str:
    """Of outputs/NAME/checkpoints/step_00000000; of another folder its own."""
    parts = folder.resolve().parts
    return parts[parts.index("checkpoints") - 1] if "checkpoints" in parts[1:] else parts[-1]


def is_language_model(draft: str) -> bool:
    """Whether the config of a folder or of a name on the hub is a causal LM's and no drafter's."""
    folder = download(draft, [CONFIG], "draft") if looks_like_hub_name(draft) else Path(draft)
    if not (folder / CONFIG).is_file():
        return False
    found = read_json(folder / CONFIG)
    names = found.get("architectures") or [""]
    return "format_version" not in found and names[0].endswith("ForCausalLM") and known_architecture(found) is None


def own_first_layers(draft: str, spec: TargetSpec) -> Subject:
    """Of `draft` as in FIRST_LAYERS; raises ValueError unless the number is one of the target's layers but the last."""
    number = draft.removeprefix(FIRST_LAYERS)
    if not number.isdecimal():
        raise ValueError(f"draft={draft}: a number of layers must stand behind the colon, as in first_layers:8")
    drafter = FirstLayersDrafter(int(number), INDEPENDENT_DRAFT_TOKENS, spec)
    return Subject(f"first {int(number)} layers", drafter, None, sha256_text(draft))


def independent(path: str, config: TargetConfig, device: torch.device) -> Subject:
    """Raises ValueError where its tokenizer is another than the target's."""
    own = replace(config, name=path, path=path, layer_ids=(), package=None, gguf_file=None)
    vocabularies = [load_tokenizer(one).get_vocab() for one in (own, config)]
    if vocabularies[0] != vocabularies[1]:
        raise ValueError(f"draft={path} has another tokenizer than target={config.name}: its tokens mean other text")
    model = load_target(own, device, layer_ids=())
    drafter = IndependentDrafter(model, INDEPENDENT_DRAFT_TOKENS, load_spec(config).vocab_size)
    weights = sorted(Path(path).glob("*.safetensors"))
    return Subject("independent", drafter, None, sha256_text("\n".join(sha256_file(file) for file in weights) or path))
