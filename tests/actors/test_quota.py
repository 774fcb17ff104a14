"""Buckets that fill evenly, and who may draw from them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.quota.quota import FORGET_NS, MINUTE_NS, Bucket, Ledger
from actors.rules.tenants import Tenant, Tenants

S = 10**9


def ledger(requests: int = 0, tokens: int = 0) -> Ledger:
    tenants = [Tenant(name, requests_per_minute=requests, tokens_per_minute=tokens) for name in ("a", "b")]
    return Ledger(Tenants({tenant.name: tenant for tenant in tenants}), 0)


@dataclass(frozen=True)
class Step:
    """What happens after some time: a request with so many prompt tokens, or the end of one with as many output."""

    pause_ns: int
    num_tokens: int
    is_end: bool


steps = st.lists(
    st.builds(Step, st.integers(0, 3 * MINUTE_NS) | st.integers(0, S), st.integers(1, 300), st.booleans()), max_size=40
)


@given(steps, st.integers(1, 200), st.integers(0, 20))
def test_no_more_than_the_rate_and_one_bucket_and_every_wait_is_true(
    steps: list[Step], tokens: int, requests: int
) -> None:
    """Whenever one is let in: of what was charged since any time, and its prompt up to a bucket, no more than a bucket
    and what came in since. Debts of before only make it less.
    """
    quota, now_ns, admitted = ledger(requests, tokens), 0, list[str]()
    charges: list[tuple[int, int, int]] = []  # when, how many requests, how many tokens
    for number, step in enumerate(steps):
        now_ns += step.pause_ns
        if step.is_end:
            if admitted:
                quota.end("a", admitted.pop(), step.num_tokens, now_ns)
                charges.append((now_ns, 0, step.num_tokens))
            continue
        wait_ns, what = quota.admit("a", str(number), step.num_tokens, now_ns)
        if wait_ns:
            assert what == "tokens" or (what == "requests" and requests)
            assert quota.admit("a", "early", step.num_tokens, now_ns + wait_ns - 1) != (0, "")
            now_ns += wait_ns
            assert quota.admit("a", str(number), step.num_tokens, now_ns) == (0, "")
        for first, (since_ns, _, _) in enumerate(charges):
            here = MINUTE_NS + now_ns - since_ns  # in minutes: a bucket, and what came in since
            num_tokens = sum(charge[2] for charge in charges[first:]) + min(step.num_tokens, tokens)
            assert num_tokens * MINUTE_NS <= tokens * here
            assert not requests or (sum(charge[1] for charge in charges[first:]) + 1) * MINUTE_NS <= requests * here
        charges.append((now_ns, 1, step.num_tokens))
        admitted.append(str(number))


def test_a_bucket_is_a_minutes_worth_and_fills_evenly() -> None:
    bucket = Bucket(60, 0)
    bucket.take(60, 0)
    assert bucket.wait_ns(1, 0) == S
    assert bucket.wait_ns(60, 0) == 60 * S
    assert bucket.wait_ns(30, 10 * S) == 20 * S
    assert bucket.wait_ns(60, 10**6 * S) == 0, "and holds no more"
    bucket.take(61, 10**6 * S)
    assert bucket.wait_ns(1, 10**6 * S) == 2 * S, "a debt is filled up first"


def test_a_prompt_larger_than_the_bucket_is_let_in_when_that_is_full() -> None:
    quota = ledger(tokens=100)
    assert quota.admit("a", "1", 1, 0) == (0, "")
    assert quota.admit("a", "2", 1000, 0) == (MINUTE_NS // 100, "tokens")
    assert quota.admit("a", "2", 1000, MINUTE_NS) == (0, "")
    assert quota.admit("a", "3", 1, MINUTE_NS) == (9 * MINUTE_NS + MINUTE_NS // 100, "tokens"), "it is paid for"


def test_a_request_asked_for_twice_is_charged_once() -> None:
    quota = ledger(requests=2, tokens=100)
    for _ in range(3):
        assert quota.admit("a", "1", 60, 0) == (0, "")
    assert quota.admit("a", "2", 40, 0) == (0, "")
    assert quota.admit("a", "3", 1, 0) == (MINUTE_NS // 2, "requests")


def test_output_is_charged_once_when_it_is_known_and_never_for_strangers() -> None:
    quota = ledger(tokens=100)
    assert quota.admit("a", "1", 100, 0) == (0, "")
    quota.end("a", "2", 1000, 0)
    quota.end("b", "1", 1000, 0)
    quota.end("nobody", "1", 1000, 0)
    for _ in range(3):
        quota.end("a", "1", 50, 0)
    assert quota.admit("a", "3", 1, 0) == (51 * MINUTE_NS // 100, "tokens")
    assert quota.admit("b", "3", 100, 0) == (0, ""), "tenants have buckets of their own"


def test_who_has_no_limits_is_let_in() -> None:
    quota = Ledger(Tenants({"a": Tenant("a")}), 0)
    for tenant in ("a", "public"):
        assert quota.admit(tenant, "1", 10**9, 0) == (0, "")
    assert len(quota) == 0


def test_requests_that_nobody_ends_are_forgotten() -> None:
    quota = ledger(tokens=100)
    quota.admit("a", "1", 1, 0)
    quota.admit("a", "2", 1, FORGET_NS)
    assert len(quota) == 2
    quota.admit("a", "3", 1, FORGET_NS + 1)
    assert len(quota) == 2


@pytest.mark.parametrize(("requests", "tokens", "what"), [(1, 1000, "requests"), (1000, 1, "tokens"), (1, 1, "tokens")])
def test_the_longer_wait_is_said(requests: int, tokens: int, what: str) -> None:
    quota = ledger(requests, tokens)
    assert quota.admit("a", "1", 5, 0) == (0, "")
    assert quota.admit("a", "2", 5, 0)[1] == what
