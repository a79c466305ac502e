"""Uses a Berth through E2B's Python SDK as an agent does, and checks what it gets.

python3 agent.py <directory with the SDK> [limited|busy|differences|snapshots|stops]; the pool is in POOL, the rest in the SDK's variables.
"""
import http.client
import json
import os
import secrets
import ssl
import sys
from importlib.metadata import version
from urllib.parse import urlsplit

sys.path.insert(0, sys.argv[1])

import e2b  # noqa: E402
from e2b import Sandbox, SandboxQuery, SandboxState  # noqa: E402

POOL = os.environ["POOL"]
RUN = os.path.basename(sys.argv[1])  # tells the sandboxes of several runs apart


def get(host, headers=()):
    """Sends a request to a sandbox's host, as a program without the SDK does.

    Over plain HTTP the name does not resolve, and the request goes to the gateway.
    """
    if "E2B_DOMAIN" in os.environ:
        connection = http.client.HTTPSConnection(host, timeout=30, context=ssl.create_default_context())
    else:
        connection = http.client.HTTPConnection(urlsplit(os.environ["E2B_SANDBOX_URL"]).netloc, timeout=30)
    connection.request("GET", "/", headers={"Host": host, **dict(headers)})
    answer = connection.getresponse()
    return answer.status, answer.read()


