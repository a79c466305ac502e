// Runs code through @e2b/code-interpreter, and checks what it gets.
//
// node code.cjs <directory with the SDK>; the pool is in POOL, the rest in the SDK's variables.
'use strict'
const assert = require('node:assert/strict')
const path = require('node:path')

const modules = path.join(process.argv[2], 'node_modules')
const { Sandbox } = require(path.join(modules, '@e2b/code-interpreter'))
const { version } = require(path.join(modules, '@e2b/code-interpreter/package.json'))
const { POOL, DIR } = process.env

const fails = (kind, promise, says = /./) => promise.then(
  () => assert.fail('no ' + kind),
  (error) => { assert.equal(error.constructor.name, kind); assert.match(error.message, says) })

const steps = {
  async results(s) {
    const lines = []
    const add = (m) => { lines.push([m.line, m.error]) }
    const run = await s.runCode("import sys\nx = 40\nprint('out')\nprint('err', file=sys.stderr)\nx + 2", { onStdout: add, onStderr: add })
    assert.deepEqual([run.text, run.executionCount, run.error], ['42', 1, undefined])
    // A busy kernel sends a line in pieces.
    assert.deepEqual([run.logs.stdout.join(''), run.logs.stderr.join('')], ['out\n', 'err\n'])
    assert.deepEqual([false, true].map((failed) => lines.filter((l) => l[1] === failed).map((l) => l[0]).join('')), ['out\n', 'err\n'])
    assert.equal((await s.runCode('x')).text, '40')
    const { error } = await s.runCode('1/0')
    assert.deepEqual([error.name, error.value], ['ZeroDivisionError', 'division by zero'])
    assert.match(error.traceback, /ZeroDivisionError/)
  },
  async rich(s) {
    const { results } = await s.runCode('import matplotlib.pyplot as plt\nplt.title("t"); plt.bar(["a", "b"], [1, 2]); plt.show()\n' +
      'import pandas; pandas.DataFrame({"a": [1, None]})')
    assert.equal(Buffer.from(results[0].png, 'base64').subarray(1, 4).toString(), 'PNG')
    assert.deepEqual([results[0].chart.type, results[0].chart.title], ['bar', 't'])
    assert.deepEqual(results[0].chart.elements.map((e) => [e.label, e.value]), [['a', 1], ['b', 2]])
    assert.deepEqual([results[1].isMainResult, results[1].data], [true, { a: [1, null] }])
  },
  async variables(s) {
    const ask = "import os; [os.environ.get(n) for n in ('CLAIM', 'RUN')]"
    assert.equal((await s.runCode(ask, { envs: { RUN: 'r' } })).text, "['of the claim', 'r']")
    assert.equal((await s.runCode(ask)).text, "['of the claim', None]")
  },
  async bash(s) {
    const run = await s.runCode('echo "$CLAIM $RUN"; (exit 3)', { language: 'bash', envs: { RUN: 'r' } })
    assert.deepEqual([run.logs.stdout.join(''), run.error.value], ['of the claim r\n', '3'])
    await fails('SandboxError', s.runCode('1', { language: 'javascript' }), /400/)
  },
  async contexts(s) {
    const context = await s.createCodeContext({ cwd: DIR })
    assert.deepEqual([context.language, context.cwd], ['python', DIR])
    assert.equal((await s.runCode('z = 1; import os; os.getcwd()', { context })).text, DIR)
    assert.equal((await s.runCode('z')).error.name, 'NameError')
    assert.ok((await s.listCodeContexts()).some((c) => c.id === context.id))
    await s.restartCodeContext(context)
    assert.equal((await s.runCode('z', { context })).error.name, 'NameError')
    await s.removeCodeContext(context)
    await fails('NotFoundError', s.runCode('1', { context }), /not found/)
  },
  async ends(s) {
    await s.runCode('kept = 1; import time')
    await fails('TimeoutError', s.runCode('time.sleep(600)', { timeoutMs: 1000 }))
    assert.equal((await s.runCode('kept')).text, '1')
  },
  async private() {
    const s = await Sandbox.create(POOL, { timeoutMs: 300_000, network: { allowPublicTraffic: false } })
    assert.equal((await s.runCode('1 + 1')).text, '2')
    await s.kill()
  },
}

async function main() {
  const s = await Sandbox.create(POOL, { timeoutMs: 600_000, envs: { CLAIM: 'of the claim' } })
  for (const [name, step] of Object.entries(steps)) {
    await step(s).catch((error) => { throw new Error(name, { cause: error }) })
  }
  await s.kill()
  console.log(`@e2b/code-interpreter ${version}: ${Object.keys(steps).length} steps`)
}

main().catch((error) => {
  console.error(error)
  process.exit(1)
})
