"""The benchmark of cached blocks runs and reports what others parse. Its times are not asserted: machines are noisy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from run.bench import kv, kv_disk, kv_index, kv_store
from run.settings import SettingsError

PROMPTS = ([0, 1], [0, 2])
"""Blocks of 512 tokens: eight of ours each, of which the second prompt has four from the first."""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    lengths = {"input_length": 1024, "output_length": 1}
    rows = [{"timestamp": i, **lengths, "hash_ids": ids} for i, ids in enumerate(PROMPTS)]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_it_prints_one_object_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, trace: Path
) -> None:
    for module, name, value in (
        (kv_disk, "NUM_ROUNDS", 1),
        (kv_disk, "NUM_SLABS", 2),
        (kv_disk, "SLAB_BYTES", 1 << 20),
        (kv_store, "NUM_SINGLES", 3),
        (kv_index, "NUM_TOKENS", 64 * 128),
        (kv_index, "NUM_ROUNDS", 1),
        (kv_index, "NUM_KNOWN", 1000),
    ):
        monkeypatch.setattr(module, name, value)
    folder = tmp_path / "store"
    kv.bench_kv(json=True, folder=folder, trace=trace)
    found = json.loads(capsys.readouterr().out)
    assert tuple(found)[: len(kv.KEYS)] == kv.KEYS
    assert all(found[key] > 0 for key in kv.KEYS)
    assert found["layout_bytes_per_token"] == 890
    assert found["layout_bytes_per_token"] < found["disk_bytes_per_token"]
    assert (found["trace_blocks"], found["hit_ratio"], found["hit_ratio_optimum"]) == (16, 0.25, 0.25)
    assert found["cached_token_ratio"] == 0.25
    assert found["hit_ratio_bounded"] == {
        **{"0.01": 0.0625, "0.1": 0.0625, "0.5": 0.25, "1.0": 0.25}  # of 12 blocks 1, 1, 6 and 12
    }
    assert list(folder.iterdir()) == []
    kv.bench_kv(folder=folder, block_bytes=890, trace=tmp_path / "none")
    told = capsys.readouterr().out
    assert "890 bytes" in told and "no trace" in told


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="^--folder=.*/file: "):
        kv.bench_kv(folder=tmp_path / "file")


def test_a_store_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHOAL_STORE", str(tmp_path / "file"))
    with pytest.raises(SettingsError, match="^SHOAL_STORE=.*/file: "):
        kv.bench_kv()
