"""Uses the agent of a sandbox through E2B's Python SDK: commands, files, watches, terminals, git.

python3 tools.py <directory with the SDK> sync|async [signed|loop]; the pool is in POOL, a directory of its own in DIR,
the rest in the SDK's variables. The pod is a process of this machine, so all files are in that directory.
"""
import asyncio
import http.client
import inspect
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from importlib.metadata import version
from urllib.parse import urlsplit

sys.path.insert(0, sys.argv[1])

import e2b  # noqa: E402
from e2b import FileType, PtySize  # noqa: E402

ASYNC = sys.argv[2] == "async"
Sandbox = e2b.AsyncSandbox if ASYNC else e2b.Sandbox
POOL, BASE = os.environ["POOL"], os.environ["DIR"]
sandbox = None


async def do(answer):
    """Waits for a call of the asynchronous SDK. That of the synchronous one has been waited for."""
    return await answer if inspect.isawaitable(answer) else answer


async def fails(name, call, *args, words="", **kwargs):
    try:
        await do(call(*args, **kwargs))
    except Exception as error:
        assert type(error).__name__ == name, f"{type(error).__name__}, not {name}: {error}"
        assert words in str(error), error
        return error
    raise AssertionError(f"no {name}")


async def until(what, check):
    """Waits for a condition. The limit ends a test in which nothing happens."""
    end = time.monotonic() + 60
    while not await do(check()):
        assert time.monotonic() < end, f"waited for {what}"
        await asyncio.sleep(0.01)


def touch(path):
    open(path, "w").close()


async def commands(root):
    run = sandbox.commands.run
    result = await do(run("echo out; echo err >&2"))
    assert (result.exit_code, result.stdout, result.stderr) == (0, "out\n", "err\n"), result
    odd = "a \"b\" 'c' $HOME `d` \\ é ☃ * \t\n#\nlast"
    assert (await do(run(f"cat <<'END'\n{odd}\nEND"))).stdout == odd + "\n"

    exit = await fails("CommandExitException", run, "echo a; echo b >&2; exit 7")
    assert (exit.exit_code, exit.stdout, exit.stderr) == (7, "a\n", "b\n"), exit
    signalled = await fails("CommandExitException", run, "kill -TERM $$")
    assert signalled.exit_code != 0 and "terminated" in signalled.error, signalled

    assert (await do(run("echo $GLOBAL,$ONE", envs={"ONE": "1 2=3"}))).stdout == "everywhere,1 2=3\n"
    assert (await do(run("echo $GLOBAL,$ONE", envs={"GLOBAL": "here"}))).stdout == "here,\n"
    assert (await do(run("pwd", cwd=root))).stdout == root + "\n"
    name = (await do(run("whoami"))).stdout
    assert (await do(run("whoami", user=name.strip()))).stdout == name
    await fails("InvalidArgumentException", run, "pwd", cwd=root + "/missing", words="does not exist")
    await fails("AuthenticationException", run, "true", user="no-such-user", words="no-such-user")

    # Callbacks get the output, whole: a character in two pieces is one.
    parts = []
    slow = await do(run("printf '\\xe2\\x98'; sleep 0.1; printf '\\x83\\n'; echo e >&2",
                        on_stdout=parts.append, on_stderr=parts.append))
    assert slow.stdout == "☃\n" and sorted("".join(parts)) == sorted("☃\ne\n"), parts

    size, large = 20 << 20, []
    long = await do(run(f"head -c {size} /dev/zero | tr '\\0' x", on_stdout=large.append, timeout=0))
    assert long.stdout == "x" * size and "".join(large) == long.stdout
    dropped = await do(run("echo 1", retain_output=False))
    assert dropped.stdout is None and dropped.exit_code == 0, dropped

    await fails("TimeoutException", run, "sleep 600", timeout=0.3, words="timeout")
    assert (await do(run("sleep 0.1; echo 1", timeout=0))).stdout == "1\n"
    await processes(root)
    await standard_input()


