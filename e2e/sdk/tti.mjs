// Measures what ComputeSDK's benchmark does: the time from create() to the end of the first command, `node -v`.
// One sandbox after the other, one every 200 ms, and all at once.
//
// node tti.mjs <directory with ComputeSDK> <sandboxes of each mode>; the pool is in POOL, the rest in E2B's variables.
// After each mode it waits for a line on its input. It writes one line of JSON for each mode. The home directory of the
// commands is empty, because the SDK runs each in a login shell and the profile of an account adds its own time.
import { mkdtempSync, rmSync } from 'node:fs'
import { createRequire } from 'node:module'
import os from 'node:os'
import path from 'node:path'
import readline from 'node:readline'
import { setTimeout as sleep } from 'node:timers/promises'

const require = createRequire(path.resolve(process.argv[2], 'node_modules') + '/')
const { compute } = require('computesdk')
const { e2b } = require('@computesdk/e2b')
const { POOL, E2B_API_KEY } = process.env
const count = Number(process.argv[3])
const home = mkdtempSync(path.join(os.tmpdir(), 'berth-home-'))
compute.setConfig({ provider: e2b({ apiKey: E2B_API_KEY }) })

async function create() {
  const begin = performance.now()
  const sandbox = await compute.sandbox.create({ templateId: POOL, timeout: 600_000, envs: { HOME: home } })
  const ran = await sandbox.runCommand('node -v')
  if (ran.exitCode !== 0) throw new Error(ran.stderr)
  return { sandbox, took: performance.now() - begin }
}

const numbers = Array.from({ length: count }, (_, i) => i)
const modes = {
  async sequential() {
    const all = []
    for (const _ of numbers) {
      const one = await create()
      await one.sandbox.destroy()
      all.push({ took: one.took })
    }
    return all
  },
  staggered: () => Promise.all(numbers.map((i) => sleep(200 * i).then(create))),
  burst: () => Promise.all(numbers.map(create)),
}

const input = readline.createInterface({ input: process.stdin })[Symbol.asyncIterator]()
for (const [mode, run] of Object.entries(modes)) {
  await input.next()
  const all = await run()
  const took = all.map((one) => one.took).sort((a, b) => a - b)
  const at = (share) => Math.round(took[Math.min(count - 1, Math.floor(share * count))])
  await Promise.all(all.map((one) => one.sandbox?.destroy()))
  console.log(JSON.stringify({ mode, count, p50: at(0.5), p99: at(0.99), max: Math.round(took.at(-1)) }))
}
rmSync(home, { recursive: true })
process.exit(0)
