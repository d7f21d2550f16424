"""From Hydra nodes to frozen dataclasses: YAML holds the values, dataclasses hold the types."""

from typing import Any, TypeVar

from hydra.core.config_store import ConfigStore
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

T = TypeVar("T")


def register(name: str, dataclass: type) -> None:
    """Make `dataclass` the schema that conf/<script>.yaml names first in its defaults list.

    Such dataclasses are not frozen: OmegaConf would make their nodes read-only, and overrides impossible.
    """
    ConfigStore.instance().store(name, dataclass)


def to_dataclass(dataclass: type[T], node: Any, *, section: str) -> T:
    """Merge `node` into the dataclass and build it.

    Raises ValueError naming the section and the key on an unknown key, a wrong type or a missing value.
    """
    values = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else dict(node)
    assert isinstance(values, dict)
    values = {key: value for key, value in values.items() if key != "_target_"}
    try:
        built = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(dataclass), values))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"config {section}{'.' + str(key) if key else ''}: {reason}") from error
    assert isinstance(built, dataclass)
    return built


def typed(node: DictConfig, *, section: str) -> Any:
    """The dataclass that `node._target_` names, filled from the rest of the node (see `to_dataclass`)."""
    if "_target_" not in node:
        raise ValueError(f"config {section} has no _target_: it must name the dataclass that types it")
    return to_dataclass(get_class(node["_target_"]), node, section=section)
