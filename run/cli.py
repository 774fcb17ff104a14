"""The command line. Each command imports what it needs when it runs, so that all of them start quickly."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

from cyclopts import App

app = App(
    name="shoal",
    version=version("shoal"),
    help="An open serving system for DeepSeek-V4.1-Flash-class models, as supervised actors on NATS.",
)
bench = App(name="bench", help="Benchmarks: one table each, or one JSON object with --json.")

TRAIN = """Train shoal-tiny on this machine's CPU, or go on training it, in FOLDER.

The state is saved every few minutes, and in the end or on Ctrl-C, when the model is written too: to FOLDER/model, which
can be served (SHOAL_MODEL=FOLDER/model). However often it was stopped, the same seed, steps and number of processes
give the same model. Draft stages begin anew with it: train them last, with `shoal train drafts`."""

EVAL = """What a model can do, on examples it has not seen, asked through the API of the system that runs.

`drafts` and `replay` need none: they compute here. Status 1 if a request failed."""

app.command(bench)
app.command("run.checkpoint:app", name="checkpoint", help="Make the bundled tiny checkpoint, or look into one.")
app.command("run.train.command:app", name="train", help=TRAIN)
app.command("run.evaluate.command:app", name="eval", help=EVAL)
app.command("run.simulate.command:app", name="simulate", help="Compare policies of balancing on a workload.")
bench.command("run.bench.bus:bench_bus", name="bus", help="What the bus costs, beside raw nats-py.")
bench.command("run.bench.engine:bench_engine", name="engine", help="Tokens per second of the engine, and their cost.")
bench.command("run.bench.decode:bench_decode", name="decode", help="Decoding with drafts and without, by load.")
bench.command("run.bench.survival:bench_survival", name="survival", help="What fewer verified drafts cost.")
bench.command("run.bench.ep:bench_ep", name="ep", help="Decoding with the experts spread over 1, 2 and 4 processes.")
bench.command("run.bench.experts:bench_experts", name="experts", help="Loads, steps, answers while hot experts move.")
bench.command("run.bench.cost:bench_cost", name="cost", help="How well the time of prefill is foretold.")
bench.command("run.bench.turns:bench_turns", name="turns", help="What the second turn of a conversation costs.")
bench.command("run.bench.stream:bench_stream", name="stream", help="Times of streams that come at random, by rate.")
bench.command("run.bench.frontend:bench_frontend", name="frontend", help="Events per second through the front end.")
bench.command("run.bench.kv:bench_kv", name="kv", help="What cached blocks cost, beside the disk and the hash alone.")


@app.command
def up(*, cluster: Path | None = None, ready_file: Path | None = None, http_port: int | None = None) -> int:
    """Start the whole system on this machine; Ctrl-C stops it.

    The environment counts too: SHOAL_HTTP_PORT, SHOAL_NATS_URL (use that broker instead of our own), SHOAL_MODEL (a
    checkpoint folder), SHOAL_HOME (state and logs), SHOAL_API_KEYS (without them: loopback only).

    Parameters
    ----------
    cluster
        TOML file that says which actors run in which process; the default is three processes.
    ready_file
        Written, readable by you only, once everything answers: addresses, a NATS client's credentials, models, pids.
        Without it, ready.json in SHOAL_HOME.
    http_port
        The gateway's port, 0 for any free one; overrides SHOAL_HTTP_PORT.
    """
    import os

    from rich.console import Console

    from run.cluster import DEFAULT_CLUSTER, read_cluster
    from run.settings import Settings
    from run.up import up as run_up

    if http_port is not None:
        os.environ["SHOAL_HTTP_PORT"] = str(http_port)
    settings = Settings.from_environment()
    specs = read_cluster(cluster or DEFAULT_CLUSTER)
    return run_up(specs, settings, Console(highlight=False), ready_file, cluster)


@app.command
def node(
    *actors: str,
    name: str = "",
    threads: int | None = None,
    slots: int | None = None,
    ranks: str = "",
    redundant: int = 0,
    least: int = 1,
) -> None:
    """Run some actors in this process, on the broker at SHOAL_NATS_URL.

    At SIGTERM it sees its requests off before it stops, at SIGINT it stops.

    Parameters
    ----------
    actors
        What to run, as ROLE/ID; an ID of `-` stands for this host's name. Vision actors, and their balancer, of a
        checkpoint without a vision tower are left out.
    name
        What the process is called in logs and traces; the first role by default.
    threads
        Cores its engines may use; all by default.
    slots
        Requests each of its engines holds at once.
    ranks
        The ids of all ranks of its expert-parallel group, in order, with commas between; the one actor's id is among
        them.
    redundant
        Copies beyond one of each expert, at least so many in each layer of the group.
    least
        How few ranks of the group go on when others are gone: they have to hold all experts between them.
    """
    from run.build import serving
    from run.cluster import DEFAULT_SLOTS, GroupPlace, ProcessSpec, num_cores, parse_actors
    from run.node import run_node
    from run.settings import Settings

    members, settings = parse_actors(actors), Settings.from_environment()
    name, group = name or members[0].role.value, GroupPlace.parse(members, ranks, redundant, least)
    spec = ProcessSpec(name, members, threads or num_cores(), slots or DEFAULT_SLOTS, group)
    served = serving((spec,), settings)
    if not served:
        print(f"shoal: {settings.model} has no vision tower: nothing to do for {', '.join(actors)}", file=sys.stderr)
        return
    run_node(served[0], settings)


@app.command
def health(*actors: str) -> int:
    """Ping actors through the bus at SHOAL_NATS_URL; status 0 if all of them answer. For health checks of containers.

    Parameters
    ----------
    actors
        Whom to ping, as for `shoal node`.
    """
    from run.cluster import parse_actors
    from run.health import check
    from run.settings import Settings

    return check(parse_actors(actors), Settings.from_environment().nats_url)


@app.command
def drain(actor: str, *, grace: str = "") -> int:
    """Have an actor leave: it takes no new work, and when its grace is over others go on with what it still has. Waits
    for that; the actor is then started anew. Status 1 if requests were left.

    Asks on the broker at SHOAL_NATS_URL, or on the one of the stack that runs from SHOAL_HOME.

    Parameters
    ----------
    actor
        Whom, as ROLE/ID, such as decode/d0.
    grace
        For how many seconds its requests go on first; SHOAL_GRACE_S, or 60, by default.
    """
    from run.cluster import parse_actors
    from run.drain import drain_actor
    from run.home import find_broker
    from run.settings import Settings, grace_s

    settings = Settings.from_environment()
    asked_s = grace_s("--grace", grace) if grace else settings.grace_s
    return drain_actor(parse_actors((actor,))[0], find_broker(settings), asked_s)


@app.command
def status(*, json: bool = False) -> int:
    """Show who runs, where, and how loaded.

    Asks on the broker at SHOAL_NATS_URL, or on the one of the stack that runs from SHOAL_HOME.

    Parameters
    ----------
    json
        Print one JSON object instead of a table.
    """
    from run.settings import Settings
    from run.status import print_status

    return print_status(Settings.from_environment(), as_json=json)


@app.command
def chat(*, url: str = "", model: str = "", key: str = "", max_tokens: int = 0) -> int:
    """Chat in the terminal. Ctrl-C cancels the current answer; /quit or Ctrl-D ends the chat.

    Parameters
    ----------
    url
        Where the gateway is; by default that of the stack that runs from SHOAL_HOME, else port SHOAL_HTTP_PORT here.
    model
        Which model; the first one served by default.
    key
        An API key, if the gateway asks for one.
    max_tokens
        The longest answer; 0 leaves it to the model.
    """
    from run.chat import Chat
    from run.settings import Settings

    return Chat.open(Settings.from_environment(), url, model, key, max_tokens).run()


def main() -> None:
    """Run the command on the command line; a mistake of the user's is one line, not a traceback."""
    from run.cluster import ClusterError
    from run.settings import SettingsError

    try:
        app()
    except (ClusterError, SettingsError) as error:
        print(f"shoal: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # while a command is being imported, or by one that minds nothing else
        sys.exit(130)


if __name__ == "__main__":
    main()