async def processes(root):
    """Lists, kills, leaves and joins what runs."""
    commands = sandbox.commands
    sleeper = await do(commands.run("sleep 600", background=True, envs={"MARK": "m"}, cwd=root))
    listed = next(p for p in await do(commands.list()) if p.pid == sleeper.pid)
    assert (listed.cmd, listed.args, listed.envs["MARK"], listed.cwd) == (
        "/bin/bash", ["-l", "-c", "sleep 600"], "m", root), listed
    assert await do(commands.kill(sleeper.pid)) is True
    assert "killed" in (await fails("CommandExitException", sleeper.wait)).error
    assert await do(commands.kill(sleeper.pid)) is False
    assert await do(sleeper.kill()) is False
    await fails("NotFoundException", commands.connect, sleeper.pid)
    assert await do(commands.kill(999_999_999)) is False

    # A client that leaves does not end it, and another joins it.
    go = root + "/goes-on"
    left = await do(commands.run(f"until [ -e {go} ]; do sleep 0.01; done; echo two; exit 3", background=True))
    await do(left.disconnect())
    assert any(p.pid == left.pid for p in await do(commands.list()))
    joined = await do(commands.connect(left.pid))
    assert joined.pid == left.pid
    touch(go)
    ended = await fails("CommandExitException", joined.wait)
    assert (ended.exit_code, ended.stdout) == (3, "two\n"), ended


async def standard_input():
    commands = sandbox.commands
    text = 'a "line" ☃\nand another\n'
    cat = await do(commands.run("cat", background=True, stdin=True))
    await do(commands.send_stdin(cat.pid, text))
    await do(cat.send_stdin(""))
    await do(cat.send_stdin(b"AB\n"))
    if ASYNC:
        async with commands.stream_input(cat.pid) as stream:
            for part in "1\n", b"2\n":
                await stream.send(part)
    else:
        commands.stream_input(cat.pid, ["1\n", b"2\n"])
    await do(cat.close_stdin())
    assert (await do(cat.wait())).stdout == text + "AB\n1\n2\n"
    await fails("NotFoundException", cat.send_stdin, "late")
    await fails("NotFoundException", commands.send_stdin, 999_999_999, "x")
    closed = await do(commands.run("cat; sleep 600", background=True, stdin=True))
    await do(closed.close_stdin())
    await fails("SandboxException", closed.send_stdin, "late", words="closed")
    await do(closed.kill())
    none = await do(commands.run("cat; sleep 600", background=True))
    await fails("SandboxException", none.send_stdin, "x", words="without standard input")
    await do(none.kill())


async def streamed(name, **kwargs):
    parts = []
    stream = await do(sandbox.files.read(name, format="stream", **kwargs))
    if ASYNC:
        async for part in stream:
            parts.append(part)
    else:
        parts.extend(stream)
    return b"".join(parts)


async def pieces(data):
    yield data[:1000]
    yield data[1000:]


