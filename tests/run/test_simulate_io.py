"""What `shoal simulate` reads, makes up and says; the simulation itself is not here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest

from actors.rules.chain import chain, root
from run.settings import SettingsError
from run.simulate import command, plots
from run.simulate.agents import AGENTS_32K, MILLION, agents, chat, chat_and_million
from run.simulate.arrival import Arrival, tokens_of
from run.simulate.options import Options, Outcome, Progress, Result
from run.simulate.report import report
from run.simulate.traces import AZURE_HEADER, TraceError, read_trace


def line(**changes: Any) -> str:
    return json.dumps({"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [0, 7], **changes})


def write(path: Path, *lines: str) -> Path:
    path.write_text("\r\n".join(lines))
    return path


class TestArrival:
    def test_chains_meet_exactly_where_ids_do(self) -> None:
        def keys(*blocks: int) -> list[bytes]:
            return list(chain(root("any"), Arrival(0.0, 128 * len(blocks), 1, blocks).tokens()))

        first, second = keys(1, 2, 3), keys(1, 2, 4)
        assert first[:2] == second[:2] and first[2] != second[2]
        assert not set(keys(9, 2, 3)) & set(first), "the same block behind another prefix"

    def test_the_last_block_is_short_and_begins_alike(self) -> None:
        short, long = Arrival(0.0, 130, 1, (5, 6)).tokens(), Arrival(0.0, 256, 1, (5, 6)).tokens()
        assert len(short) == 130 and (short == long[:130]).all() and long.max() < 1 << 17

    def test_blocks_of_different_ids_differ(self) -> None:
        random = Random(0)
        ids = [*range(3000), *(random.getrandbits(64) for _ in range(3000))]
        assert len({block.tobytes() for block in tokens_of(ids).reshape(-1, 128)}) == len(ids)

    @pytest.mark.parametrize(("num_tokens", "num_output", "blocks"), [(0, 1, ()), (128, 0, (1,)), (129, 1, (1,))])
    def test_what_does_not_fit_together_is_refused(
        self, num_tokens: int, num_output: int, blocks: tuple[int, ...]
    ) -> None:
        with pytest.raises(ValueError, match="blocks"):
            Arrival(0.0, num_tokens, num_output, blocks)


class TestTraces:
    def test_mooncake(self, tmp_path: Path) -> None:
        path = write(tmp_path / "trace", line(), line(timestamp=4500, output_length=0), line(), "")
        told: list[float] = []
        read = read_trace(path, 2, told.append)
        assert read[0] == Arrival(0.0, 700, 5, (0, 1, 2, 3, 28, 29)) and told[-1] == 1.0
        assert (len(read), read[1].at_s, read[1].num_output) == (2, 1.5, 1)

    def test_azure(self, tmp_path: Path) -> None:
        rows = ("2023-11-16 18:17:04.9799600,200,3", "2023-11-16 18:17:03.4799600,10,4")
        read = read_trace(write(tmp_path / "trace", AZURE_HEADER, *rows))
        assert read == [Arrival(0.0, 10, 4, (2,)), Arrival(1.5, 200, 3, (0, 1))], "nothing is shared; in order of time"

    @pytest.mark.parametrize(
        ("lines", "error"),
        [
            ([], "the file is empty"),
            (["when,what"], ":1: neither a trace of Mooncake's"),
            ([line(), "{"], ":2: Expecting property name"),
            ([line(), "7"], ":2: not a JSON object"),
            ([line(input_length=0)], ":1: input_length must be a whole number, at least 1"),
            ([line(timestamp=None)], ":1: timestamp must be"),
            ([line(hash_ids=[1])], ":1: 1 hash_ids do not fit an input_length of 700"),
            ([line(hash_ids=[1, -1])], ":1: hash_ids must be"),
            ([AZURE_HEADER], "there is no request in it"),
            ([AZURE_HEADER, "2023-11-16 18:17:03,1"], ":2: 2 fields"),
            ([AZURE_HEADER, "2023-11-16 18:17:03,1,1", "then,1,1"], ":3: Invalid isoformat"),
            ([AZURE_HEADER, "2023-11-16 18:17:03,0,1"], ":2: 0 ContextTokens"),
        ],
    )
    def test_what_is_no_trace_says_where(self, lines: list[str], error: str, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match=f"trace.*{error}"):
            read_trace(write(tmp_path / "trace", *lines))


class TestMadeUp:
    def test_agents_come_back_with_the_whole_conversation(self) -> None:
        made = agents(3000, 0.8e9, habits=AGENTS_32K)
        assert made == agents(3000, 0.8e9, habits=AGENTS_32K) != agents(3000, 0.8e9, 1, AGENTS_32K)
        assert all(before.at_s <= after.at_s for before, after in zip(made, made[1:], strict=False))
        seen: set[int] = set()
        last: dict[int, Arrival] = {}
        num_hit = 0
        for one in made:
            if before := last.get(one.blocks[0]):
                assert one.num_tokens > before.num_tokens + before.num_output and one.at_s > before.at_s
                assert one.blocks[: len(before.blocks)] == before.blocks
            last[one.blocks[0]] = one
            num_hit += sum(block in seen for block in one.blocks)
            seen.update(one.blocks[: one.num_tokens // 128])
        assert num_hit / sum(len(one.blocks) for one in made) > 0.93
        assert max(one.num_tokens + one.num_output for one in made) <= AGENTS_32K.max_context

    def test_a_million_tokens_amid_the_same_chat(self) -> None:
        both = chat_and_million(200, 1e9)
        assert [one for one in both if one.tenant == "chat"] == chat(200, 1e9)
        assert [one.num_tokens for one in both if one.tenant != "chat"] == [MILLION]
        assert both[0].at_s < max(both, key=lambda one: one.num_tokens).at_s < both[-1].at_s


def outcome(ttft_s: float, failed: str | None = None, tpot_s: float | None = 0.008) -> Outcome:
    return Outcome(ttft_s, ttft_s, 0.5, tpot_s, 100, 400, failed)


RESULT = Result([outcome(1.0), outcome(3.0, tpot_s=None), outcome(0.0, "overloaded")], [1.0, 3.0], [2.0, 2.0], 8.0, 0.1)


class TestReport:
    def test_it_counts_what_was_answered_and_says_what_failed(self) -> None:
        found = report({"quota": RESULT}, 1.5)
        policy = found["policies"]["quota"]
        assert (found["requests"], found["wall_s"], policy["failed"]) == (3, 1.5, {"overloaded": 1})
        assert policy["ttft_ms"] == {"p50": 2000.0, "p90": 2800.0, "p99": 2980.0}
        assert (policy["slowdown"]["p50"], policy["queue_age_ms"]["p50"]) == (4.0, 1500.0)
        assert policy["tpot_ms"]["p99"] == 8.0
        assert (policy["busy_max_over_mean"], policy["busy_ratio"], policy["hit_ratio"]) == (1.5, 0.25, 0.25)

    def test_nothing_answered_is_no_number(self) -> None:
        found = report({"quota": Result([outcome(0.0, "overloaded")], [0.0], [0.0], 0.0, 0.0)}, 0.0)
        policy = json.loads(json.dumps(found))["policies"]["quota"]
        assert policy["ttft_ms"]["p99"] is policy["hit_ratio"] is policy["busy_max_over_mean"] is None


class Runs:
    """In the place of the simulation: what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[Arrival], Options]] = []

    def __call__(self, arrivals: list[Arrival], options: Options, progress: Progress) -> dict[str, Result]:
        self.asked.append((arrivals, options))
        for name in options.policies:
            progress(name, 1.0)
        return dict.fromkeys(options.policies, RESULT)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    runs = Runs()
    module = ModuleType("runner")
    module.__dict__["simulate"] = runs
    monkeypatch.setitem(sys.modules, "run.simulate.runner", module)
    return runs


