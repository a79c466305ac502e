// Uses a Berth through E2B's JavaScript SDK as an agent does, and checks what it gets.
// node agent.cjs <directory with the SDK> [limited|busy|differences|snapshots|stops]; the pool is in POOL, the rest in the SDK's variables.
'use strict'
const assert = require('node:assert/strict')
const fs = require('node:fs')
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

async function fails(name, call, words = '') {
  const error = await call.then(() => undefined, (e) => e)
  assert.ok(error, `no ${name} ${words}`)
  assert.equal(error.name, name, error.message)
  assert.ok(error.message.includes(words), `${error.message}, not ${words}`)
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
  await fails('RateLimitError', Sandbox.create(pool), 'maxSandboxes')
  await sandbox.kill()
}

// busy uses a Berth without an allocator.
async function busy() {
  await fails('ServiceBusyError', Sandbox.create(pool))
  await fails('ServiceBusyError', Sandbox.getInfo('zzzzzzzzzzzzzzzzzzzz'))
}

// differences asks for what Berth does otherwise than E2B. The pods of the pool have no agent, and nothing listens on
// its port.
async function differences() {
  const { Secret, Template, Volume } = sdk
  const rules = { 'example.com': [{ transform: { headers: { a: 'b' } } }] }
  for (const [words, opts] of Object.entries({
    'mcp: the pods of this pool have no agent': { mcp: { arxiv: {} } },
    'autoPause: the pods of this pool have no agent': { lifecycle: { onTimeout: 'pause', autoResume: true } },
    'allow_internet_access: Use a NetworkPolicy': { allowInternetAccess: false },
    'network.allowOut: Use a NetworkPolicy': { network: { allowOut: ['10.0.0.1'] } },
    'network.denyOut: Use a NetworkPolicy': { network: { denyOut: ['10.0.0.1'] } },
    'network.rules: ': { network: { rules } },
    'network.egressProxy: ': { network: { egressProxy: { address: 'example.com:1080' } } },
    'iam: ': { iam: { tokens: { a: { audience: 'a', tokenType: 'JWT-SVID' } } } },
    'volumeMounts: ': { volumeMounts: { '/a': 'a' } },
  })) await fails('SandboxError', Sandbox.create(pool, opts), words)
  await fails('SandboxError', Sandbox.create(), '"base"')
  await fails('SandboxError', Sandbox.create({ mcp: { arxiv: {} } }), '"mcp-gateway"')

  const sandbox = await Sandbox.create(pool, {
    timeoutMs: 60_000, secure: false, allowInternetAccess: true, lifecycle: { onTimeout: 'kill' },
    network: { allowPublicTraffic: true },
  })
  const id = sandbox.sandboxId
  const info = await sandbox.getInfo()
  assert.deepEqual([info.name, info.state, info.cpuCount, info.memoryMB], [pool, 'running', 0, 0])
  assert.deepEqual([info.lifecycle, info.allowInternetAccess, info.volumeMounts], [undefined, undefined, []])
  const listed = Sandbox.list({ query: { template: pool, startedAfter: new Date(info.startedAt - 1) }, order: 'asc' })
  assert.deepEqual((await listed.nextItems()).map((s) => s.sandboxId), [id])
  assert.equal((await Sandbox.connect(id, { onResume: 'reboot' })).sandboxId, id)
  assert.equal(await sandbox.isRunning(), false)
  for (const [name, words, call] of [
    ['SandboxNotFoundError', '', () => sandbox.commands.run('true')],
    ['TemplateError', 'update the template', () => sandbox.getMetrics()],
    ['SandboxError', 'metrics-server', () => Sandbox.getMetrics(id)],
    ['SandboxError', 'cannot sleep', () => sandbox.pause()],
    ['SandboxError', 'cannot sleep', () => Sandbox.betaPause(id)],
    ['SandboxError', 'does not fork the memory', () => sandbox.fork()],
    ['SandboxError', 'no object store', () => sandbox.createSnapshot()],
    ['SandboxError', 'no object store', () => Sandbox.listSnapshots().nextItems()],
    ['SandboxError', 'no object store', () => Sandbox.deleteSnapshot('a')],
    ['SandboxError', 'NetworkPolicy', () => sandbox.updateNetwork({ denyOut: ['10.0.0.1'] })],
    ['BuildError', 'builds no images', () => Template.build(Template().fromImage('alpine'), 'a')],
    ['BuildError', '404', () => Template.getBuildStatus({ templateId: 'a', buildId: 'a' })],
    ['TemplateError', 'kubectl', () => Template.assignTags('a', ['b'])],
    ['TemplateError', 'kubectl', () => Template.removeTags('a', ['b'])],
    ['TemplateError', '404', () => Template.getTags('a')],
    ['VolumeError', 'no volumes', () => Volume.create('a')],
    ['VolumeError', 'no volumes', () => Volume.list()],
    ['VolumeNotFoundError', '', () => Volume.connect('a')],
    ['SecretError', 'no secrets', () => Secret.create('a', 'b')],
    ['SecretError', 'no secrets', () => Secret.list().nextItems()],
    ['SecretNotFoundError', '', () => Secret.update('a', 'b')],
  ]) await fails(name, call(), words)
  assert.deepEqual([await Template.exists(pool), await Template.exists('no-such-pool')], [true, false])
  assert.deepEqual([await Volume.destroy('a'), await Secret.exists('a'), await Secret.destroy('a')], [false, false, false])
  await sandbox.kill()
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
  await fails('SandboxError', Sandbox.create(pool, { envs: { A: 'b' } }), 'envVars: the pods of this pool have no agent')
}