async def files(root):
    files = sandbox.files
    name = root + '/new/dirs/ünïcode ☃ "q".txt'
    info = await do(files.write(name, "text ☃"))
    assert (info.path, info.name, info.type) == (name, os.path.basename(name), FileType.FILE), info
    assert await do(files.read(name)) == "text ☃"
    with open(name, encoding="utf-8") as file:
        assert file.read() == "text ☃"

    data, at = os.urandom(300_000), root + "/bytes"
    for kwargs in {}, {"gzip": True}, {"use_octet_stream": True}:
        for body in data, io.BytesIO(data), pieces(data) if ASYNC else iter([data[:7], data[7:]]):
            await do(files.write(at, body, **kwargs))
            with open(at, "rb") as file:
                assert file.read() == data
            os.remove(at)
    await do(files.write(at, data))
    for packed in False, True:
        assert await do(files.read(at, format="bytes", gzip=packed)) == data
        assert await streamed(at, gzip=packed) == data
    await do(files.write(root + "/empty", ""))
    assert await do(files.read(root + "/empty")) == ""
    many = [{"path": f'{root}/many/{i}/f "{i}" ☃', "data": f"n{i}"} for i in range(5)]
    for packed in False, True:
        assert [w.path for w in await do(files.write_files(many, gzip=packed))] == [m["path"] for m in many]
        for i, m in enumerate(many):
            assert await do(files.read(m["path"])) == f"n{i}"
    assert await do(files.write_files([])) == []

    await fails("FileNotFoundException", files.read, root + "/missing", words="missing")
    await fails("FileNotFoundException", files.read, at + "/below")
    await fails("InvalidArgumentException", files.read, root, words="directory")
    await fails("InvalidArgumentException", files.write, root, "x", words="directory")
    await fails("InvalidArgumentException", files.write, at + "/below", "x", words="not a directory")
    await fails("AuthenticationException", files.read, at, user="no-such-user", words="no-such-user")
    await fails("AuthenticationException", files.list, root, user="no-such-user", words="no-such-user")
    if os.path.exists("/dev/full"):
        full = root + "/full"
        os.symlink("/dev/full", full)
        await fails("InvalidArgumentException", files.write, full, "x", words="not a regular file")

    described = await do(files.write(root + "/described", "x", metadata={"Purpose": "a test"}))
    assert described.metadata == {"purpose": "a test"}, described
    assert (await do(files.get_info(root + "/described"))).metadata == {"purpose": "a test"}
    await directories(root + "/tree")
    if os.geteuid() == 0:
        # The directory is of root. What the pool lets the agent make there belongs to the user.
        for name in "app/main.py", "file":
            await do(files.write(f"{root}/{name}", "x", user="nobody"))
        assert await do(files.make_dir(root + "/code/deep", user="nobody")) is True
        await do(files.rename(root + "/app/main.py", root + "/moved", user="nobody"))
        for name in "app", "moved", "file", "code", "code/deep":
            assert (await do(files.get_info(f"{root}/{name}"))).owner == "nobody", name
        await do(files.write(root + "/of-root", "x", user="root"))
        await fails("SandboxException", files.write, root + "/of-root", "y", user="nobody", words="permission denied")
        assert await do(files.read(root + "/of-root")) == "x"


async def directories(root):
    files = sandbox.files
    assert await do(files.make_dir(root + "/a/b")) is True
    assert await do(files.make_dir(root + "/a/b")) is False
    await do(files.write(root + "/a/b/file", "12345"))
    await fails("InvalidArgumentException", files.make_dir, root + "/a/b/file", words="not a directory")
    os.symlink("a/b/file", root + "/link")
    os.symlink("nowhere", root + "/lost")

    async def names(**kwargs):
        return sorted(e.path[len(root) + 1:] for e in await do(files.list(root, **kwargs)))

    assert await names() == ["a", "link", "lost"]
    assert await names(depth=2) == ["a", "a/b", "link", "lost"]
    assert await names(depth=9) == ["a", "a/b", "a/b/file", "link", "lost"]
    for depth in 0, -1:
        await fails("InvalidArgumentException", files.list, root, depth=depth)
    await fails("InvalidArgumentException", files.list, root + "/a/b/file", words="not a directory")
    await fails("FileNotFoundException", files.list, root + "/missing")

    entries = {e.name: e for e in await do(files.list(root))}
    assert (entries["a"].type, entries["a"].mode, entries["a"].permissions) == (FileType.DIR, 0o755, "drwxr-xr-x")
    assert (entries["link"].type, entries["link"].symlink_target) == (
        FileType.SYMLINK, root + "/a/b/file"), entries["link"]
    assert (entries["lost"].type, entries["lost"].symlink_target) == (FileType.SYMLINK, "nowhere")
    file = await do(files.get_info(root + "/a/b/file"))
    assert (file.name, file.path, file.type, file.size) == ("file", root + "/a/b/file", FileType.FILE, 5), file
    assert (file.mode, file.permissions) == (0o644, "-rw-r--r--"), file
    owner = subprocess.check_output(["stat", "-c", "%U %G", file.path], text=True).strip()
    assert f"{file.owner} {file.group}" == owner, file
    assert abs(file.modified_time.timestamp() - os.stat(file.path).st_mtime) < 0.001, file
    await fails("FileNotFoundException", files.get_info, root + "/missing")

    assert await do(files.exists(file.path)) is True
    assert await do(files.exists(root + "/missing")) is False
    moved = await do(files.rename(file.path, root + "/new/place"))
    assert (moved.path, moved.size) == (root + "/new/place", 5), moved
    assert await do(files.exists(file.path)) is False
    await fails("FileNotFoundException", files.rename, root + "/missing", root + "/x")
    await do(files.remove(root + "/new/place"))
    await do(files.remove(root + "/new/place"))  # nothing is there
    await do(files.remove(root))
    assert not os.path.exists(root)


