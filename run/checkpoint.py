"""`shoal checkpoint`: make the bundled tiny checkpoint, or look into one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cyclopts

VOCAB_SIZE = 2048
DEFAULT_SEED = 1

app = cyclopts.App(name="checkpoint", help="Make the bundled tiny checkpoint, or look into one.")


@app.command(name="make")
def make_command(folder: Path, *, seed: int = DEFAULT_SEED) -> None:
    """Write shoal-tiny into FOLDER: official layout, all layer roles, untrained weights drawn from the seed."""
    make(folder, seed)
    inspect(folder)


@app.command
def inspect(folder: Path) -> None:
    """Print what a checkpoint folder holds."""
    from kernels.config import ConfigError, ModelConfig

    try:
        config = ModelConfig.from_folder(folder)
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    tensors = {name: entry for path in sorted(folder.glob("*.safetensors")) for name, entry in _header(path).items()}
    num_bytes = sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in tensors.values())
    print(f"{folder}: {len(tensors)} tensors, {num_bytes:,} bytes")
    print(
        f"vocabulary {config.vocab_size}, hidden {config.hidden_size}, layers {config.num_hidden_layers}, "
        f"experts {config.n_routed_experts} (of which {config.num_experts_per_tok} per token), "
        f"window {config.sliding_window}, context {config.max_position_embeddings}"
    )
    for role in config.layers:
        owners = "" if role.ratio == 0 else f", KV of layer {role.kv_owner}, index of layer {role.index_owner}"
        engram = "" if role.engram is None else ", Engram"
        print(f"layer {role.layer}: {role.mode}, ratio {role.ratio}{owners}{engram}")


def make(folder: Path, seed: int) -> None:
    """Write config.json, model.safetensors, tokenizer.json and shoal.json; the same seed gives the same bytes."""
    import safetensors.torch

    from kernels.vocabulary import compress_vocabulary
    from run.tiny import tensors, tiny_config
    from run.tokenizer import train

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train(VOCAB_SIZE)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = tiny_config(tokenizer, max(compress_vocabulary(folder / "tokenizer.json")) + 1)
    _write(folder / "config.json", config)
    _write(folder / "shoal.json", {"model": "shoal-tiny", "thinking_default": False})
    (folder / "model.safetensors").write_bytes(safetensors.torch.save(tensors(config, seed)))


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def _header(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file by name: eight bytes of length, then JSON."""
    with path.open("rb") as file:
        entries: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    entries.pop("__metadata__", None)
    return entries
