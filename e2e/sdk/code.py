"""Runs code through e2b-code-interpreter, and checks what it gets.

python3 code.py <directory with the SDK>; the pool is in POOL, the rest in the SDK's variables.
"""
import asyncio
import base64
import http.client
import os
import sys
from importlib.metadata import version
from urllib.parse import urlsplit

sys.path.insert(0, sys.argv[1])

from e2b import NotFoundException, SandboxException, TimeoutException  # noqa: E402
from e2b_code_interpreter import AsyncSandbox, Sandbox  # noqa: E402

POOL, DIR = os.environ["POOL"], os.environ["DIR"]


def raises(kind, f, says=""):
    try:
        f()
    except kind as e:
        assert says in str(e), e
        return
    raise AssertionError(f"no {kind.__name__}")


def results(s):
    lines = []
    run = s.run_code(
        "import sys\nx = 40\nprint('out')\nprint('err', file=sys.stderr)\nx + 2",
        on_stdout=lambda m: lines.append((m.line, m.error)), on_stderr=lambda m: lines.append((m.line, m.error)),
    )
    assert (run.text, run.execution_count, run.error) == ("42", 1, None), run
    # A busy kernel sends a line in pieces.
    assert ("".join(run.logs.stdout), "".join(run.logs.stderr)) == ("out\n", "err\n"), run
    assert ["".join(text for text, failed in lines if failed is kind) for kind in (False, True)] == ["out\n", "err\n"], lines
    assert s.run_code("x").text == "40", "no state"
    assert s.run_code("'text'").text == "text"
    run = s.run_code("print(1)\ndef f():\n    return 1 / 0\nf()\nprint(2)")
    assert (run.error.name, run.error.value, "".join(run.logs.stdout)) == ("ZeroDivisionError", "division by zero", "1\n"), run
    assert "line 3" in run.error.traceback, run.error.traceback
    assert s.run_code("def (").error.name == "SyntaxError"
    assert s.run_code("input()").error.name == "StdinNotImplementedError"


def rich(s):
    run = s.run_code(
        "from IPython.display import HTML, JSON, Latex, Markdown, SVG, display\n"
        "for one in HTML('<b>1</b>'), JSON({'a': [1, None]}), Latex('$x$'), Markdown('# t'), SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"/>'): display(one)\n"
        "display({'a/b': 'other', 'text/plain': 'plain'}, raw=True)"
    )
    html, json, latex, markdown, svg, other = run.results
    assert (html.html, latex.latex, markdown.markdown, json.json) == ("<b>1</b>", "$x$", "# t", {"a": [1, None]}), run
    assert svg.svg.startswith("<svg") and other.extra == {"a/b": "other"} and not other.is_main_result, run
    run = s.run_code("import pandas\npandas.DataFrame({'a': [1, 2], 'b': ['x', None]}, index=[7, 7])")
    assert run.results[0].data == {"a": [1, 2], "b": ["x", None]}, run.results[0].data
    assert "<table" in run.results[0].html, run
    run = s.run_code("pandas.DataFrame({'a': range(100_001)})")
    assert run.results[0].data is None and "<table" in run.results[0].html, run


def charts(s):
    head = "import matplotlib.pyplot as plt\n"
    run = s.run_code(head + "plt.title('t'); plt.xlabel('time (s)'); plt.plot([1, 2, float('nan')], [3, 4, 5], label='l'); plt.show()")
    (shown,) = run.results
    assert base64.b64decode(shown.png).startswith(b"\x89PNG"), "no PNG"
    chart = shown.chart
    assert (chart.type.value, chart.title, chart.x_label, chart.x_unit) == ("line", "t", "time (s)", "s"), chart
    assert [tuple(p) for p in chart.elements[0].points[:2]] == [(1, 3), (2, 4)], chart.elements[0].points
    for code, kind in {
        "plt.bar(['a', 'b'], [1, 2])": "bar", "plt.scatter([1], [2])": "scatter", "plt.pie([1, 2], labels=['a', 'b'])": "pie",
        "plt.boxplot([range(100), range(50)], patch_artist=True)": "box_and_whisker",
        "_, both = plt.subplots(1, 2); both[0].plot([1]); both[1].bar(['a'], [1])": "superchart",
    }.items():
        run = s.run_code(head + code + "\nplt.show()")
        assert run.results[0].chart.type.value == kind and not run.logs.stderr, (kind, run)
    run = s.run_code(head + "plt.bar(['a', 'b'], [1, 2]); plt.show()")
    assert [(e.label, e.value) for e in run.results[0].chart.elements] == [("a", 1), ("b", 2)], run


def variables(s):
    ask = "import os; [os.environ.get(n) for n in ('CLAIM', 'RUN')]"
    assert s.run_code(ask, envs={"RUN": "r"}).text == "['of the claim', 'r']"
    assert s.run_code(ask).text == "['of the claim', None]"
    assert s.run_code("'RUN' in os.environ", envs={"RUN": "r", "CLAIM": "other"}).text == "True"
    assert s.run_code(ask).text == "['of the claim', None]"
    run = s.run_code("1 / 0", envs={"RUN": "r"})
    assert run.error and s.run_code(ask).text == "['of the claim', None]"
    raises(SandboxException, lambda: s.run_code("1", envs={"a b": "1"}), "env_vars")


