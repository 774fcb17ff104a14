"""`shoal up`: the root supervisor of a whole system on one machine."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape

from actors.gateway.keys import Keys
from bus.actor import LAST_S
from bus.server import ServerConfig, command, wait_ready
from run.banner import banner
from run.build import serving
from run.changes import Change, follow
from run.cluster import Member, ProcessSpec, read_cluster
from run.health import find_silent
from run.home import Client, Home, Ready, Running, write_private
from run.node import MISTAKE
from run.preflight import check, check_tenants, claim_port, clear
from run.settings import LOOPBACK, Settings, SettingsError
from run.store import Store, stores
from run.watch import Watch
from supervisors.processes import Backoff, Process, Program
from supervisors.strategy import GaveUp, Intensity
from supervisors.tasks import Child, Run, Stuck, Supervisor
from supervisors.tasks import Ready as OnReady

INTENSITY = Intensity(12, 60.0, is_each=True)
"""With the processes' own back-off: one that ends at once, again and again, is given up after about a minute; one that
takes longer than a second for it is tried every ten seconds. All may be killed."""

PROCESS_SHUTDOWN_S = 1.5
STACK_SHUTDOWN_S = 2.2
"""After this everything that is left is killed: the whole stack is gone within three seconds."""

ANSWER_TIMEOUT_S = 30.0

PORTS = 5
"""So many are tried, as others take the broker's between its choice and its start."""


class PortTaken(Exception):
    """Somebody else listens on the port that was free a moment ago. Nothing runs."""


