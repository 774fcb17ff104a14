"""The cluster file: the default, and every way to get one wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.config import ModelConfig
from run.build import serving
from run.cluster import (
    DEFAULT_CLUSTER,
    ClusterError,
    GroupPlace,
    Member,
    ProcessSpec,
    check_experts,
    num_cores,
    parse_actors,
    read_cluster,
    without_vision,
)
from run.settings import Settings, SettingsError
from schemas.message import Role
from tests.actors.edge import IMAGE_TOKEN, make_card

GOOD = """
[[process]]
name = "front"
actors = ["prefill-balancer/pb0", "decode-balancer/db0", "entrypoint/e0", "recipe/r0", "gateway/g0"]

[[process]]
name = "prefill"
actors = ["prefill/p0"]

[[process]]
name = "decode"
actors = ["decode/d0"]
"""


def read(tmp_path: Path, text: str) -> tuple[ProcessSpec, ...]:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return read_cluster(path)


def test_the_default_is_three_processes_and_torch_is_in_two() -> None:
    specs = read_cluster(DEFAULT_CLUSTER)
    assert [spec.name for spec in specs] == ["decode", "prefill", "front"]
    assert {member.role for spec in specs for member in spec.members} == set(Role) - {Role.EXPERT_BALANCER}
    assert specs[1].num_threads == max(1, num_cores() // 2)


def test_threads_and_slots_can_be_set(tmp_path: Path) -> None:
    specs = read(tmp_path, GOOD + "threads = 7\nslots = 3\n")
    assert (specs[2].num_threads, specs[2].num_slots) == (7, 3)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[[process]", "not TOML"),
        ("", r"no \[\[process\]\]; write one"),
        ("title = 1\n" + GOOD, "unknown key 'title'"),
        (GOOD + "gpu = 1\n", "process 3: unknown key 'gpu'; choose from name, actors, threads, slots"),
        (GOOD + "threads = true\n", "process 3: threads must be of type int"),
        (GOOD + "slots = 0\n", r"process 3 \(decode\): slots must be at least 1"),
        (GOOD.replace('name = "front"\n', ""), "process 1: name is missing"),
        (GOOD.replace('"front"', '"the front"'), "process 1: name 'the front' may hold"),
        (GOOD.replace('name = "decode"', 'name = "front"'), "name 'front' is taken"),
        (GOOD.replace('"decode/d0"', "7"), r"process 3 \(decode\): actors must be strings"),
        (GOOD.replace("decode/d0", "decoder/d0"), r"process 3 \(decode\): actors: .*no role 'decoder'; choose from"),
        (GOOD.replace("decode/d0", "decode"), "write decode/ID"),
        (GOOD.replace("decode/d0", "decode/d.0"), "write decode/ID"),
        (GOOD.replace("decode/d0", "decode/all"), "write decode/ID"),
        (GOOD.replace("decode/d0", "prefill/p0"), "prefill/p0 is in prefill and in decode; rename"),
        (GOOD.replace('"recipe/r0",', ""), "there is no recipe; add"),
        (GOOD.replace("decode/d0", 'decode/d0", "vision/v0'), 'there is no vision-balancer; add "vision-balancer/ID"'),
        (GOOD.replace("decode/d0", 'decode/d0", "gateway/g1'), "gateway/g0 and gateway/g1 would share one HTTP port"),
        (GOOD + "ep = 0\n", r"process 3 \(decode\): ep must be at least 1, not 0"),
        (GOOD + f"ep = {10**20}\n", r"process 3 \(decode\): ep must be at most 1,024, not 10+"),
        (GOOD + "ep = 2\nredundant = -1\n", r"process 3 \(decode\): redundant must be at least 0, not -1"),
        (GOOD + "redundant = 1\n", r"process 3 \(decode\): redundant experts need a group; set ep to 2 or more"),
        (GOOD.replace("decode/d0", 'decode/d0", "decode/d1') + "ep = 2\n", "with ep, actors must be one"),
        (GOOD.replace('"prefill/p0"]', '"vision/v0"]\nep = 2'), "with ep, actors must be one prefill or decode actor"),
        (GOOD + 'ep = 2\n[[process]]\nname = "decode-1"\nactors = ["decode/x"]', "name 'decode-1' is taken"),
    ],
)
def test_errors_name_the_file_the_key_and_what_to_do(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(ClusterError, match=error) as raised:
        read(tmp_path, text)
    assert str(tmp_path / "cluster.toml") in str(raised.value)


def test_a_group_is_a_process_for_each_rank(tmp_path: Path) -> None:
    text = GOOD.replace('["prefill/p0"]', '["prefill/d0"]\nep = 2') + "ep = 3\nredundant = 2\nleast = 2\nslots = 5\n"
    front, *specs = read(tmp_path, text)
    assert front.group is None and front.unit == "front"
    assert [(spec.name, *map(str, spec.members)) for spec in specs] == [
        ("prefill-0", "prefill/d0-0"),
        ("prefill-1", "prefill/d0-1"),
        ("decode-0", "decode/d0-0"),
        ("decode-1", "decode/d0-1"),
        ("decode-2", "decode/d0-2"),
    ]
    ids = ("d0-0", "d0-1", "d0-2")
    assert [spec.group for spec in specs[2:]] == [GroupPlace(ids, rank, num_redundant=2, least=2) for rank in range(3)]
    assert [spec.unit for spec in specs] == ["group prefill/d0-0"] * 2 + ["group decode/d0-0"] * 3
    assert {spec.num_slots for spec in specs[2:]} == {5}
    assert {spec.num_threads for spec in specs} == {max(1, num_cores() // 5)}


def test_experts_that_do_not_go_to_the_ranks_are_refused_before_anything_starts(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(Settings.from_environment({}).model)  # 8 experts, 4 in draft stages
    check_experts(read(tmp_path, GOOD + "ep = 2\nredundant = 4\n"), config)
    error = r"group decode/d0-0: ep = 2, redundant = 5: mtp\.0 of SHOAL_MODEL: 4 experts"
    with pytest.raises(ClusterError, match=error):
        check_experts(read(tmp_path, GOOD + "ep = 2\nredundant = 5\n"), config)
    with pytest.raises(ClusterError, match="ep = 5, redundant = 0: mtp.0 of SHOAL_MODEL: 4 experts, so that some"):
        check_experts(read(tmp_path, GOOD + "ep = 5\n"), config)


def test_a_rank_on_the_command_line() -> None:
    one = parse_actors(("decode/b",))
    assert GroupPlace.parse(one, "", 0, 1) is None
    assert GroupPlace.parse(one, "a,b", 3, 2) == GroupPlace(("a", "b"), 1, 3, 2)
    for actors, ranks, redundant, least, error in (
        (one, "a,c", 0, 1, "--ranks a,c: give one prefill or decode actor, whose id is among them"),
        (parse_actors(("decode/b", "decode/a")), "a,b", 0, 1, "give one prefill or decode actor"),
        (parse_actors(("vision/b",)), "a,b", 0, 1, "give one prefill or decode actor"),
        (one, "b", 0, 1, "give two or more ids, with commas between and each once"),
        (one, "b,b", 0, 1, "give two or more ids"),
        (one, "b, a", 0, 1, "give two or more ids"),
        (one, "a,b", -1, 1, "--redundant -1: give 0 or more"),
        (one, "a,b", 0, 3, "--least 3: give 1 to 2, as there are so many ranks"),
        (one, "a,b", 0, 0, "--least 0: give 1 to 2"),
        (one, "", 0, 2, "--redundant and --least are of a group; give its --ranks, too"),
        (one, "", 2, 1, "--redundant and --least are of a group"),
    ):
        with pytest.raises(ClusterError, match=error):
            GroupPlace.parse(actors, ranks, redundant, least)


def test_a_missing_file_says_what_to_copy(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"none\.toml: not found; copy .*laptop\.toml"):
        read_cluster(tmp_path / "none.toml")


def test_members_are_written_as_role_and_id() -> None:
    assert Member.parse("prefill-balancer/pb0") == (Role.PREFILL_BALANCER, "pb0")
    assert str(Member(Role.DECODE, "d1")) == "decode/d1"


def test_without_a_vision_tower_nobody_looks(tmp_path: Path) -> None:
    specs = (*read_cluster(DEFAULT_CLUSTER), ProcessSpec("eyes", (Member(Role.VISION, "v1"),), num_threads=1))
    make_card(tmp_path)
    settings = Settings.from_environment({"SHOAL_MODEL": str(tmp_path)})
    kept = serving(specs, settings)
    assert [spec.name for spec in kept] == ["decode", "prefill", "front"]
    left_out = {Role.VISION, Role.VISION_BALANCER, Role.EXPERT_BALANCER}
    assert {member.role for spec in kept for member in spec.members} == set(Role) - left_out
    alone = (ProcessSpec("vision-balancer", (Member(Role.VISION_BALANCER, "vb0"),), num_threads=1),)
    assert serving(alone, settings) == ()
    make_card(tmp_path, image_token=IMAGE_TOKEN)
    assert serving(specs, settings) == specs
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SettingsError, match=r"SHOAL_MODEL: .*config\.json"):
        serving(specs, settings)


def test_a_cluster_needs_no_vision(tmp_path: Path) -> None:
    assert read(tmp_path, GOOD) == without_vision(read(tmp_path, GOOD))