class Watch:
    """Collects the events of a directory, which one SDK streams and the other polls."""

    def __init__(self):
        self.events, self.ended, self.handle = [], [], None

    async def begin(self, root, **kwargs):
        if ASYNC:
            kwargs = {"timeout": 0, **kwargs}
            self.handle = await sandbox.files.watch_dir(root, self.events.append, self.ended.append, **kwargs)
        else:
            self.handle = sandbox.files.watch_dir(root, **kwargs)
        return self

    async def kinds(self, name):
        if not ASYNC:
            self.events.extend(self.handle.get_new_events())
        return [e.type.value for e in self.events if e.name == name]

    async def has(self, kind, name):
        async def there():
            return kind in await self.kinds(name)
        await until(f"{kind} of {name}", there)


async def watches(base):
    files, root = sandbox.files, base + "/watched"
    await do(files.make_dir(root))
    await do(files.write(root + "/old", "x"))
    flat = await Watch().begin(root, include_entry=True)
    await do(files.write(root + "/new", "text"))
    await flat.has("write", "new")
    os.chmod(root + "/old", 0o600)
    await flat.has("chmod", "old")
    await do(files.rename(root + "/old", root + "/moved"))
    await flat.has("create", "moved")
    await flat.has("rename", "old")
    await do(files.remove(root + "/new"))
    await flat.has("remove", "new")
    await do(files.write(root + "/below/it", "x"))
    await flat.has("create", "below")
    order = await flat.kinds("new")
    assert order[0] == "create" and "write" in order and order[-1] == "remove", order
    assert await flat.kinds("below/it") == []
    assert next(e for e in flat.events if e.name == "moved").entry.path == root + "/moved"
    await do(flat.handle.stop())

    deep = await Watch().begin(root, recursive=True)
    await do(files.write(root + "/below/it", "again"))
    await deep.has("write", "below/it")
    await do(files.write(root + "/x/y/z", "text"))
    await deep.has("write", "x/y/z")
    await do(deep.handle.stop())
    if ASYNC:
        async def late():
            watch = await Watch().begin(root, timeout=0.3)
            await until("the end of the watch", lambda: watch.ended)
            raise watch.ended[0]
        # On a busy machine the time is over before the watch has begun.
        await fails("TimeoutException", late)
        gone = await Watch().begin(root)
        await do(files.remove(root))
        await until("the end of the watch", lambda: gone.ended)
        assert gone.ended == [None], gone.ended
    else:
        await fails("SandboxException", deep.handle.get_new_events)
        await fails("NotFoundException", deep.handle.stop)
        await do(files.remove(root))
    touch(base + "/file")
    on_event = [print] if ASYNC else []
    await fails("FileNotFoundException", files.watch_dir, root, *on_event)
    await fails("InvalidArgumentException", files.watch_dir, base + "/file", *on_event, words="not a directory")


def request(url, method, body=None, **headers):
    """Sends a request as a program without the SDK does."""
    url = urlsplit(url)
    if "E2B_DOMAIN" in os.environ:
        asked = urllib.request.Request(url.geturl(), data=body, method=method, headers=headers)
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
    # The names do not resolve, so the gateway's address is the machine's.
    connection = http.client.HTTPConnection(urlsplit(os.environ["E2B_SANDBOX_URL"]).netloc, timeout=60)
    connection.request(method, f"{url.path}?{url.query}", body=body, headers={"Host": sandbox.get_host(49983), **headers})
    answer = connection.getresponse()
    return answer.status, answer.read()