class Stack:
    """The processes of a cluster beside their broker, as one supervised tree, and what it says on the terminal."""

    def __init__(
        self,
        specs: tuple[ProcessSpec, ...],
        settings: Settings,
        home: Home,
        console: Console,
        ready_file: Path,
        cluster: Path | None,
    ) -> None:
        self._specs, self._cluster = specs, cluster
        self._settings = settings
        self._home = home
        self._console = console
        self._ready_file = ready_file
        self._processes: dict[str, Process] = {}
        self._http = f"http://{LOOPBACK}:{settings.http_port}"
        users = {tenant.name: tenant.nats_password for tenant in settings.tenants() if tenant.nats_password}
        self._broker = None if settings.nats_url else ServerConfig.write(home.folder / "nats", tenants=users)
        self._nats_url = settings.nats_url if self._broker is None else self._broker.url(self._broker.internal)
        self._nats_place = f"nats://{self._nats_url.removeprefix('nats://').rpartition('@')[2]}"
        self._watch = Watch(self._nats_url, self._kill)
        self._models: list[str] = []
        self._is_up = False
        self._is_stopping = False

    async def run(self) -> int:
        """Run until SIGINT or SIGTERM; the exit status. A second signal kills everything at once. Raises PortTaken."""
        started_s = time.monotonic()
        children = [*self._broker_children(), Child("watch", self._watch.run), *self._nodes()]
        supervisor = self._root = Supervisor("shoal", children, intensity=INTENSITY, on_restart=self._on_restart)
        is_ready = asyncio.Event()
        task = asyncio.create_task(supervisor.run(is_ready.set), name="root")
        greeting = asyncio.create_task(self._greet(is_ready, started_s), name="greeting")
        greeting.add_done_callback(lambda done: task.cancel() if not done.cancelled() and done.exception() else None)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, task)
        try:
            await task
        except asyncio.CancelledError:
            if greeting.done() and not greeting.cancelled() and (error := greeting.exception()) is not None:
                self._console.print(f"[red]{escape(str(error))}[/]")
                return 1
            self._console.print("stopped")
            return 0
        except (GaveUp, Stuck) as error:
            self._kill_all()
            why = error.__context__ if isinstance(error, Stuck) else error  # it came of the end, and says nothing of it
            if not isinstance(why, GaveUp):
                raise
            if why.child == "broker" and self._broker and not self._is_up and not self._broker.is_free():
                raise PortTaken from None
            self._explain(why)
            return 1
        finally:
            greeting.cancel()
        return 0

    def _broker_children(self) -> list[Child]:
        config = self._broker
        if config is None:
            return []
        program = Program(
            "broker",
            command(config),
            log_path=self._home.log_path("broker"),
            probe=lambda: wait_ready(config),
            shutdown_s=PROCESS_SHUTDOWN_S,
        )
        return [self._child(program, self._nats_place)]

    def _nodes(self) -> list[Child]:
        """A child for each process, and one for each group, whose ranks start together: each waits for the others."""
        children: list[Child] = []
        for name, same in groupby(self._specs, lambda spec: spec.unit):
            nodes = [self._node(spec) for spec in same]
            if len(nodes) == 1:
                children += nodes
                continue
            ranks = Supervisor(name, nodes, intensity=INTENSITY, on_restart=self._on_restart, together=True)
            children.append(Child(name, ranks.run, shutdown_s=max(node.shutdown_s for node in nodes) + 0.5))
        return children

    def _node(self, spec: ProcessSpec) -> Child:
        members = [str(member) for member in spec.members]
        options = {"--name": spec.name, "--threads": spec.num_threads, "--slots": spec.num_slots}
        if (group := spec.group) is not None:
            options |= {"--ranks": ",".join(group.ids), "--redundant": group.num_redundant, "--least": group.least}
        program = Program(
            spec.name,
            [sys.executable, "-m", "run.cli", "node", *members, *(str(x) for pair in options.items() for x in pair)],
            members=members,
            environment={"SHOAL_NATS_URL": self._nats_url, "SHOAL_HTTP_PORT": str(self._settings.http_port)},
            log_path=self._home.log_path(spec.name),
            shutdown_s=PROCESS_SHUTDOWN_S,
            stop_signal=signal.SIGINT,  # at SIGTERM it would see its requests off, and there is nobody to take them
        )
        return self._child(program, " ".join(members))

    def _child(self, program: Program, what: str) -> Child:
        process = Process(program, backoff=Backoff(random.Random()), on_exit=self._watch.exited)
        self._processes[program.name] = process
        return Child(program.name, self._life(process, what), shutdown_s=process.child().shutdown_s)

    def _life(self, process: Process, what: str) -> Run:
        """A process's life, with a line on the terminal when it is ready."""
        name = process.program.name

        async def run(ready: OnReady) -> None:
            started_s = time.monotonic()

            def on_ready() -> None:
                took_s = time.monotonic() - started_s
                self._console.print(
                    f"[green]●[/] {name:<10} [dim]{process.pid:>7}  {took_s:4.1f} s[/]  {escape(what)}", soft_wrap=True
                )
                self._watch.watch(name, list(process.program.members))
                ready()
                if self._is_up:
                    self._write_files()

            await process.run(on_ready)

        return run

    async def _greet(self, is_ready: asyncio.Event, started_s: float) -> None:
        """Once every process is ready: see that everything answers, then say so."""
        await is_ready.wait()
        members = [member for spec in self._specs for member in spec.members]
        assert self._watch.bus is not None
        if silent := await find_silent(self._watch.bus, members, timeout_s=ANSWER_TIMEOUT_S):
            raise TimeoutError(f"no answer from {', '.join(sorted(map(str, silent)))}; see {self._home.folder}/logs")
        await asyncio.to_thread(self._get, "/health")
        models = json.loads(await asyncio.to_thread(self._get, "/v1/models"))
        self._models = [model["id"] for model in models["data"]]
        self._is_up = True
        self._write_files()
        self._say_hello(time.monotonic() - started_s)
        if self._cluster is not None:
            await follow(self._cluster, self._change, self._carry_out, self._say)

    def _change(self) -> Change:
        """What the cluster file says now, against what runs. Raises ClusterError and SettingsError."""
        assert self._cluster is not None
        wanted = serving(read_cluster(self._cluster), self._settings)
        return Change.between(self._specs, wanted)

    async def _carry_out(self, change: Change) -> None:
        """Start what comes; then what leaves sees off what it has, for which others are there by then."""
        self._specs = change.specs
        for spec in change.first:
            await self._add(spec)
        patience_s = self._settings.grace_s + LAST_S + PROCESS_SHUTDOWN_S
        for spec in change.leaving:
            self._say(f"{spec.name:<10} leaves, as the cluster file says")
        has_word = {spec.name: self._processes[spec.name].leave() for spec in change.leaving}
        await asyncio.gather(*(self._root.retire(name, patience_s * is_told) for name, is_told in has_word.items()))
        for spec in change.leaving:
            del self._processes[spec.name]
        for spec in change.then:
            await self._add(spec)
        self._write_files()

    async def _add(self, spec: ProcessSpec) -> None:
        if not await self._root.add(self._node(spec)):
            self._say(f"{spec.name:<10} did not start; see {self._home.log_path(spec.name)}")
            self._specs = tuple(one for one in self._specs if one != spec)
            del self._processes[spec.name]

    def _get(self, path: str) -> bytes:
        """GET from our gateway. Raises ConnectionError with what it said if that is not 200."""
        keys = Keys.parse(self._settings.api_keys, self._settings.tenants()).tenants
        headers = {"x-api-key": keys[0][0].decode()} if keys else {}
        request = urllib.request.Request(self._http + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as response:
                body: bytes = response.read()
                return body
        except urllib.error.HTTPError as error:
            raise ConnectionError(
                f"GET {self._http}{path}: {error.code} {error.read(500).decode('utf-8', 'replace')}"
            ) from None
        except OSError as error:
            raise ConnectionError(f"GET {self._http}{path}: {error}") from None

    def _write_files(self) -> None:
        pids: dict[str, list[int]] = {}
        for name, process in self._processes.items():
            roles = {Member.parse(member).role.value for member in process.program.members} or {name}
            for role in sorted(roles):
                pids.setdefault(role, []).extend([process.pid] if process.pid is not None else [])
        client = Client()
        if self._broker is not None:
            user = self._broker.clients[0]
            client = Client(user=user.user, password=user.password, inbox_prefix=user.inbox_prefix)
        self._home.write(Running(pid=os.getpid(), http=self._http, nats_url=self._nats_url))
        ready = Ready(http=self._http, nats=self._nats_place, client=client, models=self._models, pids=pids)
        write_private(self._ready_file, msgspec.json.encode(ready))

    def _say_hello(self, took_s: float) -> None:
        models = escape(", ".join(self._models))
        self._console.print(f"\n[bold]Shoal is up[/] after {took_s:.1f} s, serving {models}\n")
        keys = Keys.parse(self._settings.api_keys, self._settings.tenants())
        is_storing = stores(self._specs)
        for line in banner(
            self._settings, self._models, self._nats_place, has_keys=bool(keys), stores_blocks=is_storing
        ):
            self._console.print(line, markup=False, soft_wrap=True)

    def _say(self, text: str) -> None:
        self._console.print(f"[yellow]●[/] {escape(text)}", soft_wrap=True)

    def _on_restart(self, name: str, error: BaseException | None) -> None:
        self._say(f"{name:<10} restarting: {error or 'it has left'}")

    def _on_signal(self, task: asyncio.Task[None]) -> None:
        if self._is_stopping:
            self._kill_all()
            return
        self._is_stopping = True
        self._console.print("\nstopping; once more to kill")
        asyncio.get_running_loop().call_later(STACK_SHUTDOWN_S, self._kill_all)
        task.cancel()

    def _kill(self, name: str) -> None:
        self._say(f"{name:<10} does not answer: killing it")
        self._processes[name].kill()

    def _kill_all(self) -> None:
        for process in self._processes.values():
            process.kill()

    def _explain(self, error: GaveUp, num_lines: int = 15) -> None:
        """Say what a process found wrong with settings or checkpoint; where it did not, show the end of its log."""
        while isinstance(error.__cause__, GaveUp):  # of a process in a group
            error = error.__cause__
        path = self._home.folder / "logs" / f"{error.child}.log"
        text = path.read_text(errors="replace") if path.exists() else ""
        _, found, mistake = f"\n{text}".rpartition(f"\n{MISTAKE}")
        if found:
            self._console.print(f"[red]shoal: {escape(mistake.strip())}[/]", soft_wrap=True)
            return
        self._console.print(f"[red]{escape(str(error))}[/]")
        if text:
            self._console.print(f"the end of {escape(str(path))}:")
        for line in text.splitlines()[-num_lines:]:
            self._console.print(f"  [dim]{escape(line)}[/]", soft_wrap=True)


def up(
    specs: tuple[ProcessSpec, ...],
    settings: Settings,
    console: Console,
    ready_file: Path | None,
    cluster: Path | None = None,
) -> int:
    """Run a whole system until it is told to stop; the exit status. What changes in the file `cluster` meanwhile is
    carried out. Raises SettingsError before anything is started."""
    home = Home(settings.home)
    if ready_file is not None:
        clear(ready_file, home)
    check(settings, specs)
    check_tenants(settings, specs, console)
    specs = serving(specs, settings)
    try:
        home.acquire()
    except OSError as error:
        raise SettingsError(f"SHOAL_HOME={settings.home}: {error.strerror}; set it to a folder you can write") from None
    store = Store(settings.store)
    if ready_file is None:
        ready_file = home.folder / "ready.json"
        ready_file.unlink(missing_ok=True)  # one of a run that was killed
    try:
        if stores(specs):
            store.acquire()
        logging.basicConfig(
            filename=home.log_path("up"), level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s"
        )
        settings = replace(settings, http_port=claim_port(settings.http_port))
        for _ in range(PORTS):
            with suppress(PortTaken):
                return asyncio.run(Stack(specs, settings, home, console, ready_file, cluster).run())
        raise SettingsError("others took each port that was free for the broker; try again")
    finally:
        ready_file.unlink(missing_ok=True)  # what it says is true no longer
        store.release()
        home.release()
