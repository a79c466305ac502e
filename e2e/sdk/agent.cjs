// Uses a Berth through E2B's JavaScript SDK as an agent does, and checks what it gets.
// node agent.cjs <directory with the SDK> [limited|busy]; the pool is in POOL, the rest in the SDK's variables.
'use strict'
const assert = require('node:assert/strict')
const http = require('node:http')
const https = require('node:https')
const { createRequire } = require('node:module')
const { pathToFileURL } = require('node:url')

const sdk = createRequire(pathToFileURL(process.argv[2] + '/x.js'))('e2b')
const { Sandbox } = sdk
const pool = process.env.POOL
const run = process.argv[2].split('/').pop() // tells the sandboxes of several runs apart

// get sends a request to a sandbox's host, as a program without the SDK does. Over plain HTTP the
// name does not resolve, and the request goes to the gateway.
function get(host, headers) {
  return new Promise((resolve, reject) => {
    const read = (answer) => {
      let body = ''
      answer.on('data', (part) => { body += part })
      answer.on('end', () => resolve({ code: answer.statusCode, body }))
    }
    if (process.env.E2B_DOMAIN) {
      https.get(`https://${host}/`, { headers }, read).on('error', reject)
      return
    }
    const gateway = new URL(process.env.E2B_SANDBOX_URL)
    http.get({ host: gateway.hostname, port: gateway.port, path: '/', headers: { Host: host, ...headers } }, read).on('error', reject)
  })
}

async function fails(name, call) {
  const error = await call.then(() => undefined, (e) => e)
  assert.ok(error, `no ${name}`)
  assert.equal(error.name, name, error.message)
  return error
}

// privately uses a private sandbox, whose program sees another host.
async function privately() {
  const network = { allowPublicTraffic: false, maskRequestHost: 'localhost:${PORT}' }
  const sandbox = await Sandbox.create(pool, { timeoutMs: 60_000, network })
  const host = sandbox.getHost(8080)
  assert.equal((await get(host)).code, 403)
  assert.equal((await get(host, { 'e2b-traffic-access-token': 'wrong' })).code, 403)
  const answer = await get(host, { 'e2b-traffic-access-token': sandbox.trafficAccessToken })
  assert.equal(answer.code, 200, answer.body)
  assert.equal(JSON.parse(answer.body).host, 'localhost:8080', answer.body)
  assert.ok(!answer.body.includes(sandbox.trafficAccessToken), 'the program saw the token')
  assert.equal(await sandbox.isRunning(), true)
  const again = await Sandbox.connect(sandbox.sandboxId)
  assert.equal(again.trafficAccessToken, sandbox.trafficAccessToken)
  assert.equal((await sandbox.getInfo()).sandboxId, sandbox.sandboxId)
  await sandbox.kill()
}

// limited uses the key of a team that may have one sandbox.
async function limited() {
  const sandbox = await Sandbox.create(pool, { timeoutMs: 60_000 })
  const error = await fails('RateLimitError', Sandbox.create(pool))
  assert.match(error.message, /maxSandboxes/)
  await sandbox.kill()
}

// busy uses a Berth without an allocator.
async function busy() {
  await fails('ServiceBusyError', Sandbox.create(pool))
  await fails('ServiceBusyError', Sandbox.getInfo('zzzzzzzzzzzzzzzzzzzz'))
}

async function main() {
  const sandbox = await Sandbox.create(pool, { timeoutMs: 60_000, metadata: { run, 'a key': 'é&=%', idle_timeout: '600' } })
  const info = await sandbox.getInfo()
  assert.equal(info.sandboxId, sandbox.sandboxId)
  assert.equal(info.templateId, pool)
  assert.equal(info.state, 'running')
  assert.deepEqual(info.metadata, { run, 'a key': 'é&=%', idle_timeout: '600' })
  assert.ok(info.endAt - info.startedAt === 60_000, `${info.startedAt} ${info.endAt}`)

  await sandbox.setTimeout(120_000)
  const later = (await sandbox.getInfo()).endAt
  assert.ok(later - info.endAt > 30_000, 'setTimeout did not move the end')
  const again = await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 30_000 })
  assert.equal(again.sandboxId, sandbox.sandboxId)
  assert.ok((await again.getInfo()).endAt >= later, 'connect brought the end forward')

  const answer = await get(sandbox.getHost(8080))
  assert.equal(answer.code, 200, answer.body)
  assert.ok(JSON.parse(answer.body).pod, answer.body)
  assert.equal(await sandbox.isRunning(), true)

  await privately()

  const others = [await Sandbox.create(pool, { metadata: { run } }), await Sandbox.create(pool, { metadata: { run } })]
  const page = Sandbox.list({ query: { metadata: { run } }, limit: 2 })
  const first = await page.nextItems()
  assert.deepEqual([first.length, page.hasNext], [2, true])
  const second = await page.nextItems()
  assert.deepEqual([second.length, page.hasNext], [1, false])
  assert.deepEqual([...first, ...second].map((s) => s.sandboxId).sort(), [sandbox, ...others].map((s) => s.sandboxId).sort())
  const odd = Sandbox.list({ query: { metadata: { run, 'a key': 'é&=%' }, state: ['running'] } })
  assert.deepEqual((await odd.nextItems()).map((s) => s.sandboxId), [sandbox.sandboxId])
  const paused = Sandbox.list({ query: { metadata: { run }, state: ['paused'] } })
  assert.deepEqual(await paused.nextItems(), [])

  for (const s of [sandbox, ...others]) {
    assert.equal(await Sandbox.kill(s.sandboxId), true)
  }
  assert.equal(await Sandbox.kill(sandbox.sandboxId), false)
  assert.equal(await sandbox.isRunning(), false)
  const ended = await get(sandbox.getHost(8080))
  assert.equal(ended.code, process.env.E2B_STATUSES ? 502 : 410)
  if (process.env.E2B_STATUSES) {
    assert.deepEqual(JSON.parse(ended.body), { sandboxId: sandbox.sandboxId, message: 'The sandbox was not found', code: 502 })
  }
  const notFound = sdk.SandboxNotFoundError ? 'SandboxNotFoundError' : 'NotFoundError'
  await fails(notFound, Sandbox.connect(sandbox.sandboxId))
  await fails(notFound, sandbox.setTimeout(1000))
  await fails('AuthenticationError', Sandbox.create(pool, { apiKey: 'e2b_00000000000000000000' }))
  await fails('SandboxError', Sandbox.create('no-such-pool'))
  const refused = await fails('SandboxError', Sandbox.create(pool, { envs: { A: 'b' } }))
  assert.match(refused.message, /envVars: the pods of this pool have no agent/)
}

const modes = { limited, busy }
const mode = modes[process.argv[3]] || main
const { version } = require(process.argv[2] + '/node_modules/e2b/package.json')
mode().then(() => console.log(`e2b ${version}: ok`), (error) => {
  console.error(error)
  process.exit(1)
})