async def signed(root):
    name = root + "/signed ☃+&?.txt"
    raw = {"Content-Type": "application/octet-stream"}
    for expiration in None, 100:
        up = sandbox.upload_url(name, use_signature_expiration=expiration)
        code, body = request(up, "POST", b"raw", **raw)
        assert code == 200 and json.loads(body)[0]["path"] == name, body
        down = sandbox.download_url(name, use_signature_expiration=expiration)
        assert request(down, "GET") == (200, b"raw")
        # It is for one path, one operation and one user.
        for url, method in (
            (down.replace("signed", "other"), "GET"), (down, "POST"), (up, "GET"), (down + "&username=root", "GET"),
            (re.sub("signature=v1_.", "signature=v1_-", down), "GET"), (re.sub("signature=[^&]*&?", "", down), "GET"),
        ):
            code, body = request(url, method, b"x" if method == "POST" else None, **raw)
            assert code == 401 and json.loads(body)["code"] == 401, (url, body)
    code, body = request(sandbox.download_url(name, use_signature_expiration=-10), "GET")
    assert code == 401 and json.loads(body) == {"code": 401, "message": "signature is already expired"}, body
    assert request(sandbox.download_url(root + "/missing"), "GET")[0] == 404


class Screen:
    """Collects what a terminal shows. The synchronous SDK hands it over while it is waited for."""

    def __init__(self):
        self.data = b""

    def add(self, data):
        self.data += data

    async def shows(self, handle, text):
        if ASYNC:
            return await until(text, lambda: text.encode() in self.data)
        for _, _, data in handle:
            self.data += data or b""
            if text.encode() in self.data:
                return
        raise AssertionError(f"no {text}: {self.data}")


async def terminals(root):
    pty, first, second = sandbox.pty, Screen(), Screen()
    kwargs = {"envs": {"VALUE": "value"}, "cwd": root, "timeout": 0}
    on_data = {"on_data": first.add} if ASYNC else {}
    terminal = await do(pty.create(PtySize(rows=24, cols=80), **kwargs, **on_data))
    await do(pty.send_stdin(terminal.pid, b"echo [$VALUE] [$PWD] [$TERM] [$(stty size)]\n"))
    await first.shows(terminal, f"[value] [{root}] [xterm-256color] [24 80]")
    await do(pty.resize(terminal.pid, PtySize(rows=44, cols=133)))
    await do(pty.send_stdin(terminal.pid, b"echo [$(stty size)]\n"))
    await first.shows(terminal, "[44 133]")
    await do(terminal.disconnect())
    again = await do(pty.connect(terminal.pid, timeout=0, **({"on_data": second.add} if ASYNC else {})))
    await do(pty.send_stdin(terminal.pid, b"echo [$((40 + 2))]; exit 5\n"))
    await second.shows(again, "[42]")
    assert (await fails("CommandExitException", again.wait)).exit_code == 5
    other = await do(pty.create(PtySize(rows=24, cols=80), **on_data))
    assert await do(pty.kill(other.pid)) is True
    await fails("CommandExitException", other.wait)
    assert await do(pty.kill(other.pid)) is False
    await fails("NotFoundException", pty.resize, other.pid, PtySize(rows=1, cols=1))
    await fails("NotFoundException", pty.send_stdin, other.pid, b"x")


async def git(root):
    git, bare, work = sandbox.git, root + "/origin.git", root + "/work"
    await do(git.init(bare, bare=True, initial_branch="main"))
    await do(git.configure_user("A User", "user@example.com"))
    assert await do(git.get_config("user.name")) == "A User"
    await do(git.clone(bare, path=work))
    await do(git.set_config("core.abbrev", "12", scope="local", path=work))
    assert await do(git.get_config("core.abbrev", scope="local", path=work)) == "12"
    await do(sandbox.files.write(work + "/file", "1"))
    status = await do(git.status(work))
    assert not status.is_clean and status.has_untracked and status.file_status[0].name == "file", status
    await do(git.add(work))
    assert (await do(git.status(work))).staged_count == 1
    await do(git.commit(work, "it's the first", author_name="Another", author_email="a@example.com"))
    await do(git.push(work, remote="origin", branch="main"))
    await do(git.create_branch(work, "side"))
    assert sorted((await do(git.branches(work))).branches) == ["main", "side"]
    await do(git.checkout_branch(work, "main"))
    await do(git.delete_branch(work, "side"))
    await do(sandbox.files.write(work + "/file", "2"))
    await do(git.restore(work, paths=["file"]))
    assert await do(sandbox.files.read(work + "/file")) == "1"
    await do(sandbox.files.write(work + "/b", "2"))
    await do(git.add(work, files=["b"]))
    await do(git.reset(work, mode="hard"))
    status = await do(git.status(work))
    assert (status.is_clean, status.current_branch, status.upstream) == (True, "main", "origin/main"), status
    await do(git.clone(bare, path=root + "/clone", branch="main", depth=1))
    assert await do(sandbox.files.read(root + "/clone/file")) == "1"
    assert await do(git.remote_get(root + "/clone", "origin")) == bare
    await do(git.pull(root + "/clone"))
    await fails("CommandExitException", git.clone, root + "/missing", path=root + "/x")


