"""Gives each of three tasks a sandbox of its own, and works on them at the same time."""

import json
import os
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from e2b import Sandbox

POOL = os.environ["POOL"]


def request(sandbox: Sandbox, port: int, path: str) -> urllib.request.Request:
    """Names the sandbox by its host or, where such names do not resolve, at the gateway by headers."""
    if gateway := os.environ.get("E2B_SANDBOX_URL"):
        headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": str(port)}
        return urllib.request.Request(f"{gateway}/{path}", headers=headers)
    return urllib.request.Request(f"https://{sandbox.get_host(port)}/{path}")


def work(task: str) -> str:
    # The sandbox ends after a minute, also if this program does not live that long.
    with Sandbox.create(POOL, timeout=60, metadata={"task": task}) as sandbox:
        with urllib.request.urlopen(request(sandbox, 8080, task), timeout=30) as answer:
            seen = json.load(answer)
        return f"{task}: {seen['method']} {seen['path']}"


def main() -> None:
    tasks = ["plan", "build", "test"]
    with ThreadPoolExecutor() as pool:
        for result in pool.map(work, tasks):
            print(result)


main()