def bash(s):
    run = s.run_code('y=1; echo "$CLAIM $RUN"; pwd', language="bash", envs={"RUN": "it's"})
    assert "".join(run.logs.stdout).split("\n")[0] == "of the claim it's", run
    assert "".join(s.run_code("echo [$y] [$RUN]", language="Bash").logs.stdout) == "[1] []\n"
    run = s.run_code("echo a; (exit 3)", language="bash")
    assert (run.error.value, "".join(run.logs.stdout)) == ("3", "a\n"), run
    raises(SandboxException, lambda: s.run_code("1", language="cobol"), "must be one of python, bash")


def contexts(s):
    a = s.create_code_context(cwd=DIR)
    b = s.create_code_context(language="bash", cwd=DIR)
    assert (a.language, a.cwd, b.language) == ("python", DIR, "bash")
    assert s.run_code("z = 1; import os; os.getcwd()", context=a).text == DIR
    assert "".join(s.run_code("pwd", context=b).logs.stdout) == DIR + "\n"
    assert s.run_code("z").error.name == "NameError", "contexts share a state"
    assert {a.id, b.id} < {c.id for c in s.list_code_contexts()}
    s.restart_code_context(a)
    assert s.run_code("z", context=a).error.name == "NameError", "a restart keeps the state"
    assert s.run_code("import os; os.getcwd() + os.environ['CLAIM']", context=a).text == DIR + "of the claim"
    s.remove_code_context(a)
    s.remove_code_context(b)
    raises(NotFoundException, lambda: s.run_code("1", context=a), "not found")
    raises(NotFoundException, lambda: s.remove_code_context(a))
    raises(SandboxException, lambda: s.create_code_context(cwd=DIR + "/missing"), "is no directory")
    s.run_code("kept = 1")
    some = [s.create_code_context() for _ in range(8 - len(s.list_code_contexts()))]
    raises(SandboxException, s.create_code_context, "8 contexts")
    for one in some:
        s.remove_code_context(one)
    assert s.run_code("kept").text == "1"


def ends(s):
    """A run that timed out is interrupted, and the next one begins."""
    s.run_code("kept = 1; import time")
    raises(TimeoutException, lambda: s.run_code("time.sleep(600)", timeout=1))
    assert s.run_code("kept").text == "1", "an interrupt loses the state"
    raises(TimeoutException, lambda: s.run_code("import subprocess; subprocess.run(['sleep', '600'])", timeout=1))
    assert s.run_code("kept").text == "1"
    raises(TimeoutException, lambda: s.run_code("sleep 600", language="bash", timeout=1))
    assert "".join(s.run_code("echo 1", language="bash").logs.stdout) == "1\n"
    raises(TimeoutException, lambda: s.run_code(
        "while True:\n  try: time.sleep(600)\n  except KeyboardInterrupt: pass", timeout=1))
    assert s.run_code("kept").error.name == "NameError", "code that cannot be interrupted goes on"
    run = s.run_code("import os; os._exit(1)")
    assert run.error.name == "KernelDied", run
    assert s.run_code("1").text == "1"


def output(s):
    run = s.run_code("for _ in range(12): print('x' * (1 << 20))\n7")
    size = sum(map(len, run.logs.stdout))
    assert 1 << 20 < size <= 8 << 20, size
    assert run.text == "7" and "was dropped" in "".join(run.logs.stderr), run.logs.stderr
    assert s.run_code("1").text == "1"


def agent(s):
    s.files.write(DIR + "/file", "text")
    assert s.run_code(f"open({DIR + '/file'!r}).read()").text == "text"
    assert s.commands.run("echo $CLAIM").stdout == "of the claim\n"


def private(_):
    s = Sandbox.create(POOL, timeout=300, network={"allow_public_traffic": False})
    assert s.run_code("1 + 1").text == "2"
    s.create_code_context()
    gateway = urlsplit(os.environ["E2B_SANDBOX_URL"])
    call = http.client.HTTPConnection(gateway.hostname, gateway.port, timeout=60)
    call.request("POST", "/execute", '{"code":"1"}', {"E2b-Sandbox-Id": s.sandbox_id, "E2b-Sandbox-Port": "49999"})
    assert call.getresponse().status == 403, "the gateway lets code in without the token"
    call.close()
    s.kill()


def asynchronous(_):
    async def run():
        s = await AsyncSandbox.create(POOL, timeout=300)
        first, second = await asyncio.gather(s.run_code("a = 1"), s.run_code("import time; time.sleep(0.1); 2"))
        assert second.text == "2" and (await s.run_code("a")).text == "1", (first, second)
        # Of more than 64 runs only those beyond it have an answer.
        runs = [asyncio.create_task(s.run_code("time.sleep(600)")) for _ in range(65)]
        (refused,), _ = await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
        assert "64 runs" in str(refused.exception()), refused
        await s.kill()
        await asyncio.gather(*runs, return_exceptions=True)

    asyncio.run(run())


def main():
    steps = [results, rich, charts, variables, bash, contexts, ends, output, agent, private, asynchronous]
    s = Sandbox.create(POOL, timeout=600, envs={"CLAIM": "of the claim", "HOME": DIR})
    for step in steps:
        try:
            step(s)
        except BaseException:
            print("in", step.__name__, file=sys.stderr)
            raise
    s.kill()
    print(f"e2b-code-interpreter {version('e2b-code-interpreter')}: {len(steps)} steps")


main()
