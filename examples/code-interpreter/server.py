"""The code interpreter of a sandbox: what runCode of E2B's SDKs calls on port 49999.

GET /health, POST /execute (one JSON object a line), GET and POST /contexts, DELETE /contexts/{id},
POST /contexts/{id}/restart. A context is a Jupyter kernel. It runs one code at a time. When a client leaves,
its code is interrupted.

HOST is the address to listen on, 0.0.0.0 by default. The agent there is asked for the variables of the sandbox.
"""
import asyncio
import json
import logging
import os
import queue
import re
import sys
import tempfile
import time
import uuid

import aiohttp
import zmq.asyncio
from aiohttp import web
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager

PORT, AGENT_PORT = 49999, 49983
LANGUAGES = ("python", "bash")
MAX_CONTEXTS = 8  # each is a process, of 60 MB for Python
MAX_RUNS = 64  # with those that wait for their context, and those whose client reads slowly
MAX_BODY = 16 << 20  # bytes of a request
MAX_OUTPUT = 8 << 20  # bytes that one run prints, and bytes of its results. They may wait for a slow client
MAX_ERROR = 1 << 20  # characters of a traceback, and of the text of an error
START = 60  # seconds in which a kernel starts
AGENT = 5  # seconds in which the agent answers
INTERRUPT = 15  # seconds from an interrupt to the end of the run. After them the kernel is ended
SILENCE = 1  # seconds without a message of a kernel. After them it is asked whether it lives

FIELDS = {
    "text/plain": "text", "text/html": "html", "text/markdown": "markdown", "image/svg+xml": "svg", "image/png": "png",
    "image/jpeg": "jpeg", "application/pdf": "pdf", "text/latex": "latex", "application/json": "json",
    "application/javascript": "javascript", "e2b/data": "data", "e2b/chart": "chart",
}
KERNEL = os.path.join(os.path.dirname(os.path.abspath(__file__)), "kernel.py")
HOST = os.environ.get("HOST", "0.0.0.0")
log = logging.getLogger("code-interpreter")


class Specs(KernelSpecManager):
    """The kernels of this program, whatever else is installed."""

    def get_kernel_spec(self, kernel_name):
        argv = [sys.executable, KERNEL, kernel_name, "--HistoryManager.enabled=False", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, language=kernel_name)


class Run:
    """What a client gets to read: lines of bytes, and None at the end."""

    def __init__(self, most=MAX_OUTPUT):
        self.lines, self.left, self.dropped = asyncio.Queue(), {"result": most, "stream": most}, False

    def add(self, kind, of=None, **fields):
        """Adds a line. of is what bounds it: once that is used up, all that follows of it is dropped."""
        if of == "stream" and len(fields["text"]) > self.left[of]:
            fields["text"], self.dropped = fields["text"][: self.left[of]], True
            if not fields["text"]:
                return
        try:
            line = json.dumps({"type": kind, **fields}, allow_nan=False)
        except ValueError:  # JSON has no NaN
            line = json.dumps(json.loads(json.dumps({"type": kind, **fields}), parse_constant=lambda _: None))
        line = line.encode() + b"\n"
        if of:
            if of == "result" and len(line) > self.left[of]:
                self.left[of], self.dropped = 0, True
                return
            self.left[of] = max(0, self.left[of] - len(line))
        self.lines.put_nowait(line)

    def fail(self, name, value, traceback=""):
        self.add("error", name=name, value=value[:MAX_ERROR], traceback=traceback[-MAX_ERROR:])

    def end(self):
        if self.dropped:
            text = f"what is beyond {MAX_OUTPUT >> 20} MiB of output, or of results, was dropped\n"
            self.add("stderr", text=text, timestamp=time.time_ns())
        self.lines.put_nowait(None)


