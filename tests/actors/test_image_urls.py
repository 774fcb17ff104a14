"""Images at URLs, from a server nearby: fetched for every client, and refused in words that say what to do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anthropic
import openai
import pytest

from actors.recipe import fetch as fetching
from actors.recipe.card import ModelCard
from actors.recipe.fetch import FETCH, Fetch
from schemas.api import Protocol
from schemas.failure import Code, Failure
from tests.actors.bodies import CHAT, GENERATING, MESSAGES, RESPONSES
from tests.actors.clients import sdks
from tests.actors.pictures import at, body_of, picture
from tests.actors.test_image_edge import chat, sight
from tests.conftest import Run

RED = picture("red")
NOBODY = "x" * 64 + ".invalid"  # no resolver needs to ask another about a part of 64 letters
NEARBY = Fetch(lambda address: address == "127.0.0.1")


class Site(BaseHTTPRequestHandler):
    """`/red` is an image, `/to/<url>` a redirect, `/<number>` a status, `/cut` ends early, `/long` is long."""

    asked: list[str]

    def do_GET(self) -> None:
        path = self.path[1:]
        self.asked.append(path)
        if path == "red":
            self._send(200, RED)
        elif path == "page":
            self._send(200, b"<html>")
        elif path.startswith("to/"):
            self._send(302, b"", {"Location": path[3:]})
        elif path == "cut":
            self._send(200, RED[:9], {"Content-Length": "100"})
        elif path == "long":
            self._send(200, bytes(10**6))
        else:
            self._send(int(path), b"")

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # the client has had enough


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Site, "asked", [], raising=False)
    with Server(("127.0.0.1", 0), Site) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def failure(fetch: Fetch, url: str) -> Failure:
    found = fetch(url)
    assert isinstance(found, Failure)
    assert "127.0.0" not in found.message
    return found


def test_what_is_there_comes_after_redirects_too(site: str) -> None:
    assert NEARBY(f"{site}/red") == NEARBY(f"{site}/to//to/{site}/red") == RED


def test_no_address_that_is_not_public_is_connected_to(site: str) -> None:
    """However it is spelled: the host is judged by what it resolves to."""
    port = site.rpartition(":")[2]
    hosts = ["127.0.0.1", "2130706433", "0177.0.0.1", "0x7f.1", "127.1", "0.0.0.0", "[::ffff:127.0.0.1]"]
    for host in [*hosts, "u:p@127.0.0.1", "①②⑦.0.0.1", "example.com@127.0.0.1", "127.0.0.1."]:
        refused = failure(FETCH, f"http://{host}:{port}/red")
        assert refused.code is Code.BAD_REQUEST and "not public" in refused.message
    for url in ("http://10.0.0.1/", "http://169.254.169.254/", "http://[::1]/", "http://[64:ff9b::a00:1]/"):
        assert failure(FETCH, url).code is Code.BAD_REQUEST
    assert Site.asked == []


def test_nor_by_a_redirect(site: str) -> None:
    inner = site.replace("127.0.0.1", "127.0.0.2")
    assert failure(NEARBY, f"{site}/to/{inner}/red").code is Code.BAD_REQUEST
    assert Site.asked == [f"to/{inner}/red"]
    assert failure(NEARBY, f"{site}/to/file:///etc/passwd").code is Code.BAD_REQUEST


def test_names_that_only_we_know_look_like_names_that_nobody_knows(site: str) -> None:
    port = site.rpartition(":")[2]
    known, unknown = failure(FETCH, f"http://localhost:{port}/red"), failure(FETCH, f"http://{NOBODY}/red")
    assert known == unknown and known.code is Code.IMAGE_UNREACHABLE
    assert failure(NEARBY, f"{site}/to/http://{NOBODY}/") == known
    never = Fetch(lambda address: False)
    assert failure(never, f"http://localhost:{port}/red") == known
    assert Site.asked == [f"to/http://{NOBODY}/"]


def test_a_rule_that_fails_lets_nothing_through(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.unraisablehook", lambda _: None)
    assert failure(Fetch(lambda address: bool(int(address))), f"{site}/red").code is Code.IMAGE_UNREACHABLE
    assert Site.asked == []


@pytest.mark.parametrize(
    ("path", "code", "words"),
    [
        ("404", Code.BAD_REQUEST, "correct the URL"),
        ("403", Code.BAD_REQUEST, "correct the URL"),
        ("503", Code.IMAGE_UNREACHABLE, "retry"),
        ("cut", Code.IMAGE_UNREACHABLE, "retry"),
        ("long", Code.BAD_REQUEST, "more than the 50000 bytes"),
        ("to//to//to//to//to//to//to//red", Code.IMAGE_UNREACHABLE, "retry"),
    ],
)
def test_failures_say_what_to_do(
    site: str, monkeypatch: pytest.MonkeyPatch, path: str, code: Code, words: str
) -> None:
    monkeypatch.setattr(fetching, "MAX_BYTES", 50_000)
    found = failure(NEARBY, f"{site}/{path}")
    assert found.code is code and words in found.message


def test_every_client_may_give_a_url(run_async: Run, sighted: ModelCard, site: str) -> None:
    async def main() -> None:
        async with sight(sighted, NEARBY) as system, sdks(system.edge) as (one, other):
            used = (await chat(one, "x", RED))[1]
            inline = await system.submitted()
            red = f"{site}/red"
            assert (await chat(one, "x", at(CHAT, red)))[1] == used
            submits = [await system.submitted()]
            await one.responses.create(**body_of(RESPONSES, "x", at(RESPONSES, red)))
            submits.append(await system.submitted())
            body = body_of(MESSAGES, "x", at(MESSAGES, red))
            assert (await other.messages.count_tokens(**body)).input_tokens == used
            await other.messages.create(**body, max_tokens=5)
            submits.append(await system.submitted())
            client = await system.edge.client()
            for protocol in GENERATING:
                await client.send(protocol, body_of(protocol, "x", at(protocol, red)))
                [answer] = await client.all()
                assert "error" not in answer or answer["error"] is None
                submits.append(await system.submitted())
            for submit in submits:
                assert submit.prompt == inline.prompt
                assert [image.digest for image in submit.images] == [inline.images[0].digest]
            assert len(Site.asked) == 7

    run_async(main())


def test_refusals_name_the_field(run_async: Run, sighted: ModelCard, site: str) -> None:
    async def main() -> None:
        async with sight(sighted, NEARBY) as system, sdks(system.edge) as (one, other):
            for path in ("page", "404", "to/http://10.0.0.1/"):
                url = f"{site}/{path}"
                with pytest.raises(openai.BadRequestError) as caught:
                    await chat(one, RED, "x", at(CHAT, f"{site}/red"), at(CHAT, url))
                assert caught.value.param == "messages[0].content[3].image_url"
                with pytest.raises(openai.BadRequestError) as caught:
                    await one.responses.create(**body_of(RESPONSES, at(RESPONSES, url)))
                assert caught.value.param == "input[0].content[0].image_url"
                body = body_of(MESSAGES, "x", at(MESSAGES, url))
                for asking in (other.messages.create(**body, max_tokens=5), other.messages.count_tokens(**body)):
                    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[1\]\.source"):
                        await asking
            with pytest.raises(openai.APIStatusError) as failed:
                await chat(one, at(CHAT, f"{site}/503"))
            assert (failed.value.status_code, failed.value.code) == (424, "image_unreachable")
            assert failed.value.response.headers["x-should-retry"] == "true"
            assert failed.value.param == "messages[0].content[0].image_url"
            client = await system.edge.client()
            await client.send(Protocol.COUNT_TOKENS, body_of(MESSAGES, at(MESSAGES, f"{site}/page")))
            [answer] = await client.all()
            assert answer["error"]["type"] == "invalid_request_error"
            await system.until_free()
            assert len(system.edge.recipe._open) == 0 and system.edge.recipe._intake.num_calls == 0
            assert not system.edge.recipe._fetches._held

    run_async(main())


def test_nobody_waits_for_a_server_that_hangs(run_async: Run, sighted: ModelCard) -> None:
    release = threading.Event()

    class Hanging(Fetch):
        def __call__(self, url: str) -> bytes | Failure:
            release.wait(30)
            return RED

    async def main() -> None:
        async with sight(sighted, Hanging()) as system:
            recipe, body = system.edge.recipe, body_of(CHAT, "x", at(CHAT, "http://x.org/"))
            client, other = await system.edge.client(), await system.edge.client()
            deadline = {"Shoal-Deadline-Ns": str(recipe.bus.seams.clock_ns() + 10**8)}
            await client.send(CHAT, body, deadline)
            assert (await client.all())[0]["error"]["code"] == "deadline_exceeded"
            await client.send(CHAT, body)
            async with asyncio.timeout(10):
                while recipe._fetches._running != {"public": 2}:
                    await asyncio.sleep(0)
            [request] = recipe._open
            await other.send(Protocol.CANCEL, {"id": request.id})
            assert (await other.all())[0]["cancelled"]
            assert (await client.all())[0]["error"]["code"] == "cancelled"

    try:
        run_async(main())
    finally:
        release.set()