async def about(root):
    assert await do(sandbox.is_running()) is True
    metrics = (await do(sandbox.get_metrics()))[0]
    assert metrics.cpu_count > 0 and 0 < metrics.mem_used < metrics.mem_total, metrics
    assert 0 < metrics.disk_used < metrics.disk_total, metrics
    again = await do(Sandbox.connect(sandbox.sandbox_id))
    assert (await do(again.commands.run("echo $GLOBAL"))).stdout == "everywhere\n"
    open = await do(Sandbox.create(POOL, secure=False, timeout=300))
    assert (await do(open.commands.run("echo 1", user="user"))).stdout == "1\n"
    # A command that waits ends with its sandbox.
    waits = await do(open.commands.run("sleep 600", background=True, timeout=0))
    assert await do(open.kill()) is True
    await fails("SandboxNotRunningException", waits.wait)
    await fails("SandboxNotRunningException", open.commands.run, "true")
    await fails("SandboxNotRunningException", open.files.read, "/etc/hostname")
    assert await do(open.is_running()) is False
    await gateway(root)


async def gateway(home):
    """The SDK starts the MCP gateway with a command of the image, as root."""
    if os.geteuid() != 0:
        return
    servers = {"arxiv": {"storagePath": "/a 'b'\n"}}
    words = "Failed to start MCP gateway: "
    mark = {"home": home}
    await fails("SandboxException", Sandbox.create, POOL, mcp=servers, timeout=300, envs={"HOME": home}, metadata=mark, words=words)
    assert await do(Sandbox.list(query=e2b.SandboxQuery(metadata=mark)).next_items()) == []
    with open(home + "/mcp-gateway", "w") as program:
        program.write('#!/bin/sh\nprintf %s "$2" > $HOME/config; printf %s "$GATEWAY_ACCESS_TOKEN" > $HOME/token\n')
        os.fchmod(program.fileno(), 0o755)
    with open(home + "/.profile", "w") as profile:
        profile.write("PATH=$HOME:$PATH\n")
    started = await do(Sandbox.create(POOL, mcp=servers, timeout=300, envs={"HOME": home}))
    assert json.load(open(home + "/config")) == servers
    assert open(home + "/token").read() == await do(started.get_mcp_token())
    assert started.get_mcp_url().startswith(f"https://50005-{started.sandbox_id}."), started.get_mcp_url()
    await do(started.kill())


PARTS = {f.__name__: f for f in (commands, files, watches, signed, terminals, git, about)}


async def main(mode):
    global sandbox
    envs = {"GLOBAL": "everywhere", "HOME": BASE, "GIT_CONFIG_NOSYSTEM": "1"}
    sandbox = await do(Sandbox.create(POOL, timeout=3600, envs=envs))
    if mode == "loop":
        del PARTS["about"]
        print("agent", (await do(sandbox.commands.run("echo $PPID"))).stdout.strip(), flush=True)
    end = time.monotonic() + float(os.environ.get("SECONDS", "0"))
    while True:
        for name in [mode] if mode in PARTS else PARTS:
            root = f"{BASE}/{name}"
            os.mkdir(root)
            await PARTS[name](root)
            shutil.rmtree(root)
        print("round", flush=True)
        if mode != "loop" or time.monotonic() > end:
            break
    await do(sandbox.kill())


asyncio.run(main(sys.argv[3] if len(sys.argv) > 3 else ""))
print(f"e2b {version('e2b')}: {len(PARTS)} parts")