// snapshots makes snapshots of the files in DIR, and sandboxes from them.
async function snapshots() {
  const name = `s-${run.toLowerCase()}`.slice(0, 60).replace(/-+$/, '')
  const file = process.env.DIR + '/file'
  const sandbox = await Sandbox.create(pool, { timeoutMs: 300_000 })
  let made
  for (let round = 0; round < 2; round++) { // the second one replaces the first one
    await sandbox.files.write(file, `round ${round}`)
    made = await sandbox.createSnapshot({ name })
    assert.deepEqual([made.snapshotId, made.names], [`${name}:default`, [`${name}:default`]])
    await sandbox.files.write(file, 'later')
    const again = await Sandbox.create(made.snapshotId, { timeoutMs: 60_000, envs: { A: 'b' } })
    assert.equal(await again.files.read(file), `round ${round}`)
    assert.equal((await again.commands.run('echo $A')).stdout, 'b\n')
    await again.kill()
  }
  const unnamed = await Sandbox.createSnapshot(sandbox.sandboxId)
  const listed = (await sandbox.listSnapshots().nextItems()).map((s) => s.snapshotId)
  assert.deepEqual(listed.sort(), [made.snapshotId, unnamed.snapshotId].sort())
  const pages = Sandbox.listSnapshots({ sandboxId: sandbox.sandboxId, limit: 1 })
  const first = await pages.nextItems()
  assert.deepEqual([first.length, pages.hasNext], [1, true])
  const second = await pages.nextItems()
  assert.deepEqual([second.length, pages.hasNext], [1, false])
  await sandbox.kill()
  await (await Sandbox.create(unnamed.snapshotId, { timeoutMs: 60_000 })).kill() // a snapshot outlives its sandbox
  for (const s of [made, unnamed]) {
    assert.equal(await Sandbox.deleteSnapshot(s.snapshotId), true)
    assert.equal(await Sandbox.deleteSnapshot(s.snapshotId), false)
  }
  await fails('SandboxError', Sandbox.create(made.snapshotId), 'no such snapshot')
}

// stops has a sandbox lose its memory and keep the files in DIR.
async function stops() {
  const file = process.env.DIR + '/file'
  const sandbox = await Sandbox.create(pool, {
    timeoutMs: 300_000, envs: { A: 'b' }, metadata: { run }, lifecycle: { onTimeout: { action: 'pause', keepMemory: false } },
  })
  const id = sandbox.sandboxId
  for (let round = 0; round < 3; round++) {
    await sandbox.files.write(file, `round ${round}`)
    if (round === 2) assert.equal(await sandbox.pause(), true) // with its memory
    assert.equal(await sandbox.pause({ keepMemory: false }), true)
    assert.equal(await Sandbox.pause(id, { keepMemory: false }), false)
    assert.equal((await Sandbox.getInfo(id)).state, 'paused')
    const paused = await Sandbox.list({ query: { metadata: { run }, state: ['paused'] } }).nextItems()
    assert.deepEqual(paused.map((s) => s.sandboxId), [id])
    fs.writeFileSync(file, 'later') // sandboxes of the test share the files of this machine
    const again = await Sandbox.connect(id, { timeoutMs: 300_000 })
    assert.equal(again.sandboxId, id)
    assert.equal(await again.files.read(file), `round ${round}`)
    assert.equal((await sandbox.commands.run('echo $A')).stdout, 'b\n')
    assert.equal((await again.getInfo()).lifecycle.onTimeout, 'pause')
  }
  assert.equal(await sandbox.pause({ keepMemory: false }), true)
  assert.equal(await Sandbox.kill(id), true)
  assert.equal(await Sandbox.kill(id), false)
}

const modes = { limited, busy, differences, snapshots, stops }
const mode = modes[process.argv[3]] || main
const { version } = require(process.argv[2] + '/node_modules/e2b/package.json')
mode().then(() => console.log(`e2b ${version}: ok`), (error) => {
  console.error(error)
  process.exit(1)
})
