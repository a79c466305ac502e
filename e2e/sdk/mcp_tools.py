"""Uses the tools of berth mcp through the Python client of the protocol, in each form of the protocol that it speaks.

python3 mcp_tools.py <directory with the client> <program berth|URL>; the pool is in POOL, the key for the URL in KEY.
"""
import asyncio
import os
import sys

sys.path.insert(0, sys.argv[1])

import httpx2  # noqa: E402
from mcp import Client, StdioServerParameters  # noqa: E402
from mcp.client.stdio import stdio_client  # noqa: E402
from mcp.client.streamable_http import streamable_http_client  # noqa: E402


async def session(transport, mode):
    async with Client(transport, mode=mode) as client:
        names = {tool.name for tool in (await client.list_tools()).tools}
        assert {"create_sandbox", "run_command", "expose_port"} <= names, names

        async def call(name, **arguments):
            result = await client.call_tool(name, arguments)
            assert not result.is_error, result
            return result.structured_content

        sandbox = (await call("create_sandbox", pool=os.environ["POOL"]))["sandboxID"]
        ran = await call("run_command", sandboxID=sandbox, command="echo out; echo err >&2; exit 3")
        assert ran == {"exitCode": 3, "stdout": {"text": "out\n"}, "stderr": {"text": "err\n"}}, ran
        refused = await client.call_tool("run_command", {"sandboxID": sandbox, "command": "true", "timeout": 0})
        assert refused.is_error and "timeout" in refused.content[0].text, refused
        assert sandbox in (await call("expose_port", sandboxID=sandbox, port=8080))["url"]
        assert (await call("kill_sandbox", sandboxID=sandbox)) == {"killed": sandbox}
        return client.protocol_version


async def main():
    spoken = set()
    for mode in ["legacy", "auto"]:
        if sys.argv[2].startswith("http"):
            async with httpx2.AsyncClient(headers={"Authorization": "Bearer " + os.environ["KEY"]}, timeout=60) as http:
                spoken.add(await session(streamable_http_client(sys.argv[2], http_client=http), mode))
        else:
            server = StdioServerParameters(command=sys.argv[2], args=["mcp"], env=dict(os.environ))
            spoken.add(await session(stdio_client(server), mode))
    assert len(spoken) == 2, spoken


asyncio.run(main())
