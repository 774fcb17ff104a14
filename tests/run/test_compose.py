"""compose.yaml, the Dockerfile and the broker's file: complete, and of one mind with the code."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from bus.server import ServerConfig, find_server
from bus.subjects import MAX_PUBLIC_BYTES
from run.cluster import Member
from schemas.message import Role

ROOT = Path(__file__).parent.parent.parent
COMPOSE = (ROOT / "compose.yaml").read_text()
NATS_CONF = ROOT / "run" / "clusters" / "nats.conf"


def services() -> dict[str, str]:
    """The text of each service, by name."""
    _, _, text = COMPOSE.partition("\nservices:\n")
    parts = re.split(r"^  ([a-z-]+):.*$", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_role_is_a_service_with_a_health_check_of_its_own() -> None:
    found = services()
    assert set(found) == {*Role, "nats", "lgtm"}
    for role in Role:
        run = re.search(r"command: \[node, ([^,\]]+)", found[role])
        check = re.search(r"test: \[CMD, shoal, health, ([^\]]+)\]", found[role])
        assert run and check and run[1] == check[1]
        assert Member.parse(run[1].replace("/-", "/host")).role == role


def test_everything_is_published_on_loopback_only_and_stops_in_its_own_time() -> None:
    ports = re.findall(r"^      - (\S+:\d+)$", COMPOSE, flags=re.MULTILINE)
    assert len(ports) == 3 and all(port.startswith("127.0.0.1:") for port in ports)
    assert COMPOSE.count("init: true") == COMPOSE.count("stop_grace_period: 75s") == 3  # nodes, nats, lgtm
    assert "profiles: [telemetry]" in services()["lgtm"]


def test_the_brokers_file_is_valid_and_has_the_rules_of_our_own(tmp_path: Path) -> None:
    text = NATS_CONF.read_text()
    ours = ServerConfig.write(tmp_path, port=0)
    rules = re.compile(r"permissions: \{(.*?)\}\}\}", flags=re.DOTALL)
    expected = rules.findall(ours.text().replace(ours.clients[0].inbox_prefix, "_INBOX.client"))
    assert ["".join(rule.split()) for rule in rules.findall(text)] == ["".join(rule.split()) for rule in expected]
    assert f"max_payload: {MAX_PUBLIC_BYTES}\n" in text
    environment = {**os.environ, "SHOAL_NATS_PASSWORD": "internal", "SHOAL_CLIENT_PASSWORD": "client"}
    done = subprocess.run([find_server(), "-t", "-c", NATS_CONF], env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
