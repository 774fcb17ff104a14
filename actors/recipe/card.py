"""The model card: what the edge must know of a checkpoint folder, without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.keys import parse
from kernels.shards import read_shards


class CardError(ValueError):
    """The folder is not a checkpoint: a file is missing, not JSON, or lacks a key. The message names both."""


@dataclass(frozen=True)
class ModelCard:
    """What clients may ask of a model.

    `names[0]` is the served name, the rest are aliases. `context_tokens` bounds prompt plus output.
    `thinking_default` holds where a request does not say. `has_vision` is True only if the weights hold a vision tower;
    then `image_token` is the id that stands at every position of an image.
    """

    names: tuple[str, ...]
    context_tokens: int
    tokenizer_path: Path
    eos_token: int
    thinking_default: bool = True
    has_vision: bool = False
    image_token: int = -1
    created_s: int = 0

    @property
    def name(self) -> str:
        """The served name."""
        return self.names[0]

    @property
    def capabilities(self) -> dict[str, Any]:
        """What the Anthropic SDK calls so, with all its keys: what it does not find it would stumble over."""
        yes, no = {"supported": True}, {"supported": False}
        nothing = ("batch", "citations", "code_execution", "context_management", "pdf_input")
        efforts = dict.fromkeys(("low", "medium", "high", "xhigh", "max"), yes)
        thinking = {**dict.fromkeys(("adaptive", "disabled", "enabled"), yes), "between_tools": no}
        return {
            **dict.fromkeys(nothing, no),
            "image_input": {"supported": self.has_vision},
            "structured_outputs": yes,
            "effort": {**yes, **efforts},
            "thinking": {**yes, "types": thinking},
            "server_tools": {**no, "code_execution": no, "web_search": no},
        }

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelCard:
        """Read config.json, shoal.json (optional) and the tensor names. Raises CardError.

        shoal.json may hold `model`, `aliases`, `thinking_default` and `context_tokens` (which can only lower the
        limit of config.json). Without it the served name is the folder's.
        """
        path = Path(folder)
        if not path.is_dir():
            raise CardError(f"{folder} is not a folder: download the checkpoint, and name the folder with config.json")
        config = _read(path / "config.json")
        ours = _read(path / "shoal.json") if (path / "shoal.json").exists() else {}
        tokenizer = path / "tokenizer.json"
        if not tokenizer.is_file():
            raise CardError(f"{tokenizer}: not found")
        text = config.get("text_config", config)
        if not isinstance(text, dict):
            raise CardError(f"{path / 'config.json'}: text_config is not an object")
        context = _integer(text, "max_position_embeddings", path / "config.json")
        name = str(ours.get("model", path.resolve().name))
        has_vision = any(name.startswith("vision.") for name in read_shards(path).files)
        aliases = ours.get("aliases", [])
        if not isinstance(aliases, list):
            raise CardError(f"{path / 'shoal.json'}: aliases must be a list")
        if "context_tokens" in ours:
            context = min(context, _integer(ours, "context_tokens", path / "shoal.json"))
        return cls(
            names=tuple(dict.fromkeys([name, *map(str, aliases)])),
            context_tokens=context,
            tokenizer_path=tokenizer,
            eos_token=_integer(config if "eos_token_id" in config else text, "eos_token_id", path / "config.json"),
            thinking_default=bool(ours.get("thinking_default", True)),
            has_vision=has_vision,
            image_token=_integer(config, "image_token_id", path / "config.json") if has_vision else -1,
            created_s=int((path / "config.json").stat().st_mtime),
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        value = parse(path.read_bytes())
    except FileNotFoundError:
        raise CardError(f"{path}: not found") from None
    except OSError as error:
        raise CardError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CardError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CardError(f"{path}: not a JSON object")
    return value


def _integer(values: dict[str, Any], key: str, path: Path) -> int:
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CardError(f"{path}: {key} is missing or not a number")
    return value
