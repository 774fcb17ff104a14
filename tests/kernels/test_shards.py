"""Files that are no checkpoint, or half of one: each mistake is one line that names the file and the tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernels.audit import audit
from kernels.config import ModelConfig
from kernels.shards import INDEX, SINGLE, read_shards
from tests.kernels.conftest import GOLDEN


def write(path: Path, header: Any, num_bytes: int = 8) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_bytes))


def entry(*offsets: Any, **changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [1], "data_offsets": list(offsets), **changes}


def problems(folder: Path) -> list[str]:
    return [str(problem) for problem in read_shards(folder).problems]


@pytest.mark.parametrize(
    ("header", "num_bytes", "named"),
    [
        ([], 0, "the header is not an object"),
        (b"[" * 100_000, 0, "nested too deep"),
        (b'{"a":' * 100_000, 0, "nested too deep"),
        ({"a": 1}, 0, "a: dtype, shape and data_offsets are not given"),
        ({"a\n\x1b[31m": entry(0, 4)}, 4, "'a\\n\\x1b[31m' is not a name"),
        ({"\ud800": entry(0, 4)}, 4, "'\\ud800' is not a name"),
        ({"a": entry(0, 4, dtype=["F32"])}, 4, "a: dtype ['F32'] is not a name"),
        ({"a": entry(0, 4, shape=[1.0])}, 4, "a: shape [1.0] is not a list of sizes"),
        ({"a": entry(0, 4, shape=[-1])}, 4, "a: shape [-1] is not a list of sizes"),
        ({"a": entry(0, 4, shape=None)}, 4, "a: shape None is not a list of sizes"),
        ({"a": entry(0.0, 4.0)}, 4, "a: data_offsets [0.0, 4.0] are not a start and an end"),
        ({"a": entry(0)}, 4, "a: data_offsets [0] are not a start and an end"),
        ({"a": entry(4, 0)}, 4, "a: data_offsets [4, 0] are not a start and an end"),
        ({"a": entry(0, True)}, 4, "a: data_offsets [0, True] are not a start and an end"),
        ({"a": entry(0, 4), "b": entry(0, 4)}, 4, "b begins at byte 0 of the values, expected at 4"),
        ({"a": entry(0, 4), "b": entry(2, 6)}, 6, "b begins at byte 2 of the values, expected at 4"),
        ({"a": entry(0, 4), "b": entry(8, 12)}, 12, "b begins at byte 8 of the values, expected at 4"),
        ({"a": entry(4, 8)}, 8, "a begins at byte 4 of the values, expected at 0"),
        ({"a": entry(0, 4)}, 7, "3 bytes follow the last tensor, a"),
    ],
)
def test_a_header_that_does_not_hold(tmp_path: Path, header: Any, num_bytes: int, named: str) -> None:
    write(tmp_path / SINGLE, header, num_bytes)
    assert problems(tmp_path) == [f"{tmp_path / SINGLE}: not a safetensors file: {named}"]


def test_entries_in_any_order_and_without_values_are_no_problem(tmp_path: Path) -> None:
    write(tmp_path / SINGLE, {"b": entry(4, 8), "none": entry(4, 4, shape=[0]), "a": entry(0, 4)}, 8)
    assert problems(tmp_path) == []
    assert set(read_shards(tmp_path).entries) == {"a", "b", "none"}


@pytest.mark.parametrize(
    ("index", "named"),
    [
        (b'{"weight_map":' * 100_000, "no weight_map of names to files: nested too deep"),
        ({"weight_map": 3}, "no weight_map of names to files"),
        ([], "no weight_map of names to files"),
        ({"weight_map": {"norm.weight": 5}}, "norm.weight: 5 is not the name of a file in the folder"),
        ({"weight_map": {"norm.weight": ["a"]}}, "norm.weight: ['a'] is not the name of a file in the folder"),
        ({"weight_map": {"norm.weight": ""}}, "norm.weight: '' is not the name of a file in the folder"),
        ({"weight_map": {"norm.weight": ".."}}, "norm.weight: '..' is not the name of a file in the folder"),
        ({"weight_map": {"norm.weight": "a/b"}}, "norm.weight: 'a/b' is not the name of a file in the folder"),
        ({"metadata": {"total_size": "7"}, "weight_map": {"a": "b"}}, "metadata.total_size '7' is not a number"),
        ({"metadata": {"total_size": 1.5}, "weight_map": {"a": "b"}}, "metadata.total_size 1.5 is not a number"),
        ({"weight_map": {"norm\n": "a"}}, "'norm\\n' is not a name"),
        ({"weight_map": {"norm.weight": "\ud800"}}, "norm.weight: '\\ud800' is not the name of a file in the folder"),
        ({"metadata": [7], "weight_map": {"a": "b"}}, "metadata is not an object"),
    ],
)
def test_an_index_that_does_not_hold(tmp_path: Path, index: Any, named: str) -> None:
    (tmp_path / INDEX).write_bytes(index if isinstance(index, bytes) else json.dumps(index).encode())
    (found,) = problems(tmp_path)
    assert found.startswith(f"{tmp_path / INDEX}: ") and named in found
    assert "Error" not in found


def test_a_file_name_that_no_file_can_have(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "x" * 300}}))
    assert read_shards(tmp_path).index_only


@pytest.mark.parametrize("index", [False, True])
def test_a_checkpoint_without_tensors_is_none(tmp_path: Path, index: bool) -> None:
    if index:
        (tmp_path / INDEX).write_text('{"weight_map": {}}')
    else:
        write(tmp_path / SINGLE, {"__metadata__": {}}, 0)
    path = tmp_path / (INDEX if index else SINGLE)
    found = audit(ModelConfig.from_folder(GOLDEN / "mini"), read_shards(tmp_path))
    assert [str(problem) for problem in found] == [f"{path}: no tensor is in it"]
