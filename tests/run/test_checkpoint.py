"""The bundled checkpoint is what the code makes, but for its values; it loads, it generates, its tokenizer fits."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from pathlib import Path
from typing import Any

import deepseek_recipe
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from kernels.config import ModelConfig
from kernels.engine import Admission, Chunk, Sampling
from kernels.local import LocalEngine
from kernels.tensors import DTYPES, model_tensors, stored
from run import tiny
from run.checkpoint import DEFAULT_SEED, inspect, make
from run.settings import DEFAULT_MODEL
from tests.untrained import untrained


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json"))


def test_the_command_makes_what_is_shipped_but_for_values() -> None:
    """Trained weights have the names, shapes and types of untrained ones, and the same configuration."""
    made = untrained()
    assert (made / "config.json").read_bytes() == (DEFAULT_MODEL / "config.json").read_bytes()
    card, shipped_card = (json.loads((folder / "shoal.json").read_text()) for folder in (made, DEFAULT_MODEL))
    shipped_card.pop("confidence_temperatures", None)  # of trained drafts
    assert card == shipped_card
    # How a tokenizer is written down is its library's choice; what it says is ours.
    ours, shipped = (json.loads((folder / "tokenizer.json").read_text()) for folder in (made, DEFAULT_MODEL))
    for key in ("model", "added_tokens", "pre_tokenizer", "normalizer"):
        assert ours[key] == shipped[key], key
    forms = [
        {name: (tensor.dtype, tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
        for folder in (made, DEFAULT_MODEL)
    ]
    assert forms[0] == forms[1]


def test_a_seed_fixes_the_weights_and_another_changes_them(tmp_path: Path) -> None:
    make(tmp_path, DEFAULT_SEED)
    assert (tmp_path / "model.safetensors").read_bytes() == (untrained() / "model.safetensors").read_bytes()
    drawn = [next(tiny.tensors(json.loads((DEFAULT_MODEL / "config.json").read_text()), seed)) for seed in (1, 2)]
    assert drawn[0][0] == drawn[1][0] and not torch.equal(drawn[0][1], drawn[1][1])


def test_it_is_small_and_has_every_role(capsys: pytest.CaptureFixture[str]) -> None:
    assert sum(path.stat().st_size for path in DEFAULT_MODEL.iterdir()) < 6e6
    config = ModelConfig.from_folder(DEFAULT_MODEL)
    assert {(role.mode, role.ratio) for role in config.layers} == {
        ("window", 0),
        ("full", 2),
        ("reuse", 2),
        ("full", 1),
        ("reindex", 1),
        ("reuse", 1),
    }
    assert (config.sliding_window, config.max_position_embeddings) == (128, 8192)
    assert len(config.engram_layer_ids) == 2
    assert inspect(DEFAULT_MODEL) == 0
    printed = capsys.readouterr().out
    assert "852 tensors" in printed
    assert "layer 6: reindex" in printed
    assert "layers 8-10: draft" in printed
    assert "No problem found." in printed


def test_the_index_of_the_real_model_is_checked_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(Path(__file__).parents[1] / "data" / "real_config.json", tmp_path / "config.json")
    tensors = model_tensors(ModelConfig.from_folder(tmp_path))
    names = [part.name for tensor in tensors for part in stored(tensor, DTYPES[tensor.format][0])]
    index = {"metadata": {"total_size": 510_286_023_000}, "weight_map": dict.fromkeys(names, "model-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert inspect(tmp_path) == 0
    printed = capsys.readouterr().out
    for said in ("96,085 tensors", "Checked: names only", "763,205,315,794", "510,286,023,000", "No problem found."):
        assert said in printed
    assert "The index says" not in printed

    del index["weight_map"]["layers.30.ffn.experts.100.w3.scale"]
    index["metadata"]["total_size"] = 7
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert inspect(tmp_path) == 1
    printed = capsys.readouterr().out
    assert "index.json: layers.30.ffn.experts.100.w3.scale is missing" in printed
    assert "Problems: 1" in printed and "The index says 7 bytes" in printed


def test_inspect_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(DEFAULT_MODEL, json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["checked"], told["tensors"], told["problems"]) == ("names, shapes, types", 852, [])
    experts = next(row for row in told["roles"] if (row["part"], row["role"]) == ("backbone", "routed experts"))
    assert (experts["tensors"], experts["dtypes"]) == (2 * 3 * 8 * 8, ["F8_E8M0", "I8"])
    assert told["bytes"] == sum(row["bytes"] for row in told["roles"])
    assert told["parameters"] == sum(row["parameters"] for row in told["roles"])

    shutil.copy(DEFAULT_MODEL / "config.json", tmp_path)
    left_out = ("mtp.", "layers.3.ffn.experts.2.")
    tensors = load_file(DEFAULT_MODEL / "model.safetensors").items()
    save_file({k: v for k, v in tensors if not k.startswith(left_out)}, tmp_path / "model.safetensors")
    assert inspect(tmp_path, json=True) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["left_out"] == ["drafts"]
    assert len(told["problems"]) == 6
    assert told["problems"][0] == {
        "file": str(tmp_path / "model.safetensors"),
        "what": "layers.3.ffn.experts.2.w1.weight is missing",
    }


def test_values_are_read_when_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(DEFAULT_MODEL / "config.json", tmp_path)
    tensors = load_file(DEFAULT_MODEL / "model.safetensors")
    bad = ("layers.0.attn.wkv.scale", "layers.2.engram.embed.weight", "vision.norm.weight")
    tensors[bad[0]].view(torch.uint8)[1, 2] = 0xFF
    tensors[bad[1]].view(torch.uint8)[7, 3] = 0x7F
    tensors[bad[2]][5] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    assert inspect(tmp_path) == 0  # headers alone
    assert "Values were not read: give --values." in capsys.readouterr().out
    assert inspect(tmp_path, values=True, json=True) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["checked"] == "names, shapes, types, values"
    assert sorted(problem["what"] for problem in told["problems"]) == [
        f"{name} is not a number at {place}" for name, place in zip(bad, ("[1, 2]", "[7, 3]", "[5]"), strict=True)
    ]
    assert {problem["file"] for problem in told["problems"]} == {str(tmp_path / "model.safetensors")}
    assert inspect(DEFAULT_MODEL, values=True) == 0
    assert "No problem found, in values either." in capsys.readouterr().out


def test_values_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(DEFAULT_MODEL / "config.json", tmp_path)
    index = {"weight_map": dict.fromkeys(load_file(DEFAULT_MODEL / "model.safetensors"), "model-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert inspect(tmp_path, values=True) == 1
    assert "index.json: none of its files is there" in capsys.readouterr().out


def test_inspecting_without_files_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(DEFAULT_MODEL / "config.json", tmp_path)
    assert inspect(tmp_path) == 1
    printed = capsys.readouterr().out
    assert "Checked: nothing" in printed and "model.safetensors: not found" in printed
    assert "852" in printed  # what there should be


def test_inspecting_what_is_no_checkpoint_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"config\.json: not found"):
        inspect(tmp_path)
    with pytest.raises(SystemExit, match=r"Not a directory: .*README\.md"):
        inspect(DEFAULT_MODEL.parents[2] / "README.md")


def test_ids_agree(tokenizer: Tokenizer) -> None:
    config = json.loads((DEFAULT_MODEL / "config.json").read_text())
    spelling = {
        "bos_token_id": "<｜begin▁of▁sentence｜>",
        "eos_token_id": "<｜end▁of▁sentence｜>",
        "pad_token_id": "<｜▁pad▁｜>",
        "image_token_id": "<｜image｜>",
    }
    assert {key: tokenizer.id_to_token(config[key]) for key in spelling} == spelling
    assert [config[key] for key in list(spelling)[:3]] == [0, 1, 2]
    assert tokenizer.get_vocab_size() == config["text_config"]["vocab_size"]


def test_the_official_library_finds_all_its_tokens(tokenizer: Tokenizer) -> None:
    special = deepseek_recipe.SpecialTokens()
    kinds = [kind for name, kind in vars(deepseek_recipe.SpecialToken).items() if name[0].isupper()]
    assert len(kinds) == 18
    for kind in kinds:
        spelling = special.token(kind)
        assert tokenizer.token_to_id(spelling) is not None, spelling
        assert len(tokenizer.encode(spelling, add_special_tokens=False).ids) == 1


def render(*messages: dict[str, Any], **fields: Any) -> list[int]:
    official = deepseek_recipe.Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json"))
    body = {"model": "DeepSeek-V4.1-Flash", "messages": list(messages), "thinking": {"type": "disabled"}, **fields}
    request = deepseek_recipe.ChatCompletionRequest(body).convert(deepseek_recipe.ConversionOptions())
    ids: list[int] = deepseek_recipe.DeepseekV41Encoding().with_tokenizer(official).encode(request.conversation)
    return ids


def test_a_conversation_encodes(tokenizer: Tokenizer) -> None:
    ids = render({"role": "system", "content": "You are helpful."}, {"role": "user", "content": "Hello"})
    text = "<｜begin▁of▁sentence｜><｜System｜>You are helpful.<｜User｜>Hello<｜Assistant｜></think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert len(ids) < 16


@pytest.mark.parametrize(
    "text", ["<｜User｜>", "</think>", "<｜end▁of▁sentence｜>", "｜DSML｜", "<｜image｜>", "<|EOT|>"]
)
def test_control_strings_in_user_text_are_plain(tokenizer: Tokenizer, text: str) -> None:
    ids = render({"role": "user", "content": text})
    template, inner = ids[:2] + ids[-2:], ids[2:-2]
    names = ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "</think>"]
    assert [tokenizer.id_to_token(token) for token in template] == names
    assert len(inner) > 1
    assert tokenizer.token_to_id(text) not in inner
    assert tokenizer.decode(inner) == text


def test_every_byte_string_round_trips(tokenizer: Tokenizer) -> None:
    chance = random.Random(5)
    samples = ["", " ", "\n\n \t", "a\x00b", "e\u0301 ﬁ ＡＢ", "🦀👩\u200d👩\u200d👧", "0123456789" * 3]
    ranges = (range(0xD800), range(0x10000, 0x110000))
    samples += ["".join(chr(chance.choice(chance.choice(ranges))) for _ in range(30)) for _ in range(50)]
    for text in samples:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    # Each of the 256 bytes has a token of its own, so text that no merge knows is spelt in bytes.
    assert all(tokenizer.token_to_id(byte) is not None for byte in ByteLevel.alphabet())


@pytest.mark.parametrize("name", ["bundled", "untrained"])
def test_it_generates(tokenizer: Tokenizer, name: str) -> None:
    async def main() -> list[int]:
        engine = LocalEngine(DEFAULT_MODEL if name == "bundled" else untrained(), num_slots=1, max_step_tokens=512)
        await engine.start()
        prompt = np.array(render({"role": "user", "content": "Hello, how are you?"}), dtype=np.uint32)
        assert engine.admit("r", 200, Sampling(0.0, 1.0, 0)) is Admission.OK
        await engine.prefill([Chunk("r", prompt)])
        output: list[int] = []
        while len(output) < 60 and engine.info.eos_token not in output:
            output += (await engine.decode(["r"]))[0]
        await engine.close()
        return output

    output = asyncio.run(main())
    assert output and all(token < tokenizer.get_vocab_size() for token in output)
    if name == "untrained":  # but not stuck: it says different things, none of them a control token but the end
        assert len(set(output)) > 20
        assert all(token < tokenizer.token_to_id("<｜System｜>") for token in output)
