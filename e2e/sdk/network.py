"""Changes what a sandbox may reach through E2B's Python SDK, and checks what it reaches.

python3 network.py <directory with the SDK> sync|async; the pool is in POOL, the rest in the SDK's variables. Two
origins have the addresses ONE and TWO, which count as outside, and the port PORT. Their names are one.example and
two.example, and those below.
"""
import asyncio
import inspect
import os
import sys
from importlib.metadata import version

sys.path.insert(0, sys.argv[1])

import e2b  # noqa: E402

Sandbox = e2b.AsyncSandbox if sys.argv[2] == "async" else e2b.Sandbox
POOL, PORT, ONE, TWO = (os.environ[name] for name in ("POOL", "PORT", "ONE", "TWO"))


def everything(context):
    return [context.all_traffic]


async def do(answer):
    """Waits for a call of the asynchronous SDK. That of the synchronous one has been waited for."""
    return await answer if inspect.isawaitable(answer) else answer


async def fails(name, call, *args, words="", **kwargs):
    try:
        await do(call(*args, **kwargs))
    except Exception as error:
        assert type(error).__name__ == name, f"{type(error).__name__}, not {name}: {error}"
        assert words in str(error), f"{error}, not {words}"
        return
    raise AssertionError(f"no {name}")


async def create(**options):
    # A shell reads no profile of this machine.
    return await do(Sandbox.create(POOL, timeout=300, envs={"HOME": "/"}, **options))


def ask(host, scheme="https"):
    # A pod is a process of this machine: its requests need its address.
    return f"curl --interface $POD_IP -sk --max-time 20 -w '%{{http_code}}' {scheme}://{host}:{PORT}/"


async def reaches(sandbox, *hosts):
    for host in hosts:
        result = await do(sandbox.commands.run(ask(host)))
        assert (result.exit_code, result.stdout) == (0, "origin 200"), (host, result)


async def misses(sandbox, *hosts):
    for host in hosts:
        try:
            result = await do(sandbox.commands.run(ask(host)))
        except e2b.CommandExitException as error:
            assert error.exit_code == 56 and error.stdout == "000", (host, error)  # the proxy refuses the tunnel
            continue
        raise AssertionError(f"{host}: {result}")


async def addresses():
    """Addresses and ranges in both lists."""
    sandbox = await create(network={"deny_out": everything, "allow_out": [ONE]})
    await reaches(sandbox, ONE)
    await misses(sandbox, TWO, "one.example", "two.example")
    await do(sandbox.kill())
    sandbox = await create(network={"deny_out": [TWO]})
    await misses(sandbox, TWO, "two.example")
    await reaches(sandbox, ONE, "one.example")
    await do(sandbox.kill())
    sandbox = await create(network={"deny_out": everything})
    await misses(sandbox, ONE, TWO)
    result = await do(sandbox.commands.run(ask(ONE, "http")))
    assert '"reason":"egress_refused"' in result.stdout and result.stdout.endswith("403"), result
    await do(sandbox.kill())
    sandbox = await create(network={"deny_out": everything, "allow_out": [ONE, TWO]})
    await reaches(sandbox, ONE, TWO)
    await do(sandbox.kill())
    sandbox = await create(network={"deny_out": ["127.0.0.0/8"], "allow_out": ["127.1.0.0/16"]})
    await reaches(sandbox, ONE, "one.example")
    await misses(sandbox, TWO, "two.example")
    await do(sandbox.kill())


async def names():
    """Names and wildcards, which only the list of what is allowed has."""
    sandbox = await create(network={"deny_out": everything, "allow_out": ["one.example", "*.two.example"]})
    await reaches(sandbox, "one.example", "ONE.example", "a.two.example", "a.b.two.example")
    await misses(sandbox, "two.example", "a.one.example", "one.example.two.example.org", ONE, TWO)
    await do(sandbox.kill())


async def internet():
    """What allow_internet_access says."""
    for options in {}, {"allow_internet_access": True}, {"allow_internet_access": False}:
        refused = options.get("allow_internet_access") is False
        sandbox = await create(**options)
        await (misses if refused else reaches)(sandbox, ONE, "two.example")
        info = await do(sandbox.get_info())
        assert info.allow_internet_access is (False if refused else None), info
        await do(sandbox.kill())


async def updates():
    """A change replaces the rules as a whole, and counts when the call returns."""
    sandbox = await create()
    await reaches(sandbox, ONE, TWO)
    await do(sandbox.update_network({"deny_out": [TWO]}))
    await misses(sandbox, TWO)
    await reaches(sandbox, ONE)
    await do(sandbox.update_network({"deny_out": everything, "allow_out": ["two.example"]}))
    await misses(sandbox, ONE, TWO)
    await reaches(sandbox, "two.example")
    await do(Sandbox.update_network(sandbox.sandbox_id, {"allow_internet_access": False}))
    await misses(sandbox, ONE, "two.example")
    await do(sandbox.kill())
    sandbox = await create(network={"deny_out": everything, "allow_out": [ONE]})
    await misses(sandbox, TWO)
    await do(sandbox.update_network({}))
    await reaches(sandbox, ONE, TWO)
    await do(sandbox.kill())


async def shown():
    """What is shown, and what is refused."""
    network = {"deny_out": everything, "allow_out": ["one.example", ONE]}
    sandbox = await create(network=network)
    for _ in range(2):
        info = (await do(sandbox.get_info())).network
        assert (info["allow_out"], info["deny_out"]) == (["one.example", ONE], ["0.0.0.0/0"]), info
        await fails("SandboxException", sandbox.update_network, {"deny_out": ["no address"]}, words="denyOut")
        await fails("SandboxException", sandbox.update_network, {"allow_out": ["two.example"]}, words="0.0.0.0/0")
    await reaches(sandbox, ONE, "one.example")
    await misses(sandbox, "two.example")
    await fails("SandboxException", create, network={"deny_out": ["two.example"]}, words="denyOut")
    await do(sandbox.kill())
    await fails("SandboxNotFoundException", sandbox.update_network, {})


async def main():
    parts = (addresses, names, internet, updates, shown)
    for part in parts:
        await part()
    print(f"e2b {version('e2b')}: {len(parts)} parts")


asyncio.run(main())