class TestCommand:
    def test_a_trace_as_json(self, runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = write(tmp_path / "trace", line(), line(timestamp=5000))
        command.simulate(str(path), policies="quota, tokens", prefill=3, seed=4, json=True)
        assert list(json.loads(capsys.readouterr().out)["policies"]) == ["quota", "tokens"]
        assert runs.asked[0][1] == Options(("quota", "tokens"), 3, 16, 0.8, 4)
        command.simulate(str(path), speed=4.0)
        arrivals, options = runs.asked[1]
        assert (arrivals[1].at_s, options.load, len(options.policies)) == (0.5, None, 5)

    def test_a_workload_for_a_cluster_as_a_table_and_a_picture(
        self, runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        laptop = Path(command.__file__).parents[1] / "clusters" / "laptop.toml"
        picture = tmp_path / "plots.png"
        command.simulate("chat", policies="quota,tokens", cluster=laptop, requests=50, plot=picture)
        arrivals, options = runs.asked[0]
        assert (len(arrivals), options.num_prefill, options.num_decode, options.load) == (50, 1, 1, None)
        assert "50 requests on 1 + 1 replicas" in " ".join(capsys.readouterr().out.split())
        assert picture.read_bytes().startswith(b"\x89PNG")
        with pytest.raises(SettingsError, match="no/such"):
            command.simulate("chat", requests=5, plot=tmp_path / "no" / "such.png")

    def test_without_matplotlib_it_says_what_to_do(self, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(SettingsError, match=r"pip install -e '.\[plots\]'"):
            command.simulate("chat", plot=Path("any.png"))
        assert not runs.asked

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            ({"trace": "no-such"}, "no-such: neither a file nor one of agents-32k"),
            ({"policies": "quota,luck"}, "choose from quota, requests"),
            ({"policies": ","}, "choose from quota, requests"),
            ({"prefill": 0}, "at least one of each"),
            ({"load": 0.0}, "--load 0"),
            ({"requests": -1}, "may not be negative"),
            ({"trace": "chat", "speed": 2.0}, "for a trace only"),
            ({"speed": 2.0, "load": 0.5}, "without --load"),
        ],
    )
    def test_mistakes(self, runs: Runs, arguments: dict[str, Any], error: str) -> None:
        with pytest.raises(SettingsError, match=error):
            command.simulate(**arguments)
        assert not runs.asked


def test_longest_waits_by_time() -> None:
    begins, worst = plots.worst_ages(RESULT)
    assert (begins[0], worst) == (1.0, [0.5, 2.5])