class Context:
    """A kernel. The holder of the lock uses it, and anyone may kill it."""

    def __init__(self, language, cwd, files):
        self.id, self.language, self.cwd, self.files = uuid.uuid4().hex, language, cwd, files
        self.lock, self.runs, self.manager, self.client, self.removed = asyncio.Lock(), set(), None, None, False

    def shown(self):
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    async def kill(self):
        manager, self.manager = self.manager, None
        if manager:
            await manager.shutdown_kernel(now=True)

    async def end(self):
        await self.kill()
        if self.client:
            self.client.stop_channels()
            self.client = None

    async def start(self):
        await self.end()
        self.knows_sandbox = False
        manager = AsyncKernelManager(
            context=zmq.asyncio.Context.instance(), kernel_name=self.language, kernel_spec_manager=Specs(), transport="ipc",
            connection_file=os.path.join(self.files, uuid.uuid4().hex[:8] + ".json"),
        )
        try:
            await manager.start_kernel(cwd=self.cwd)
            self.manager, self.client = manager, manager.client()
            self.client.start_channels(stdin=False, hb=False)
            await self.client.wait_for_ready(timeout=START)
        except BaseException:
            self.manager = manager
            await self.end()
            raise

    async def run(self, code, run, of_run, of_sandbox):
        """Runs code as soon as the kernel is free. If it is cancelled, the kernel is free again at the end."""
        async with self.lock:
            if self.removed:
                return run.fail("KernelEnded", "the context was removed")
            if not self.manager or not await self.manager.is_alive():
                await self.start()
            metadata = {"run": of_run, "sandbox": {} if self.knows_sandbox else of_sandbox}
            content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
            message = self.client.session.msg("execute_request", content, metadata=metadata)
            self.client.shell_channel.send(message)
            self.knows_sandbox = True
            manager, id = self.manager, message["header"]["msg_id"]
            try:
                await self.follow(manager, id, run)
            except asyncio.CancelledError:
                await self.interrupt(manager, id)
                raise

    async def follow(self, manager, id, run):
        """Passes on what a kernel says about a message, until it is idle again."""
        while True:
            try:
                message = await self.client.get_iopub_msg(timeout=SILENCE)
            except queue.Empty:
                if manager is not self.manager:
                    return run.fail("KernelEnded", "the context was restarted or removed")
                if not await manager.is_alive():
                    return run.fail("KernelDied", "the process that ran the code has ended. The next run gets a new one")
                if await self.replied(id):  # ZeroMQ drops messages of a kernel that are not read fast enough
                    return
                continue
            if message["parent_header"].get("msg_id") != id:
                continue
            content = message["content"]
            match message["msg_type"]:
                case "stream":
                    run.add(content["name"], "stream", text=content["text"], timestamp=time.time_ns())
                case "display_data" | "execute_result" as kind:
                    run.add("result", "result", is_main_result=kind == "execute_result", **result(content["data"]))
                case "error":
                    run.fail(content["ename"], content["evalue"], "\n".join(content["traceback"]))
                case "execute_input":
                    run.add("number_of_executions", execution_count=content["execution_count"])
                case "status" if content["execution_state"] == "idle":
                    await self.replied(id)
                    return

    async def replied(self, id):
        """Reads the replies that are there, and reports whether that to a message is among them."""
        found = False
        while await self.client.shell_channel.msg_ready():
            message = await self.client.get_shell_msg()
            found = found or message["parent_header"].get("msg_id") == id
        return found

    async def interrupt(self, manager, id):
        """Interrupts code. An interrupt before the code has begun has no effect, so it is repeated."""
        waits = asyncio.create_task(self.follow(manager, id, Run(0)))
        try:
            async with asyncio.timeout(INTERRUPT):
                while not waits.done():
                    if manager is self.manager:
                        await manager.interrupt_kernel()
                    await asyncio.wait({waits}, timeout=1)
        except TimeoutError:
            log.warning("context %s: the code cannot be interrupted, so its process is ended", self.id)
            await self.kill()
        finally:
            waits.cancel()


def result(data):
    fields = {field: data.pop(kind) for kind, field in FIELDS.items() if kind in data}
    text = fields.get("text", "")
    if len(text) > 1 and text[0] == text[-1] == "'":
        fields["text"] = text[1:-1]
    return {**fields, "extra": data} if data else fields


