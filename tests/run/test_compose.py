"""compose.yaml, the Dockerfile and the broker's file: complete, and of one mind with the code."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from bus.server import ServerConfig, find_server
from bus.subjects import MAX_PUBLIC_BYTES
from run.cluster import GroupPlace, Member, parse_actors
from schemas.message import Role

ROOT = Path(__file__).parent.parent.parent
COMPOSE = (ROOT / "compose.yaml").read_text()
RANKS = ("decode-0", "decode-1")
NATS_CONF = ROOT / "run" / "clusters" / "nats.conf"


def services() -> dict[str, str]:
    """The text of each service, by name."""
    text = COMPOSE.partition("\nservices:\n")[2].partition("\nvolumes:\n")[0]
    parts = re.split(r"^  ([a-z0-9-]+):.*$", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_role_is_in_one_service_with_a_health_check_of_all_its_actors() -> None:
    roles: list[str] = []
    for name, text in services().items():
        if name in ("nats", "lgtm", *RANKS):
            continue
        run = re.search(r"command: \[node, ([^\]]+?)(?:, --[^\]]*)?\]", text)
        check = re.search(r"test: \[CMD, shoal, health, ([^\]]+)\]", text)
        assert run and check and run[1] == check[1]
        members = [Member.parse(member.replace("/-", "/host")) for member in run[1].split(", ")]
        assert members[0].role == name
        roles += [member.role for member in members]
    assert sorted(roles) == sorted(Role)


def test_the_group_is_ranks_of_one_group_that_meet_at_the_first_one() -> None:
    for rank, name in enumerate(RANKS):
        run = re.search(r"command: \[node, ([^,]+), (.*)\]", services()[name])
        assert run and "profiles: [group]" in services()[name]
        options = run[2].replace('"', "").replace("d-0,d-1", "d-0+d-1").split(", ")
        named = dict(zip(options[::2], options[1::2], strict=True))
        ranks = named["--ranks"].replace("+", ",")
        place = GroupPlace.parse(parse_actors((run[1],)), ranks, int(named["--redundant"]), 1)
        assert place == GroupPlace(("d-0", "d-1"), rank, 2)


def test_who_reads_and_writes_blocks_sees_the_store() -> None:
    mounts = {name: re.findall(r"- (store:\S+)", text) for name, text in services().items()}
    assert {name for name, mount in mounts.items() if mount == ["store:/store"]} == {"writer", "kvstore"}
    assert {name for name, mount in mounts.items() if mount == ["store:/store:ro"]} == {"prefill"}
    assert "SHOAL_STORE: /store" in COMPOSE and "-o 10001 -g 10001 -m 700 /store" in (ROOT / "Dockerfile").read_text()


def test_everything_is_published_on_loopback_only_and_stops_in_its_own_time() -> None:
    ports = re.findall(r"^      - (\S+:\d+)$", COMPOSE, flags=re.MULTILINE)
    assert len(ports) == 3 and all(port.startswith("127.0.0.1:") for port in ports)
    assert COMPOSE.count("init: true") == COMPOSE.count("stop_grace_period: 75s") == 3  # nodes, nats, lgtm
    assert "profiles: [telemetry]" in services()["lgtm"]


def test_the_brokers_file_is_valid_and_has_the_rules_of_our_own(tmp_path: Path) -> None:
    text = NATS_CONF.read_text()
    ours = ServerConfig.write(tmp_path, port=0, tenants={"acme": "$ACME_PASSWORD"})
    rules = re.compile(r"permissions: \{(.*?)\}\}\}", flags=re.DOTALL)
    expected = rules.findall(ours.text().replace(ours.clients[0].inbox_prefix, "_INBOX.client"))
    found = rules.findall(text.replace("#", ""))  # that of a tenant is an example
    assert ["".join(rule.split()) for rule in found] == ["".join(rule.split()) for rule in expected]
    assert f"max_payload: {MAX_PUBLIC_BYTES}\n" in text
    environment = {**os.environ, "SHOAL_NATS_PASSWORD": "internal", "SHOAL_CLIENT_PASSWORD": "client"}
    done = subprocess.run([find_server(), "-t", "-c", NATS_CONF], env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_variable_of_the_brokers_file_is_handed_to_it() -> None:
    lines = [line for line in NATS_CONF.read_text().splitlines() if not line.strip().startswith("#")]
    named = {name for line in lines for name in re.findall(r"\$([A-Z][A-Z_]+)", line)} - {"SRV"}  # a subject
    handed = set(re.findall(r"^      ([A-Z_]+): ", services()["nats"], flags=re.MULTILINE))
    assert named == handed and len(named) == 2
