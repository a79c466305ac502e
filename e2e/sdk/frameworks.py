"""Lets frameworks use sandboxes through E2B's Python SDKs: each creates or gets one, runs something and ends it.

python3 frameworks.py <directory with them>; the pool is in POOL, a directory in DIR, the rest in the SDK's variables.
"""
import os
import sys
from importlib.metadata import version

sys.path.insert(0, sys.argv[1])

from e2b import Sandbox  # noqa: E402
from langchain_e2b import E2BSandbox  # noqa: E402
from smolagents import FinalAnswerTool, LogLevel, tool  # noqa: E402
from smolagents.monitoring import AgentLogger  # noqa: E402
from smolagents.remote_executors import E2BExecutor  # noqa: E402
from smolagents.utils import AgentError  # noqa: E402

POOL, DIR = os.environ["POOL"], os.environ["DIR"]


@tool
def twice(number: int) -> int:
    """Doubles a number.

    Args:
        number: What is doubled.
    """
    return number * 2


def smolagents():
    executor = E2BExecutor([], AgentLogger(level=LogLevel.OFF), template=POOL, timeout=300)
    executor.send_variables({"given": [1, 2]})
    executor.send_tools({"twice": twice, "final_answer": FinalAnswerTool()})
    out = executor("print('log')\nkept = sum(given)\nkept")
    assert (out.output, out.logs, out.is_final_answer) == ("3", "log\n", False), out
    out = executor("final_answer(twice(kept))")
    assert out.output == 6 and out.is_final_answer, out
    try:
        executor("1 / 0")
        raise AssertionError("no error")
    except AgentError as e:
        assert "ZeroDivisionError" in str(e), e
    executor.cleanup()
    return "smolagents", 5


def langchain():
    sandbox = Sandbox.create(POOL, timeout=300)
    backend = E2BSandbox(sandbox=sandbox, workdir=DIR)
    run = backend.execute("echo out; exit 3")
    assert (run.output.strip(), run.exit_code) == ("out", 3), run
    path = DIR + "/a.txt"
    assert not backend.write(path, "one\ntwo\n").error
    assert not backend.edit(path, "two", "three").error
    assert "three" in str(backend.read(path)), backend.read(path)
    assert [path] == [m["path"] for m in backend.grep("three", DIR).matches], backend.grep("three", DIR)
    (up,) = backend.upload_files([(DIR + "/b.bin", b"\0\1")])
    (down,) = backend.download_files([DIR + "/b.bin"])
    assert not up.error and down.content == b"\0\1", (up, down)
    sandbox.kill()
    return "langchain-e2b", 8


for framework in smolagents, langchain:
    name, steps = framework()
    print(f"{name} {version(name)}: {steps} steps")
