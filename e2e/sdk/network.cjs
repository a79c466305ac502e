// Changes what a sandbox may reach through E2B's JavaScript SDK, and checks what it reaches.
// node network.cjs <directory with the SDK>; the pool is in POOL, the rest in the SDK's variables. Two origins have the
// addresses ONE and TWO, which count as outside, and the port PORT. Their names are one.example and two.example, and
// those below.
'use strict'
const assert = require('node:assert/strict')
const { createRequire } = require('node:module')
const { pathToFileURL } = require('node:url')

const { CommandExitError, Sandbox } = createRequire(pathToFileURL(process.argv[2] + '/x.js'))('e2b')
const { POOL, PORT, ONE, TWO } = process.env
const everything = ({ allTraffic }) => [allTraffic]

async function fails(name, call, words = '') {
  const error = await call.then(() => undefined, (e) => e)
  assert.ok(error, `no ${name} ${words}`)
  assert.equal(error.name, name, error.message)
  assert.ok(error.message.includes(words), `${error.message}, not ${words}`)
}

// A shell reads no profile of this machine.
const create = (opts) => Sandbox.create(POOL, { timeoutMs: 300_000, envs: { HOME: '/' }, ...opts })

// ask is a command. A pod is a process of this machine: its requests need its address.
const ask = (host, scheme = 'https') =>
  `curl --interface $POD_IP -sk --max-time 20 -w '%{http_code}' ${scheme}://${host}:${PORT}/`

async function reaches(sandbox, ...hosts) {
  for (const host of hosts) {
    const result = await sandbox.commands.run(ask(host))
    assert.deepEqual([result.exitCode, result.stdout], [0, 'origin 200'], host)
  }
}

async function misses(sandbox, ...hosts) {
  for (const host of hosts) {
    const error = await sandbox.commands.run(ask(host)).then(() => undefined, (e) => e)
    assert.ok(error instanceof CommandExitError, `${host}: ${error}`)
    assert.deepEqual([error.exitCode, error.stdout], [56, '000'], host) // the proxy refuses the tunnel
  }
}

const parts = {
  // Addresses and ranges in both lists.
  async addresses() {
    let sandbox = await create({ network: { denyOut: everything, allowOut: [ONE] } })
    await reaches(sandbox, ONE)
    await misses(sandbox, TWO, 'one.example', 'two.example')
    await sandbox.kill()
    sandbox = await create({ network: { denyOut: [TWO] } })
    await misses(sandbox, TWO, 'two.example')
    await reaches(sandbox, ONE, 'one.example')
    await sandbox.kill()
    sandbox = await create({ network: { denyOut: everything } })
    await misses(sandbox, ONE, TWO)
    const { stdout } = await sandbox.commands.run(ask(ONE, 'http'))
    assert.ok(stdout.includes('"reason":"egress_refused"') && stdout.endsWith('403'), stdout)
    await sandbox.kill()
    sandbox = await create({ network: { denyOut: everything, allowOut: [ONE, TWO] } })
    await reaches(sandbox, ONE, TWO)
    await sandbox.kill()
    sandbox = await create({ network: { denyOut: ['127.0.0.0/8'], allowOut: ['127.1.0.0/16'] } })
    await reaches(sandbox, ONE, 'one.example')
    await misses(sandbox, TWO, 'two.example')
    await sandbox.kill()
  },

  // Names and wildcards, which only the list of what is allowed has.
  async names() {
    const sandbox = await create({ network: { denyOut: everything, allowOut: ['one.example', '*.two.example'] } })
    await reaches(sandbox, 'one.example', 'ONE.example', 'a.two.example', 'a.b.two.example')
    await misses(sandbox, 'two.example', 'a.one.example', 'one.example.two.example.org', ONE, TWO)
    await sandbox.kill()
  },

  // What allowInternetAccess says.
  async internet() {
    for (const [opts, allowed] of [[{}], [{ allowInternetAccess: true }], [{ allowInternetAccess: false }, false]]) {
      const sandbox = await create(opts)
      await (allowed === false ? misses : reaches)(sandbox, ONE, 'two.example')
      assert.equal((await sandbox.getInfo()).allowInternetAccess, allowed)
      await sandbox.kill()
    }
  },

  // A change replaces the rules as a whole, and counts when the call returns.
  async updates() {
    let sandbox = await create()
    await reaches(sandbox, ONE, TWO)
    await sandbox.updateNetwork({ denyOut: [TWO] })
    await misses(sandbox, TWO)
    await reaches(sandbox, ONE)
    await sandbox.updateNetwork({ denyOut: everything, allowOut: ['two.example'] })
    await misses(sandbox, ONE, TWO)
    await reaches(sandbox, 'two.example')
    await Sandbox.updateNetwork(sandbox.sandboxId, { allowInternetAccess: false })
    await misses(sandbox, ONE, 'two.example')
    await sandbox.kill()
    sandbox = await create({ network: { denyOut: everything, allowOut: [ONE] } })
    await misses(sandbox, TWO)
    await sandbox.updateNetwork({})
    await reaches(sandbox, ONE, TWO)
    await sandbox.kill()
  },

  // What is shown, and what is refused.
  async shown() {
    const sandbox = await create({ network: { denyOut: everything, allowOut: ['one.example', ONE] } })
    for (let i = 0; i < 2; i++) {
      const { network } = await sandbox.getInfo()
      assert.deepEqual([network.allowOut, network.denyOut], [['one.example', ONE], ['0.0.0.0/0']])
      await fails('SandboxError', sandbox.updateNetwork({ denyOut: ['no address'] }), 'denyOut')
      await fails('SandboxError', sandbox.updateNetwork({ allowOut: ['two.example'] }), '0.0.0.0/0')
    }
    await reaches(sandbox, ONE, 'one.example')
    await misses(sandbox, 'two.example')
    await fails('SandboxError', create({ network: { denyOut: ['two.example'] } }), 'denyOut')
    await sandbox.kill()
    await fails('SandboxNotFoundError', sandbox.updateNetwork({}))
  },
}

async function main() {
  for (const [name, part] of Object.entries(parts)) {
    await part().catch((error) => { throw new Error(name, { cause: error }) })
  }
}

const { version } = require(process.argv[2] + '/node_modules/e2b/package.json')
main().then(() => console.log(`e2b ${version}: ${Object.keys(parts).length} parts`), (error) => {
  console.error(error)
  process.exit(1)
})