class Interpreter:
    def __init__(self):
        self.files, self.contexts, self.defaults, self.creating = "", {}, {}, asyncio.Lock()
        self.of_sandbox = None  # the variables of the sandbox, once they are known
        self.runs = 0

    async def create(self, language, cwd):
        """Makes a context. The caller holds the lock."""
        if len(self.contexts) >= MAX_CONTEXTS:
            raise refusal(429, f"this sandbox has {MAX_CONTEXTS} contexts. Remove one first")
        context = Context(language, cwd, self.files)
        await context.start()
        self.contexts[context.id] = context
        return context

    async def default(self, language):
        async with self.creating:
            if (context := self.contexts.get(self.defaults.get(language))) is None:
                context = await self.create(language, os.getcwd())
                self.defaults[language] = context.id
            return context

    async def variables(self, token):
        """Asks the agent. A sandbox without one has no variables. Reading them needs the token."""
        if self.of_sandbox is not None:
            return self.of_sandbox
        url = f"http://{'localhost' if HOST == '0.0.0.0' else HOST}:{AGENT_PORT}/envs"
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(AGENT)) as session, session.get(
                url, headers={"X-Access-Token": token} if token else {}
            ) as answer:
                if answer.status == 401:
                    return {}
                answer.raise_for_status()
                found = await answer.json(content_type=None)
        except aiohttp.ClientConnectorError:
            found = {}
        except (aiohttp.ClientError, TimeoutError, ValueError) as e:
            raise refusal(500, f"the agent did not tell the variables of the sandbox: {e!r}") from e
        self.of_sandbox = found
        return found

    # The handlers.

    async def health(self, _):
        return web.Response(text="OK")

    async def execute(self, request):
        body = await fields(request)
        language, id = body.get("language"), body.get("context_id")
        code, of_run = body.get("code"), body.get("env_vars") or {}
        if not isinstance(code, str):
            raise refusal(400, "code: must be a string")
        if not isinstance(of_run, dict) or not all(
            NAME.fullmatch(name) and isinstance(value, str) and "\0" not in value for name, value in of_run.items()
        ):
            raise refusal(400, "env_vars: must have names of letters, digits and _, and strings without NUL")
        if id and language:
            raise refusal(400, "context_id and language: give one of them")
        context = self.named(id) if id else await self.default(known(language))
        of_sandbox = await self.variables(request.headers.get("X-Access-Token"))
        if self.runs >= MAX_RUNS:
            raise refusal(429, f"{MAX_RUNS} runs have not ended yet")
        run = Run()

        async def work():
            try:
                await context.run(code, run, of_run, of_sandbox)
            except Exception as e:
                log.exception("a run failed")
                run.fail("InternalError", repr(e))
            finally:
                run.end()

        task = asyncio.create_task(work())
        context.runs.add(task)  # it may outlive this handler, until the code has ended
        task.add_done_callback(context.runs.discard)
        self.runs += 1
        try:
            response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", **CORS})
            await response.prepare(request)
            while (line := await run.lines.get()) is not None:
                await response.write(line)
        finally:
            self.runs -= 1
            task.cancel()
        return response

    async def list(self, _):
        return web.json_response([context.shown() for context in self.contexts.values()])

    async def add(self, request):
        body = await fields(request)
        cwd = body.get("cwd") or os.getcwd()
        if not isinstance(cwd, str) or not os.path.isdir(cwd):
            raise refusal(400, f"cwd: {cwd!r} is no directory")
        language = known(body.get("language"))
        async with self.creating:
            return web.json_response((await self.create(language, cwd)).shown(), status=201)

    async def remove(self, request):
        context = self.named(request.match_info["id"])
        del self.contexts[context.id]
        context.removed = True
        await context.kill()
        async with context.lock:
            await context.end()
        return web.Response(status=204)

    async def restart(self, request):
        context = self.named(request.match_info["id"])
        await context.kill()
        async with context.lock:
            await context.start()
        return web.json_response(context.shown())

    def named(self, id):
        if id not in self.contexts:
            raise refusal(404, f"context {id} not found")
        return self.contexts[id]


NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
INTERPRETER = web.AppKey("interpreter", Interpreter)
CORS = {"Access-Control-Allow-Origin": "*", "Access-Control-Allow-Methods": "*", "Access-Control-Allow-Headers": "*"}


@web.middleware
async def cross_origin(request, handler):
    """Pages of any origin may call: a sandbox has no cookies, and the gateway asks for the token."""
    try:
        response = await handler(request)
    except web.HTTPException as e:
        e.headers.update(CORS)
        raise
    if not response.prepared:
        response.headers.update(CORS)
    return response


def refusal(status, text):
    return {400: web.HTTPBadRequest, 404: web.HTTPNotFound, 429: web.HTTPTooManyRequests,
            500: web.HTTPInternalServerError}[status](text=text + "\n")


async def fields(request):
    try:
        body = json.loads(await request.read() or b"{}")
    except ValueError as e:
        raise refusal(400, f"the body is no JSON: {e}") from e
    if not isinstance(body, dict):
        raise refusal(400, "the body must be a JSON object")
    return body


def known(language):
    language = (language or "python").strip().lower() if isinstance(language or "", str) else ""
    if language not in LANGUAGES:
        raise refusal(400, f"language: must be one of {', '.join(LANGUAGES)}")
    return language


async def serve(app):
    """Is around the life of the server: a kernel of Python is ready before it listens."""
    with tempfile.TemporaryDirectory(prefix="ci-") as files:  # a short name: sockets lie in it
        app[INTERPRETER].files = files
        await app[INTERPRETER].default("python")
        yield
        for context in app[INTERPRETER].contexts.values():
            await context.end()


def main():
    logging.basicConfig(level=logging.INFO)
    interpreter = Interpreter()
    app = web.Application(middlewares=[cross_origin], client_max_size=MAX_BODY)
    app[INTERPRETER] = interpreter
    app.cleanup_ctx.append(serve)
    app.add_routes([
        web.get("/health", interpreter.health),
        web.post("/execute", interpreter.execute),
        web.get("/contexts", interpreter.list),
        web.post("/contexts", interpreter.add),
        web.delete("/contexts/{id}", interpreter.remove),
        web.post("/contexts/{id}/restart", interpreter.restart),
        web.options("/{path:.*}", interpreter.health),
    ])
    web.run_app(app, host=HOST, port=PORT, access_log=None, handler_cancellation=True, shutdown_timeout=1, print=None)


if __name__ == "__main__":
    main()
