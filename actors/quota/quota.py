"""What tenants have left: two buckets each, of requests and of tokens. Integers all through, so waits are exact."""

from __future__ import annotations

from actors.rules.tenants import Tenant, Tenants

MINUTE_NS = 60 * 10**9
FORGET_NS = 24 * 60 * MINUTE_NS
"""An admitted request of which nothing was heard for so long is not waited for: its recipe was lost."""


class Bucket:
    """Holds a minute's allowance, and is full at first. Times are nanoseconds of a clock that does not go back.

    `_level` counts in 1 / MINUTE_NS of a unit: a nanosecond adds `per_minute` to it.
    """

    def __init__(self, per_minute: int, now_ns: int) -> None:
        self._per_minute = per_minute
        self._size = per_minute * MINUTE_NS
        self._level = self._size
        self._at_ns = now_ns

    def wait_ns(self, num: int, now_ns: int) -> int:
        """How long until `num` units are here; for more than it holds, until it is full. 0: they are."""
        self._fill(now_ns)
        missing = min(num * MINUTE_NS, self._size) - self._level
        return max(0, -(-missing // self._per_minute))

    def take(self, num: int, now_ns: int) -> None:
        """Take `num` units, here or not: what is missing is a debt, which is filled up first."""
        self._fill(now_ns)
        self._level -= num * MINUTE_NS

    def _fill(self, now_ns: int) -> None:
        self._level = min(self._size, self._level + (now_ns - self._at_ns) * self._per_minute)
        self._at_ns = now_ns


class Buckets:
    """Those of one tenant; a limit that is 0 has none."""

    def __init__(self, tenant: Tenant, now_ns: int) -> None:
        self._requests = Bucket(tenant.requests_per_minute, now_ns) if tenant.requests_per_minute else None
        self._tokens = Bucket(tenant.tokens_per_minute, now_ns) if tenant.tokens_per_minute else None

    def wait(self, num_tokens: int, now_ns: int) -> tuple[int, str]:
        """How long a request with such a prompt has to wait, in ns, and for what; 0 if it need not."""
        waits = [(0, "")]
        if self._requests:
            waits.append((self._requests.wait_ns(1, now_ns), "requests"))
        if self._tokens:
            waits.append((self._tokens.wait_ns(num_tokens, now_ns), "tokens"))
        return max(waits)

    def take(self, num_requests: int, num_tokens: int, now_ns: int) -> None:
        """Charge for them."""
        if self._requests:
            self._requests.take(num_requests, now_ns)
        if self._tokens:
            self._tokens.take(num_tokens, now_ns)


class Ledger:
    """All tenants with limits, and the admitted requests that have not ended."""

    def __init__(self, tenants: Tenants, now_ns: int) -> None:
        self._buckets = {tenant.name: Buckets(tenant, now_ns) for tenant in tenants if tenant.is_limited}
        self._running: dict[tuple[str, str], int] = {}

    def __len__(self) -> int:
        return len(self._running)

    def admit(self, tenant: str, request_id: str, num_prompt_tokens: int, now_ns: int) -> tuple[int, str]:
        """Let a request in and charge for its prompt: (0, ""). Or how long it has to wait, in ns, and for what.

        After that wait it is let in, if nothing else was charged meanwhile. One that is in is not charged again.
        """
        buckets = self._buckets.get(tenant)
        if buckets is None or (tenant, request_id) in self._running:
            return 0, ""
        wait_ns, what = buckets.wait(num_prompt_tokens, now_ns)
        if wait_ns:
            return wait_ns, what
        buckets.take(1, num_prompt_tokens, now_ns)
        self._forget(now_ns)
        self._running[tenant, request_id] = now_ns
        return 0, ""

    def end(self, tenant: str, request_id: str, num_output_tokens: int, now_ns: int) -> None:
        """An admitted request has ended: charge for its output. Of one that is not known nothing is charged."""
        if self._running.pop((tenant, request_id), None) is not None:
            self._buckets[tenant].take(0, num_output_tokens, now_ns)

    def _forget(self, now_ns: int) -> None:
        while self._running and now_ns - self._running[first := next(iter(self._running))] > FORGET_NS:
            del self._running[first]
