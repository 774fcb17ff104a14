"""`shoal up`: the root supervisor of a whole system on one machine."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape

from actors.gateway.keys import Keys, KeysError
from actors.recipe.card import CardError, ModelCard
from bus.server import ServerConfig, command, wait_ready
from kernels.audit import audit, refuse
from kernels.config import ConfigError, ModelConfig
from kernels.shards import CheckpointError, read_shards
from run.banner import banner
from run.build import serving
from run.cluster import Member, ProcessSpec, check_experts
from run.health import find_silent
from run.home import Client, Home, Ready, Running, write_private
from run.node import MISTAKE
from run.settings import LOOPBACK, Settings, SettingsError
from run.store import Store, stores
from run.watch import Watch
from schemas.message import Role
from supervisors.processes import Backoff, Process, Program
from supervisors.strategy import GaveUp, Intensity
from supervisors.tasks import Child, Run, Supervisor
from supervisors.tasks import Ready as OnReady

INTENSITY = Intensity(12, 60.0)
"""With the processes' own back-off: one that never comes up is given up after about a minute."""

PROCESS_SHUTDOWN_S = 1.5
STACK_SHUTDOWN_S = 2.2
"""After this everything that is left is killed: the whole stack is gone within three seconds."""

ANSWER_TIMEOUT_S = 30.0


class Stack:
    """The processes of a cluster beside their broker, as one supervised tree, and what it says on the terminal."""

    def __init__(
        self, specs: tuple[ProcessSpec, ...], settings: Settings, home: Home, console: Console, ready_file: Path
    ) -> None:
        self._specs = specs
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
        """Run until SIGINT or SIGTERM; the exit status. A second signal kills everything at once."""
        started_s = time.monotonic()
        children = [*self._broker_children(), Child("watch", self._watch.run), *self._nodes()]
        supervisor = Supervisor("shoal", children, intensity=INTENSITY, on_restart=self._on_restart)
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
        except GaveUp as error:
            self._explain(error)
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
            options |= {"--ranks": ",".join(group.ids), "--meet": group.address, "--redundant": group.num_redundant}
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

    def _on_restart(self, name: str, error: BaseException | None) -> None:
        self._console.print(f"[yellow]●[/] {name:<10} restarting: {escape(str(error or 'it has left'))}")

    def _on_signal(self, task: asyncio.Task[None]) -> None:
        if self._is_stopping:
            self._kill_all()
            return
        self._is_stopping = True
        self._console.print("\nstopping; once more to kill")
        asyncio.get_running_loop().call_later(STACK_SHUTDOWN_S, self._kill_all)
        task.cancel()

    def _kill(self, name: str) -> None:
        self._console.print(f"[yellow]●[/] {name:<10} does not answer: killing it")
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


def up(specs: tuple[ProcessSpec, ...], settings: Settings, console: Console, ready_file: Path | None) -> int:
    """Run a whole system until it is told to stop; the exit status. Raises SettingsError before anything is started."""
    home = Home(settings.home)
    if ready_file is not None:
        _clear(ready_file, home)
    _check(settings, specs)
    _check_tenants(settings, specs, console)
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
        settings = replace(settings, http_port=_claim_port(settings.http_port))
        specs = _meeting(specs)
        return asyncio.run(Stack(specs, settings, home, console, ready_file).run())
    finally:
        ready_file.unlink(missing_ok=True)  # what it says is true no longer
        store.release()
        home.release()


def _clear(ready_file: Path, home: Home) -> None:
    """Remove the file of a run that was killed: it would be believed. Raises SettingsError if none can be written."""
    if ready_file.is_dir() or not os.access(ready_file.absolute().parent, os.W_OK):
        raise SettingsError(f"--ready-file {ready_file}: give a file in a folder that exists and that you can write")
    if home.read() is None:  # else it may be of the one that runs
        ready_file.unlink(missing_ok=True)


def _check(settings: Settings, specs: tuple[ProcessSpec, ...]) -> None:
    """What would fail later, in some process, fails here and now. Raises SettingsError."""
    try:
        ModelCard.from_folder(settings.model)
        shards = read_shards(settings.model)
        config = ModelConfig.from_folder(settings.model)
        check_experts(specs, config)
        refuse(audit(config, shards))
        shards.need_files()
        Keys.parse(settings.api_keys, settings.tenants())
    except (CardError, ConfigError, CheckpointError) as error:
        raise SettingsError(f"SHOAL_MODEL: {error}") from None
    except KeysError as error:
        raise SettingsError(str(error)) from None


def _check_tenants(settings: Settings, specs: tuple[ProcessSpec, ...], console: Console) -> None:
    """Limits need someone who keeps them, secrets a file of their own. Raises SettingsError."""
    path = settings.tenants_path
    limited = [tenant.name for tenant in settings.tenants() if tenant.is_limited]
    if limited and all(member.role is not Role.QUOTA for spec in specs for member in spec.members):
        where = f"SHOAL_TENANTS: {path}: tenants.{limited[0]}"
        raise SettingsError(f"{where} has limits, but no process of the cluster file has a quota actor; add quota/q0")
    if path is not None and path.stat().st_mode & 0o077:
        console.print(f"[yellow]SHOAL_TENANTS: others may read {escape(str(path))}; chmod 600 it[/]", soft_wrap=True)


def _meeting(specs: tuple[ProcessSpec, ...]) -> tuple[ProcessSpec, ...]:
    """The same, with a free port for the ranks of each group to meet at."""
    addresses: dict[str, str] = {}
    found = []
    for spec in specs:
        if spec.group is not None:
            address = addresses.setdefault(spec.unit, f"{LOOPBACK}:{_claim_port(0)}")
            spec = replace(spec, group=replace(spec.group, address=address))
        found.append(spec)
    return tuple(found)


def _claim_port(port: int) -> int:
    """The port itself, or a free one for 0. Raises SettingsError if it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise SettingsError(
                f"SHOAL_HTTP_PORT={port}: {error.strerror}; set it to another port, or to 0 for any free one"
            ) from None
        return int(probe.getsockname()[1])
