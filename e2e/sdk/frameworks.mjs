// Lets frameworks use sandboxes through E2B's JavaScript SDK: each creates one, runs something and ends it.
//
// node frameworks.mjs <directory with them>; the pool is in POOL, the rest in the SDK's variables.
import assert from 'node:assert/strict'
import fs from 'node:fs'
import { createRequire } from 'node:module'
import path from 'node:path'

const modules = path.resolve(process.argv[2], 'node_modules')
const require = createRequire(modules + '/')
const version = (name) => JSON.parse(fs.readFileSync(path.join(modules, name, 'package.json'))).version
const { POOL, E2B_API_KEY } = process.env

async function mastra() {
  const { E2BSandbox } = require('@mastra/e2b')
  const sandbox = new E2BSandbox({ id: POOL + '-mastra', template: POOL, timeout: 300_000 })
  await sandbox._start()
  const ran = await sandbox.executeCommand('sh', ['-c', 'echo out; echo err >&2'])
  assert.deepEqual([ran.stdout, ran.stderr, ran.exitCode], ['out\n', 'err\n', 0])
  assert.equal((await sandbox.executeCommand('sh', ['-c', 'exit 3'])).exitCode, 3)
  // Another object with the same name finds the same sandbox.
  const again = new E2BSandbox({ id: POOL + '-mastra', template: POOL, timeout: 300_000 })
  await again._start()
  assert.equal(again.e2b.sandboxId, sandbox.e2b.sandboxId)
  await again.executeCommand('sh', ['-c', 'echo kept > /tmp/mastra-' + process.pid])
  await again._stop() // pauses
  await again._start()
  assert.equal((await again.executeCommand('sh', ['-c', 'cat /tmp/mastra-' + process.pid])).stdout, 'kept\n')
  await again._destroy()
  assert.equal(await sandbox.e2b.isRunning(), false)
  return ['@mastra/e2b', 6]
}

async function computesdk() {
  const { compute } = require('computesdk')
  const { e2b } = require('@computesdk/e2b')
  compute.setConfig({ provider: e2b({ apiKey: E2B_API_KEY }) })
  const sandbox = await compute.sandbox.create({ templateId: POOL, timeout: 300_000 })
  const ran = await sandbox.runCommand('echo out; exit 3')
  assert.deepEqual([ran.stdout, ran.exitCode], ['out\n', 3])
  assert.ok((await compute.sandbox.list()).some((s) => s.sandboxId === sandbox.sandboxId))
  await sandbox.destroy()
  assert.ok(!(await compute.sandbox.list()).some((s) => s.sandboxId === sandbox.sandboxId))
  return ['computesdk', 4]
}

for (const framework of [mastra, computesdk]) {
  const [name, steps] = await framework()
  console.log(`${name} ${version(name)}: ${steps} steps`)
}
