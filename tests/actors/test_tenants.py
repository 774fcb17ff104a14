"""The tenants file: what it says, and how it says what is wrong with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.gateway.keys import Keys, KeysError
from actors.rules.tenants import Tenant, Tenants, TenantsError, is_id_of, new_id
from schemas.api import Protocol

FILE = """
[tenants.acme]
keys = ["sk-acme-1", "sk-acme-2"]
nats_password = "a-long-secret"
requests_per_minute = 600
tokens_per_minute = 2_000_000

[tenants.lab]
keys = ["sk-lab"]
cache = "acme"

[tenants.twin]
cache = "acme"
"""


def test_what_a_file_says() -> None:
    tenants = Tenants.parse(FILE, "t.toml")
    assert tenants.get("acme") == Tenant("acme", ("sk-acme-1", "sk-acme-2"), "a-long-secret", "", 600, 2_000_000)
    assert [tenant.name for tenant in tenants] == ["acme", "lab", "twin"]
    assert tenants.get("acme").is_limited and not tenants.get("lab").is_limited
    assert tenants.get("stranger") == Tenant("stranger") and not tenants.get("public").is_limited


def test_caches_meet_only_where_both_say_so() -> None:
    tenants = Tenants.parse(FILE, "t.toml")
    assert tenants.cache("lab") == tenants.cache("twin")
    others = ["acme", "public", "group:acme", "tenant:lab"]
    assert len({tenants.cache(name) for name in ["lab", *others]}) == 5, "nobody slips in by its name"
    assert Tenants().cache("lab") != tenants.cache("lab")


def test_nothing_that_prints_shows_a_secret() -> None:
    tenants = Tenants.parse(FILE, "t.toml")
    assert not re.search("sk-|secret", f"{tenants!r} {list(tenants)!r} {tenants.get('acme')}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tenants.a", r"t\.toml: not TOML \(at end of document"),
        ('[tenants.a]\nkeys = ["SECRET"', r"t\.toml: not TOML \(at"),
        ('[tenants.a]\nkeys = ["SECRET" "SECRET"]', r"t\.toml: not TOML \(at"),
        ("[tenant.a]", r"t\.toml: unknown key 'tenant'; .*\[tenants\.NAME\]"),
        ("tenants = 3", r"t\.toml: tenants must be tables"),
        ("[tenants]\na = 3", r"t\.toml: tenants\.a: must be a table"),
        ('[tenants."a b"]', r"tenants: 'a b': a name has"),
        ('[tenants."a\\nb"]', r"tenants: 'a\\nb': a name has"),
        ('[tenants."a.b"]', r"tenants: 'a\.b': a name has"),
        ("[tenants.messages]", r"tenants: 'messages': a name .* not one of a protocol"),
        ("[tenants.a]\nkey = 1", r"tenants\.a: unknown key 'key'; choose from keys, nats_password"),
        ('[tenants.a]\nkeys = "SECRET"', r"tenants\.a: keys must be of type list, not str"),
        ('[tenants.a]\nkeys = ["ok", "SEC RET"]', r"tenants\.a: keys: number 2 is not a string"),
        ('[tenants.a]\nkeys = [""]', r"tenants\.a: keys: number 1 is not a string"),
        ('[tenants.a]\nkeys = ["SÉCRET"]', r"tenants\.a: keys: number 1 is not a string"),
        ("[tenants.a]\nkeys = [3]", r"tenants\.a: keys: number 1 is not a string"),
        ('[tenants.a]\nnats_password = ""', r"tenants\.a: nats_password is not a string"),
        ('[tenants.a]\nnats_password = "SECRET\\"}"', r"tenants\.a: nats_password is not a string"),
        ('[tenants.a]\nnats_password = "SECRET\\n"', r"tenants\.a: nats_password is not a string"),
        ('[tenants.internal]\nnats_password = "SECRET"', r"tenants\.internal: nats_password: a user 'internal' there"),
        ('[tenants.client-1]\nnats_password = "SECRET"', r"tenants\.client-1: nats_password: a user"),
        ('[tenants.a]\ncache = ""', r"tenants\.a: cache: a group has"),
        ("[tenants.a]\nrequests_per_minute = -1", r"tenants\.a: requests_per_minute must be 0 \(no limit\) or more"),
        ("[tenants.a]\ntokens_per_minute = 1.5", r"tenants\.a: tokens_per_minute must be of type int, not float"),
        ("[tenants.a]\ntokens_per_minute = true", r"tenants\.a: tokens_per_minute must be of type int, not bool"),
        ('[tenants.a]\nkeys = ["SECRET"]\n[tenants.b]\nkeys = ["SECRET"]', r"tenants\.b: keys: one .* is also a's"),
    ],
)
def test_what_is_wrong_is_one_line_without_secrets(text: str, said: str) -> None:
    with pytest.raises(TenantsError, match=said) as caught:
        Tenants.parse(text, "t.toml")
    assert not re.search("S.C ?RET|\n", str(caught.value))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(TenantsError, match=r"no\.toml: No such file"):
        Tenants.from_file(tmp_path / "no.toml")
    (tmp_path / "t.toml").write_bytes(b"\xff")
    with pytest.raises(TenantsError, match=r"t\.toml: not UTF-8"):
        Tenants.from_file(tmp_path / "t.toml")


def test_keys_are_those_of_the_file_and_of_the_environment() -> None:
    tenants = Tenants.parse(FILE, "t.toml")
    keys = Keys.parse("mine=acme,sk-lab=lab,plain", tenants)
    for key, tenant in {"sk-acme-2": "acme", "mine": "acme", "sk-lab": "lab", "plain": "public", "no": None}.items():
        assert keys.tenant({"x-api-key": key}) == keys.tenant({"authorization": f"Bearer {key}"}) == tenant
    with pytest.raises(KeysError, match="entry 2: this key of tenant public is also lab's") as caught:
        Keys.parse("x, sk-lab", tenants)
    assert "sk-" not in str(caught.value)
    assert Keys.parse("", tenants) and not Keys.parse("", Tenants())


@given(st.text(min_size=1), st.text(min_size=1), st.integers(0, 2**128 - 1))
def test_an_id_is_its_tenants(one: str, other: str, bits: int) -> None:
    id = new_id(one, bits)
    assert re.fullmatch("[0-9a-f]{32}", id) and is_id_of(one, id)
    assert is_id_of(other, id) is (one == other)
    assert not is_id_of(one, id[1:]) and not is_id_of(one, "x" + id[1:]) and not is_id_of(one, id.upper() + "0")


def test_a_protocol_is_no_tenant() -> None:
    for protocol in Protocol:
        with pytest.raises(TenantsError):
            Tenants.parse(f"[tenants.{protocol}]", "t.toml")
