"""Gives each of three tasks a sandbox of its own, and works on them at the same time."""

import json
import os
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from e2b import Sandbox

POOL = os.environ["POOL"]


def work(task: str) -> str:
    # The sandbox ends after a minute, also if this program does not live that long.
    with Sandbox.create(POOL, timeout=60, metadata={"task": task}) as sandbox:
        url = f"https://{sandbox.get_host(8080)}/{task}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            seen = json.load(answer)
        return f"{task}: {seen['method']} {seen['path']}"


def main() -> None:
    tasks = ["plan", "build", "test"]
    with ThreadPoolExecutor() as pool:
        for result in pool.map(work, tasks):
            print(result)


main()