def fails(name, call, *args, words="", **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        assert type(error).__name__ == name, f"{type(error).__name__}, not {name}: {error}"
        assert words in str(error), f"{error}, not {words}"
        return
    raise AssertionError(f"no {name}")


def private():
    """A private sandbox, whose program sees another host."""
    network = {"allow_public_traffic": False, "mask_request_host": "localhost:${PORT}"}
    with Sandbox.create(POOL, timeout=60, network=network) as sandbox:
        host = sandbox.get_host(8080)
        assert get(host)[0] == 403
        assert get(host, {"e2b-traffic-access-token": "wrong"})[0] == 403
        code, body = get(host, {"e2b-traffic-access-token": sandbox.traffic_access_token})
        assert code == 200 and json.loads(body)["host"] == "localhost:8080", (code, body)
        assert sandbox.traffic_access_token not in body.decode()
        assert sandbox.is_running()
        assert Sandbox.connect(sandbox.sandbox_id).traffic_access_token == sandbox.traffic_access_token
        assert sandbox.get_info().sandbox_id == sandbox.sandbox_id


def limited():
    """Uses the key of a team that may have one sandbox."""
    with Sandbox.create(POOL, timeout=60):
        fails("RateLimitException", Sandbox.create, POOL, words="maxSandboxes")


def busy():
    """Uses a Berth without an allocator."""
    fails("ServiceBusyException", Sandbox.create, POOL)
    fails("ServiceBusyException", Sandbox.get_info, "zzzzzzzzzzzzzzzzzzzz")


def differences():
    """What Berth does otherwise than E2B. The pods of the pool have no agent, and nothing listens on its port."""
    from e2b import Secret, Template, Volume

    rules = {"example.com": [{"transform": {"headers": {"a": "b"}}}]}
    for words, options in {
        "mcp: the pods of this pool have no agent": {"mcp": {"arxiv": {"storagePath": "/a"}}},
        "autoPause: the pods of this pool have no agent": {"lifecycle": {"on_timeout": "pause", "auto_resume": True}},
        "allow_internet_access: Use a NetworkPolicy": {"allow_internet_access": False},
        "network.allowOut: Use a NetworkPolicy": {"network": {"allow_out": ["10.0.0.1"]}},
        "network.denyOut: Use a NetworkPolicy": {"network": {"deny_out": ["10.0.0.1"]}},
        "network.rules: ": {"network": {"rules": rules}},
        "network.egressProxy: ": {"network": {"egress_proxy": {"address": "example.com:1080"}}},
        "iam: ": {"iam": {"tokens": {"a": {"audience": "a", "token_type": "JWT-SVID"}}}},
        "volumeMounts: ": {"volume_mounts": {"/a": "a"}},
    }.items():
        fails("SandboxException", Sandbox.create, POOL, words=words, **options)
    fails("SandboxException", Sandbox.create, words='"base"')
    fails("SandboxException", Sandbox.create, mcp={"arxiv": {"storagePath": "/a"}}, words='"mcp-gateway"')

    sandbox, same = (Sandbox.create(
        POOL, timeout=60, secure=False, allow_internet_access=True, lifecycle={"on_timeout": "kill"},
        network={"allow_public_traffic": True}, idempotency_key=key,
    ) for key in [secrets.token_hex()] * 2)
    id = sandbox.sandbox_id
    assert same.sandbox_id == id, "the key of the claim was repeated"
    info = sandbox.get_info()
    assert (info.name, info.state, info.cpu_count, info.memory_mb) == (POOL, SandboxState.RUNNING, 0, 0), info
    assert (info.lifecycle, info.allow_internet_access, info.volume_mounts) == (None, None, []), info
    listed = Sandbox.list(query=SandboxQuery(template=POOL), order="asc")
    assert [s.sandbox_id for s in listed.next_items()] == [id]
    assert Sandbox.connect(id, on_resume="reboot").sandbox_id == id
    assert sandbox.is_running() is False
    for name, words, call, *args in [
        ("SandboxUnreachableException", "port is not open", sandbox.commands.run, "true"),
        ("TemplateException", "update the template", sandbox.get_metrics),
        ("SandboxException", "metrics-server", Sandbox.get_metrics, id),
        ("SandboxException", "cannot sleep", sandbox.pause),
        ("SandboxException", "cannot sleep", Sandbox.beta_pause, id),
        ("SandboxException", "does not fork the memory", sandbox.fork),
        ("SandboxException", "no object store", sandbox.create_snapshot),
        ("SandboxException", "no object store", Sandbox.list_snapshots().next_items),
        ("SandboxException", "no object store", Sandbox.delete_snapshot, "a"),
        ("SandboxException", "NetworkPolicy", sandbox.update_network, {"deny_out": ["10.0.0.1"]}),
        ("BuildException", "builds no images", Template.build, Template().from_image("alpine"), "a"),
        ("TemplateException", "kubectl", Template.assign_tags, "a", ["b"]),
        ("TemplateException", "404", Template.get_tags, "a"),
        ("VolumeException", "no volumes", Volume.create, "a"),
        ("VolumeException", "no volumes", Volume.list),
        ("VolumeNotFoundException", "", Volume.connect, "a"),
        ("SecretException", "no secrets", Secret.create, "a", "b"),
        ("SecretException", "no secrets", Secret.list().next_items),
        ("SecretNotFoundException", "", Secret.update, "a", "b"),
    ]:
        fails(name, call, *args, words=words)
    assert Template.exists(POOL) and not Template.exists("no-such-pool")
    assert not (Volume.destroy("a") or Secret.exists("a") or Secret.destroy("a"))
    sandbox.kill()


def main():
    metadata = {"run": RUN, "a key": "é&=%", "idle_timeout": "600"}
    sandbox = Sandbox.create(POOL, timeout=60, metadata=metadata)
    info = sandbox.get_info()
    assert info.sandbox_id == sandbox.sandbox_id
    assert info.template_id == POOL
    assert info.state == SandboxState.RUNNING
    assert info.metadata == metadata, info.metadata
    assert (info.end_at - info.started_at).total_seconds() == 60, info

    sandbox.set_timeout(120)
    later = sandbox.get_info().end_at
    assert (later - info.end_at).total_seconds() > 30, "set_timeout did not move the end"
    again = Sandbox.connect(sandbox.sandbox_id, timeout=30)
    assert again.sandbox_id == sandbox.sandbox_id
    assert again.get_info().end_at >= later, "connect brought the end forward"

    code, body = get(sandbox.get_host(8080))
    assert code == 200 and json.loads(body)["pod"], (code, body)
    assert sandbox.is_running()

    private()

    others = [Sandbox.create(POOL, metadata={"run": RUN}) for _ in range(2)]
    everything = sorted(s.sandbox_id for s in [sandbox, *others])
    page = Sandbox.list(query=SandboxQuery(metadata={"run": RUN}), limit=2)
    first = page.next_items()
    assert len(first) == 2 and page.has_next
    second = page.next_items()
    assert len(second) == 1 and not page.has_next
    assert sorted(s.sandbox_id for s in first + second) == everything
    odd = Sandbox.list(query=SandboxQuery(metadata={"a key": "é&=%", "run": RUN}, state=[SandboxState.RUNNING]))
    assert [s.sandbox_id for s in odd.next_items()] == [sandbox.sandbox_id]
    paused = Sandbox.list(query=SandboxQuery(metadata={"run": RUN}, state=[SandboxState.PAUSED]))
    assert paused.next_items() == []

    for s in [sandbox, *others]:
        assert s.kill() is True
    assert sandbox.kill() is False
    assert sandbox.is_running() is False
    code, body = get(sandbox.get_host(8080))
    assert code == (502 if "E2B_STATUSES" in os.environ else 410)
    if "E2B_STATUSES" in os.environ:
        assert json.loads(body) == {"sandboxId": sandbox.sandbox_id, "message": "The sandbox was not found", "code": 502}
    not_found = "SandboxNotFoundException" if hasattr(e2b, "SandboxNotFoundException") else "NotFoundException"
    fails(not_found, Sandbox.connect, sandbox.sandbox_id)
    fails(not_found, sandbox.set_timeout, 1)
    fails("AuthenticationException", Sandbox.create, POOL, api_key="e2b_00000000000000000000")
    fails("SandboxException", Sandbox.create, "no-such-pool")
    fails("SandboxException", Sandbox.create, POOL, envs={"A": "b"}, words="envVars: the pods of this pool have no agent")


def snapshots():
    """Makes snapshots of the files in DIR, and sandboxes from them."""
    name, file = f"s-{RUN.replace('/', '-').lower()}"[:60].rstrip("-"), os.environ["DIR"] + "/file"
    sandbox = Sandbox.create(POOL, timeout=300)
    for round in range(2):  # the second one replaces the first one
        sandbox.files.write(file, f"round {round}")
        made = sandbox.create_snapshot(name=name)
        assert (made.snapshot_id, made.names) == (f"{name}:default", [f"{name}:default"]), made
        sandbox.files.write(file, "later")
        again = Sandbox.create(made.snapshot_id, timeout=60, envs={"A": "b"})
        assert again.files.read(file) == f"round {round}"
        assert again.commands.run("echo $A").stdout == "b\n"
        assert again.kill()
    unnamed = Sandbox.create_snapshot(sandbox.sandbox_id)
    listed = [s.snapshot_id for s in sandbox.list_snapshots().next_items()]
    assert sorted(listed) == sorted([made.snapshot_id, unnamed.snapshot_id]), listed
    pages = Sandbox.list_snapshots(sandbox_id=sandbox.sandbox_id, limit=1)
    assert len(pages.next_items()) == 1 and pages.has_next and len(pages.next_items()) == 1 and not pages.has_next
    assert sandbox.kill()
    again = Sandbox.create(unnamed.snapshot_id, timeout=60)
    assert again.kill(), "a snapshot outlives its sandbox"
    for s in [made, unnamed]:
        assert Sandbox.delete_snapshot(s.snapshot_id) is True
        assert Sandbox.delete_snapshot(s.snapshot_id) is False
    fails("SandboxException", Sandbox.create, made.snapshot_id, words="no such snapshot")


def stops():
    """Has a sandbox lose its memory and keep the files in DIR."""
    file = os.environ["DIR"] + "/file"
    lifecycle = {"on_timeout": {"action": "pause", "mode": "filesystem"}}
    sandbox = Sandbox.create(POOL, timeout=300, envs={"A": "b"}, metadata={"run": RUN}, lifecycle=lifecycle)
    id = sandbox.sandbox_id
    for round in range(3):
        sandbox.files.write(file, f"round {round}")
        if round == 2:
            assert sandbox.pause() is True  # with its memory
        assert sandbox.pause(mode="filesystem") is True
        assert Sandbox.pause(id, mode="filesystem") is False
        assert Sandbox.get_info(id).state == SandboxState.PAUSED
        paused = Sandbox.list(query=SandboxQuery(metadata={"run": RUN}, state=[SandboxState.PAUSED])).next_items()
        assert [s.sandbox_id for s in paused] == [id], paused
        with open(file, "w") as shared:  # sandboxes of the test share the files of this machine
            shared.write("later")
        again = Sandbox.connect(id, timeout=300)
        assert again.sandbox_id == id
        assert again.files.read(file) == f"round {round}"
        assert sandbox.commands.run("echo $A").stdout == "b\n"
    assert sandbox.pause(mode="filesystem") is True
    assert Sandbox.kill(id) is True
    assert Sandbox.kill(id) is False


modes = {"limited": limited, "busy": busy, "differences": differences, "snapshots": snapshots, "stops": stops}
modes.get(sys.argv[2] if len(sys.argv) > 2 else "", main)()
print(f"e2b {version('e2b')}: ok")
