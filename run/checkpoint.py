"""`shoal checkpoint`: make the bundled tiny checkpoint, or look into one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cyclopts

VOCAB_SIZE = 1024
DEFAULT_SEED = 1

app = cyclopts.App(name="checkpoint", help="Make the bundled tiny checkpoint, or look into one.")


@app.command(name="make")
def make_command(folder: Path, *, seed: int = DEFAULT_SEED) -> None:
    """Write shoal-tiny into FOLDER: official layout, all layer roles, untrained weights drawn from the seed."""
    make(folder, seed)
    inspect(folder)


@app.command
def inspect(folder: Path, *, values: bool = False, json: bool = False) -> int:
    """Print what a checkpoint folder holds, and what is wrong with it; status 1 if anything is.

    Read are config.json, the index and the headers of all files: names, shapes, types and sizes of all tensors are held
    against config.json. Values are read with --values only, tokenizer.json and shoal.json not at all. With config.json
    and model.safetensors.index.json alone, names are checked.

    Parameters
    ----------
    folder
        Where config.json is, and model.safetensors or an index with its shards.
    values
        Read all values too, once, and report tensors with one that is not a number. Skipped are packed FP4 codes, all
        of which are numbers. Takes as long as reading the files does.
    json
        Print one JSON object instead of a table, all problems included.
    """
    from kernels.config import ConfigError
    from run.inspection import print_inspection

    try:
        return print_inspection(folder, values=values, as_json=json)
    except (ConfigError, OSError) as error:
        raise SystemExit(str(error)) from None


def make(folder: Path, seed: int) -> None:
    """Write config.json, model.safetensors, tokenizer.json and shoal.json; the same seed gives the same bytes."""
    from kernels.storage import save
    from kernels.vocabulary import compress_vocabulary
    from run.tiny import tensors, tiny_config
    from run.tokenizer import train

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train(VOCAB_SIZE)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = tiny_config(tokenizer, max(compress_vocabulary(folder / "tokenizer.json")) + 1)
    _write(folder / "config.json", config)
    _write(folder / "shoal.json", {"model": "shoal-tiny", "thinking_default": False})
    save(folder, tensors(config, seed))


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
