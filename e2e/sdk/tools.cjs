// Uses the agent of a sandbox through E2B's JavaScript SDK: commands, files, watches, terminals, git.
// node tools.cjs <directory with the SDK> [signed|loop]; the pool is in POOL, a directory of its own in DIR, the
// rest in the SDK's variables. The pod is a process of this machine, so all files are in that directory.
'use strict'
const assert = require('node:assert/strict')
const fs = require('node:fs')
const http = require('node:http')
const { execFileSync } = require('node:child_process')
const { createRequire } = require('node:module')
const { pathToFileURL } = require('node:url')

const { Sandbox, CommandExitError } = createRequire(pathToFileURL(process.argv[2] + '/x.js'))('e2b')
const base = process.env.DIR

let dir // of the part that runs
let sandbox

async function fails(name, call, words = /./) {
  const error = await Promise.resolve(call).then(() => undefined, (e) => e)
  assert.ok(error, `no ${name}`)
  assert.equal(error.constructor.name, name, error.message)
  assert.match(error.message, words)
  return error
}

// until waits for a condition. The limit ends a test in which nothing happens.
async function until(what, check) {
  for (const end = Date.now() + 60_000; !(await check());) {
    assert.ok(Date.now() < end, `waited for ${what}`)
    await new Promise((resolve) => setTimeout(resolve, 10))
  }
}

const seen = () => {
  const text = []
  return { text, add: (part) => { text.push(part) }, all: () => text.join('') }
}

async function commands() {
  const { commands } = sandbox
  const result = await commands.run('echo out; echo err >&2')
  assert.deepEqual([result.exitCode, result.stdout, result.stderr], [0, 'out\n', 'err\n'])
  const odd = 'a "b" \'c\' $HOME `d` \\ é ☃ * \t\n#\nlast'
  assert.equal((await commands.run(`cat <<'END'\n${odd}\nEND`)).stdout, odd + '\n')

  const exit = await fails('CommandExitError', commands.run('echo a; echo b >&2; exit 7'))
  assert.ok(exit instanceof CommandExitError)
  assert.deepEqual([exit.exitCode, exit.stdout, exit.stderr], [7, 'a\n', 'b\n'])
  const signalled = await fails('CommandExitError', commands.run('kill -TERM $$'))
  assert.notEqual(signalled.exitCode, 0)
  assert.match(signalled.error, /terminated/)

  // Each has its own variables, directory and user.
  assert.equal((await commands.run('echo $GLOBAL,$ONE', { envs: { ONE: '1 2=3' } })).stdout, 'everywhere,1 2=3\n')
  assert.equal((await commands.run('echo $GLOBAL,$ONE', { envs: { GLOBAL: 'here' } })).stdout, 'here,\n')
  assert.equal((await commands.run('pwd', { cwd: dir })).stdout, dir + '\n')
  const name = (await commands.run('whoami')).stdout
  assert.equal((await commands.run('whoami', { user: name.trim() })).stdout, name)
  assert.equal((await commands.run('echo $E2B_SANDBOX $E2B_SANDBOX_ID')).stdout, `true ${sandbox.sandboxId}\n`)
  await fails('InvalidArgumentError', commands.run('pwd', { cwd: dir + '/missing' }), /does not exist/)
  await fails('AuthenticationError', commands.run('true', { user: 'no-such-user' }), /no-such-user/)

  // Callbacks get the output as it comes, whole: a character in two pieces is one.
  const parts = seen()
  const go = `${dir}/go`
  const slow = await commands.run(`printf '\\xe2\\x98'; until [ -e ${go} ]; do sleep 0.01; done; printf '\\x83\\n'; echo e >&2`,
    { background: true, onStdout: parts.add, onStderr: parts.add })
  fs.writeFileSync(go, '')
  assert.equal((await slow.wait()).stdout, '☃\n')
  assert.deepEqual(parts.all().split('').sort().join(''), '\n\ne☃')

  // Large output, and one long line.
  const large = seen()
  const size = 20 << 20
  const long = await commands.run(`head -c ${size} /dev/zero | tr '\\0' x`, { onStdout: large.add, timeoutMs: 0 })
  assert.equal(long.stdout.length, size)
  assert.equal(large.all(), long.stdout)

  await fails('TimeoutError', commands.run('sleep 600', { timeoutMs: 300 }), /timeout/)
  assert.equal((await commands.run('sleep 0.1; echo 1', { timeoutMs: 0 })).stdout, '1\n')
  await processes()
  await standardInput()
}

// processes lists, kills, leaves and joins what runs.
async function processes() {
  const { commands } = sandbox
  const sleeper = await commands.run('sleep 600', { background: true, envs: { MARK: 'm' }, cwd: dir })
  const listed = (await commands.list()).find((p) => p.pid === sleeper.pid)
  assert.deepEqual([listed.cmd, listed.args, listed.envs.MARK, listed.cwd], ['/bin/bash', ['-l', '-c', 'sleep 600'], 'm', dir])
  assert.equal(await commands.kill(sleeper.pid), true)
  const killed = await fails('CommandExitError', sleeper.wait())
  assert.match(killed.error, /killed/)
  assert.equal(await commands.kill(sleeper.pid), false)
  assert.equal(await sleeper.kill(), false)
  assert.equal((await commands.list()).some((p) => p.pid === sleeper.pid), false)
  await fails('NotFoundError', commands.connect(sleeper.pid))
  assert.equal(await commands.kill(999_999_999), false)

  // A client that leaves does not end it, and another joins it.
  const file = `${dir}/goes-on`
  const first = seen()
  const left = await commands.run(`echo one; until [ -e ${file} ]; do sleep 0.01; done; echo two; exit 3`,
    { background: true, onStdout: first.add })
  await until('the first line', () => first.all() === 'one\n')
  await left.disconnect()
  assert.ok((await commands.list()).some((p) => p.pid === left.pid))
  const second = seen()
  const joined = await commands.connect(left.pid, { onStdout: second.add })
  assert.equal(joined.pid, left.pid)
  fs.writeFileSync(file, '')
  const ended = await fails('CommandExitError', joined.wait())
  assert.deepEqual([ended.exitCode, second.all()], [3, 'two\n'])

  // What it starts in the background does not hold it, and goes on.
  const alone = `${dir}/alone`
  await commands.run(`(until [ -e ${alone} ]; do sleep 0.01; done; rm ${alone}) > /dev/null 2>&1 &`)
  fs.writeFileSync(alone, '')
  await until('the process in the background', () => !fs.existsSync(alone))
}

async function standardInput() {
  const { commands } = sandbox
  const cat = await commands.run('cat', { background: true, stdin: true })
  const text = 'a "line" ☃\nand another\n'
  await cat.sendStdin(text)
  await cat.sendStdin('')
  await commands.sendStdin(cat.pid, new Uint8Array([65, 66, 10]))
  await until('the echo', () => cat.stdout === text + 'AB\n')
  await cat.closeStdin()
  assert.equal((await cat.wait()).stdout, text + 'AB\n')
  await fails('NotFoundError', cat.sendStdin('late'))
  await fails('NotFoundError', commands.sendStdin(999_999_999, 'x'))
  const closed = await commands.run('cat; sleep 600', { background: true, stdin: true })
  await closed.closeStdin()
  await fails('SandboxError', closed.sendStdin('late'), /closed/)
  await closed.kill()
  const none = await commands.run('cat; sleep 600', { background: true })
  await fails('SandboxError', none.sendStdin('x'), /without standard input/)
  await none.kill()
}

async function files() {
  const { files } = sandbox
  const at = (name) => `${dir}/${name}`
  const name = at('new/dirs/ünïcode ☃ "q".txt')
  const info = await files.write(name, 'text ☃')
  assert.deepEqual([info.path, info.name, info.type], [name, 'ünïcode ☃ "q".txt', 'file'])
  assert.equal(await files.read(name), 'text ☃')
  assert.equal(fs.readFileSync(name, 'utf8'), 'text ☃')

  const bytes = Uint8Array.from({ length: 300_000 }, (_, i) => i * 7)
  const stream = () => new Blob([bytes]).stream()
  for (const opts of [{}, { gzip: true }, { useOctetStream: true }]) {
    for (const data of [bytes.buffer, new Blob([bytes]), stream()]) {
      await files.write(at('bytes'), data, opts)
      assert.deepEqual(new Uint8Array(fs.readFileSync(at('bytes'))), bytes)
      fs.rmSync(at('bytes'))
    }
  }
  fs.writeFileSync(at('bytes'), bytes)
  for (const gzip of [false, true]) {
    assert.deepEqual(await files.read(at('bytes'), { format: 'bytes', gzip }), bytes)
    assert.deepEqual(new Uint8Array(await (await files.read(at('bytes'), { format: 'blob', gzip })).arrayBuffer()), bytes)
    const streamed = []
    for await (const part of await files.read(at('bytes'), { format: 'stream', gzip })) streamed.push(part)
    assert.deepEqual(new Uint8Array(Buffer.concat(streamed)), bytes)
  }
  for (const opts of [{}, { useOctetStream: true }, { gzip: true }]) {
    await files.write(at('empty'), '', opts)
    assert.equal(await files.read(at('empty')), '')
    assert.deepEqual(await files.read(at('empty'), { format: 'bytes', gzip: opts.gzip }), new Uint8Array())
  }
  const many = [...Array(5).keys()].map((i) => ({ path: at(`many/${i}/f "${i}" ☃`), data: i % 2 ? `n${i}` : new Blob([`n${i}`]) }))
  for (const opts of [{}, { gzip: true }]) {
    const written = await files.write(many, opts)
    assert.deepEqual(written.map((w) => w.path), many.map((m) => m.path))
    for (const [i, m] of many.entries()) assert.equal(await files.read(m.path), `n${i}`)
  }
  assert.deepEqual(await files.writeFiles([]), [])

  await fails('FileNotFoundError', files.read(at('missing')), /missing/)
  await fails('FileNotFoundError', files.read(at('bytes/below')))
  await fails('InvalidArgumentError', files.read(dir), /directory/)
  await fails('InvalidArgumentError', files.write(dir, 'x'), /directory/)
  await fails('InvalidArgumentError', files.write(at('bytes/below'), 'x'), /not a directory/)
  await fails('AuthenticationError', files.read(at('bytes'), { user: 'no-such-user' }), /no-such-user/)
  await fails('AuthenticationError', files.list(dir, { user: 'no-such-user' }), /no-such-user/)

  const described = await files.write(at('described'), 'x', { metadata: { Purpose: 'a test', n: '1' } })
  assert.deepEqual(described.metadata, { purpose: 'a test', n: '1' })
  assert.deepEqual((await files.getInfo(at('described'))).metadata, { purpose: 'a test', n: '1' })
  await directories(at)
  if (process.geteuid() === 0) {
    // The directory is of root. What the pool lets the agent make there belongs to the user.
    const user = 'nobody'
    await files.write(dir + '/app/main.js', 'x', { user })
    await files.write([{ path: dir + '/file', data: 'x' }], { user })
    assert.equal(await files.makeDir(dir + '/code/deep', { user }), true)
    await files.rename(dir + '/app/main.js', dir + '/moved', { user })
    for (const name of ['app', 'moved', 'file', 'code', 'code/deep']) {
      assert.equal((await files.getInfo(`${dir}/${name}`)).owner, user, name)
    }
    await files.write(dir + '/of-root', 'x', { user: 'root' })
    await fails('SandboxError', files.write(dir + '/of-root', 'y', { user }), /permission denied/)
    assert.equal(await files.read(dir + '/of-root'), 'x')
  }
}

async function directories(at) {
  const { files } = sandbox
  const root = at('tree')
  assert.equal(await files.makeDir(root + '/a/b'), true)
  assert.equal(await files.makeDir(root + '/a/b'), false)
  await files.write(root + '/a/b/file', '12345')
  await fails('InvalidArgumentError', files.makeDir(root + '/a/b/file'), /not a directory/)
  fs.symlinkSync('a/b/file', root + '/link')
  fs.symlinkSync(root + '/a', root + '/links')
  fs.symlinkSync('nowhere', root + '/lost')

  const names = async (depth) => (await files.list(root, depth && { depth })).map((e) => e.path.slice(root.length + 1))
  assert.deepEqual((await names()).sort(), ['a', 'link', 'links', 'lost'])
  assert.deepEqual((await names(2)).sort(), ['a', 'a/b', 'link', 'links', 'lost'])
  assert.deepEqual((await names(9)).sort(), ['a', 'a/b', 'a/b/file', 'link', 'links', 'lost'])
  assert.deepEqual((await files.list(root + '/links', { depth: 2 })).map((e) => e.path), [root + '/links/b', root + '/links/b/file'])
  for (const depth of [0, -1]) await fails('InvalidArgumentError', files.list(root, { depth }), /depth/)
  await fails('InvalidArgumentError', files.list(root + '/a/b/file'), /not a directory/)
  await fails('FileNotFoundError', files.list(root + '/missing'))

  const entries = Object.fromEntries((await files.list(root)).map((e) => [e.name, e]))
  assert.deepEqual([entries.a.type, entries.a.mode, entries.a.permissions], ['dir', 0o755, 'drwxr-xr-x'])
  assert.deepEqual([entries.link.type, entries.link.mode, entries.link.symlinkTarget], ['file', 0o644, root + '/a/b/file'])
  assert.deepEqual([entries.links.type, entries.links.symlinkTarget], ['dir', root + '/a'])
  assert.deepEqual([entries.lost.type, entries.lost.symlinkTarget], ['symlink', 'nowhere'])
  const file = await files.getInfo(root + '/a/b/file')
  const stat = fs.statSync(root + '/a/b/file')
  assert.deepEqual([file.name, file.path, file.type, file.size], ['file', root + '/a/b/file', 'file', 5])
  assert.deepEqual([file.mode, file.permissions], [0o644, '-rw-r--r--'])
  const owner = execFileSync('stat', ['-c', '%U %G', file.path], { encoding: 'utf8' }).trim()
  assert.equal(`${file.owner} ${file.group}`, owner)
  assert.ok(Math.abs(file.modifiedTime.getTime() - stat.mtimeMs) < 1, file.modifiedTime)
  fs.chmodSync(file.path, 0o600)
  await files.write(file.path, 'new')
  assert.equal((await files.getInfo(file.path)).mode, 0o600)
  await fails('FileNotFoundError', files.getInfo(root + '/missing'))

  assert.equal(await files.exists(file.path), true)
  assert.equal(await files.exists(root + '/missing'), false)
  assert.equal(await files.exists(file.path + '/below'), false)
  const moved = await files.rename(file.path, root + '/new/place')
  assert.deepEqual([moved.path, moved.name, moved.size], [root + '/new/place', 'place', 3])
  assert.equal(await files.exists(file.path), false)
  await files.write(root + '/other', 'old')
  await files.rename(root + '/new/place', root + '/other')
  assert.equal(await files.read(root + '/other'), 'new')
  await files.rename(root + '/a', root + '/renamed')
  assert.equal(await files.exists(root + '/renamed/b'), true)
  await fails('FileNotFoundError', files.rename(root + '/missing', root + '/x'))
  assert.equal(await files.exists(root + '/x'), false)
  await files.remove(root + '/other')
  await files.remove(root + '/other') // nothing is there
  await files.remove(root)
  assert.equal(fs.existsSync(root), false)
}

async function watches() {
  const { files } = sandbox
  const root = dir + '/watched'
  await files.makeDir(root)
  await files.write(root + '/old', 'x')
  const watch = async (opts) => {
    const events = []
    const ended = new Promise((resolve) => { opts = { timeoutMs: 0, ...opts, onExit: (e) => resolve(e || 'clean') } })
    const handle = await files.watchDir(root, (e) => { events.push(e) }, opts)
    const kinds = (name) => events.filter((e) => e.name === name).map((e) => e.type)
    return { events, ended, handle, kinds, has: (kind, name) => until(`${kind} of ${name}`, () => kinds(name).includes(kind)) }
  }
  const flat = await watch({ includeEntry: true })
  await files.write(root + '/new', 'text')
  await flat.has('write', 'new')
  fs.chmodSync(root + '/old', 0o600)
  await flat.has('chmod', 'old')
  await files.rename(root + '/old', root + '/moved')
  await flat.has('rename', 'old')
  await flat.has('create', 'moved')
  await files.remove(root + '/new')
  await flat.has('remove', 'new')
  await files.write(root + '/below/it', 'x')
  await flat.has('create', 'below')
  const order = flat.kinds('new')
  assert.deepEqual([order[0], order.at(-1), order.indexOf('write') > 0], ['create', 'remove', true])
  assert.deepEqual(flat.kinds('below/it'), [])
  assert.equal(flat.events.find((e) => e.name === 'moved').entry.path, root + '/moved')
  assert.equal(flat.events.find((e) => e.type === 'remove').entry, undefined)
  await flat.handle.stop()
  await flat.ended

  const deep = await watch({ recursive: true })
  await files.write(root + '/below/it', 'again')
  await deep.has('write', 'below/it')
  await files.write(root + '/x/y/z', 'text')
  await deep.has('create', 'x')
  await deep.has('write', 'x/y/z')
  await sandbox.commands.run(`mkdir -p ${root}/p/q && echo 1 > ${root}/p/q/r && mv ${root}/p ${root}/s && echo 2 > ${root}/s/q/t`)
  await deep.has('write', 's/q/t')
  await deep.handle.stop()

  // On a busy machine the time is over before the watch has begun.
  const late = await watch({ timeoutMs: 300 }).then((w) => w.ended, (error) => error)
  assert.equal(late.constructor.name, 'TimeoutError')
  const removed = await watch({})
  await files.remove(root)
  assert.equal(await removed.ended, 'clean')
  await fails('FileNotFoundError', files.watchDir(root, () => {}))
  await files.write(dir + '/file', 'x')
  await fails('InvalidArgumentError', files.watchDir(dir + '/file', () => {}), /not a directory/)
}

// request sends a request as a program without the SDK does.
async function request(url, method, body, headers = {}) {
  if (process.env.E2B_DOMAIN) {
    const answer = await fetch(url, { method, body, headers })
    return { code: answer.status, body: await answer.text() }
  }
  // The names do not resolve, so the gateway's address is the machine's.
  const gateway = new URL(process.env.E2B_SANDBOX_URL)
  const whole = new Request(url, { method, body, headers })
  const { pathname, search } = new URL(url)
  const bytes = Buffer.from(await whole.arrayBuffer())
  return new Promise((resolve, reject) => {
    const call = http.request({
      host: gateway.hostname, port: gateway.port, path: pathname + search, method,
      headers: { ...Object.fromEntries(whole.headers), Host: sandbox.getHost(49983), 'Content-Length': bytes.length },
    }, (answer) => {
      let text = ''
      answer.on('data', (part) => { text += part })
      answer.on('end', () => resolve({ code: answer.statusCode, body: text }))
    })
    call.on('error', reject)
    call.end(bytes)
  })
}

async function signed() {
  const name = dir + '/signed ☃+&?.txt'
  const form = (text, as = 'x') => {
    const data = new FormData()
    data.append('file', new Blob([text]), as)
    return data
  }
  for (const opts of [{}, { useSignatureExpiration: 100 }]) {
    const up = await sandbox.uploadUrl(name, opts)
    const answer = await request(up, 'POST', form('uploaded'))
    assert.equal(answer.code, 200, answer.body)
    assert.equal(JSON.parse(answer.body)[0].path, name)
    const raw = await request(up, 'POST', 'raw', { 'Content-Type': 'application/octet-stream' })
    assert.equal(raw.code, 200, raw.body)
    const down = await sandbox.downloadUrl(name, opts)
    assert.deepEqual(await request(down, 'GET'), { code: 200, body: 'raw' })
    // Without a domain the URL has the address of the gateway, and names no sandbox.
    if (!process.env.E2B_DOMAIN) assert.equal((await fetch(down)).status, 404)
    // It is for one path, one operation and one user, and it cannot be prolonged.
    for (const [url, method] of [
      [down.replace('signed', 'other'), 'GET'], [down, 'POST'], [up, 'GET'], [down + '&username=root', 'GET'],
      [down.replace(/signature=v1_./, 'signature=v1_-'), 'GET'], [down + '&signature_expiration=99999999999', 'GET'],
      [down.replace(/signature=[^&]*&?/, ''), 'GET'],
    ]) {
      const refused = await request(url, method, method === 'POST' ? form('x') : undefined)
      assert.equal(refused.code, 401, url + refused.body)
      assert.equal(JSON.parse(refused.body).code, 401, refused.body)
    }
  }
  const expired = await request(await sandbox.downloadUrl(name, { useSignatureExpiration: -10 }), 'GET')
  assert.equal(expired.code, 401)
  assert.deepEqual(JSON.parse(expired.body), { code: 401, message: 'signature is already expired' })
  const missing = await request(await sandbox.downloadUrl(dir + '/missing'), 'GET')
  assert.equal(missing.code, 404, missing.body)
}

async function terminals() {
  const { pty } = sandbox
  const screen = () => {
    const parts = []
    return { add: (data) => { parts.push(Buffer.from(data)) }, all: () => Buffer.concat(parts).toString() }
  }
  const type = (pid, text) => pty.sendInput(pid, new TextEncoder().encode(text))
  const first = screen()
  const terminal = await pty.create({ cols: 80, rows: 24, onData: first.add, envs: { VALUE: 'value' }, cwd: dir, timeoutMs: 0 })
  await type(terminal.pid, 'echo [$VALUE] [$PWD] [$TERM] [$(stty size)]\n')
  await until('the first command', () => first.all().includes(`[value] [${dir}] [xterm-256color] [24 80]`))
  await pty.resize(terminal.pid, { cols: 133, rows: 44 })
  await type(terminal.pid, 'echo [$(stty size)]\n')
  await until('the new size', () => first.all().includes('[44 133]'))
  await terminal.disconnect()
  const second = screen()
  const again = await pty.connect(terminal.pid, { onData: second.add, timeoutMs: 0 })
  await type(terminal.pid, 'echo [$((40 + 2))]; exit 5\n')
  const ended = await fails('CommandExitError', again.wait())
  assert.equal(ended.exitCode, 5)
  assert.ok(second.all().includes('[42]'), second.all())
  const other = await pty.create({ cols: 80, rows: 24, onData: () => {} })
  assert.equal(await pty.kill(other.pid), true)
  await fails('CommandExitError', other.wait())
  assert.equal(await pty.kill(other.pid), false)
  await fails('NotFoundError', pty.resize(other.pid, { cols: 1, rows: 1 }))
  await fails('NotFoundError', pty.sendInput(other.pid, new Uint8Array([1])))
}

async function git() {
  const { git } = sandbox
  const bare = dir + '/origin.git'
  const work = dir + '/work'
  await git.init(bare, { bare: true, initialBranch: 'main' })
  await git.configureUser('A User', 'user@example.com')
  assert.equal(await git.getConfig('user.name'), 'A User')
  await git.clone(bare, { path: work })
  await git.setConfig('core.abbrev', '12', { scope: 'local', path: work })
  assert.equal(await git.getConfig('core.abbrev', { scope: 'local', path: work }), '12')
  await sandbox.files.write(work + '/file', '1')
  let status = await git.status(work)
  assert.deepEqual([status.isClean, status.hasUntracked, status.fileStatus[0].name], [false, true, 'file'])
  await git.add(work)
  assert.equal((await git.status(work)).stagedCount, 1)
  await git.commit(work, "it's the first", { authorName: 'Another', authorEmail: 'a@example.com' })
  await git.push(work, { remote: 'origin', branch: 'main' })
  await git.createBranch(work, 'side')
  assert.deepEqual((await git.branches(work)).branches.sort(), ['main', 'side'])
  await git.checkoutBranch(work, 'main')
  await git.deleteBranch(work, 'side')
  await sandbox.files.write(work + '/file', '2')
  await git.restore(work, { paths: ['file'] })
  assert.equal(await sandbox.files.read(work + '/file'), '1')
  await sandbox.files.write(work + '/b', '2')
  await git.add(work, { files: ['b'] })
  await git.reset(work, { mode: 'hard' })
  status = await git.status(work)
  assert.deepEqual([status.isClean, status.currentBranch, status.upstream], [true, 'main', 'origin/main'])
  await git.clone(bare, { path: dir + '/clone', branch: 'main', depth: 1 })
  assert.equal(await sandbox.files.read(dir + '/clone/file'), '1')
  assert.equal(await git.remoteGet(dir + '/clone', 'origin'), bare)
  await git.pull(dir + '/clone')
  assert.match((await sandbox.commands.run(`git -C ${bare} log --format=%an:%s`)).stdout, /Another:it's the first/)
  await fails('CommandExitError', git.clone(dir + '/missing', { path: dir + '/x' }))
}

async function about() {
  assert.equal(await sandbox.isRunning(), true)
  const [metrics] = await sandbox.getMetrics()
  assert.ok(metrics.cpuCount > 0 && metrics.memUsed > 0 && metrics.memUsed < metrics.memTotal, JSON.stringify(metrics))
  assert.ok(metrics.diskUsed > 0 && metrics.diskUsed < metrics.diskTotal, JSON.stringify(metrics))
  const again = await Sandbox.connect(sandbox.sandboxId)
  assert.equal((await again.commands.run('echo $GLOBAL')).stdout, 'everywhere\n')
  const open = await Sandbox.create(process.env.POOL, { secure: false, timeoutMs: 300_000 })
  assert.equal((await open.commands.run('echo 1', { user: 'user' })).stdout, '1\n')
  // A command that waits ends with its sandbox.
  const waits = await open.commands.run('sleep 600', { background: true, timeoutMs: 0 })
  const ended = waits.wait().then(() => undefined, (e) => e)
  assert.equal(await open.kill(), true)
  assert.ok(['TimeoutError', 'SandboxNotFoundError', 'SandboxError'].includes((await ended).constructor.name), await ended)
  await fails('SandboxNotFoundError', open.commands.run('true'))
  await fails('TimeoutError', open.files.read('/etc/hostname'), /was not found/)
  assert.equal(await open.isRunning(), false)
  if (process.geteuid() === 0) {
    // The SDK starts the gateway with a command of the image, as root.
    await fails('SandboxError', Sandbox.create(process.env.POOL, {
      mcp: { arxiv: {} }, timeoutMs: 300_000, envs: { HOME: '/' },
    }),
      /^Failed to start MCP gateway: /)
  }
}

const parts = { commands, files, watches, signed, terminals, git, about }

async function all(chosen) {
  for (const [name, part] of Object.entries(chosen)) {
    dir = `${base}/${name}`
    fs.mkdirSync(dir)
    await part().catch((error) => { throw new Error(name, { cause: error }) })
    fs.rmSync(dir, { recursive: true })
  }
}

async function main(mode) {
  const envs = { GLOBAL: 'everywhere', HOME: base, GIT_CONFIG_NOSYSTEM: '1' }
  sandbox = await Sandbox.create(process.env.POOL, { timeoutMs: 3600_000, envs })
  if (mode === 'loop') {
    delete parts.about
    console.log('agent', (await sandbox.commands.run('echo $PPID')).stdout.trim())
  }
  const end = Date.now() + 1000 * (process.env.SECONDS || 0)
  do {
    await all(parts[mode] ? { [mode]: parts[mode] } : parts)
    console.log('round')
  } while (mode === 'loop' && Date.now() < end)
  await sandbox.kill()
}

const { version } = require(process.argv[2] + '/node_modules/e2b/package.json')
main(process.argv[3]).then(() => console.log(`e2b ${version}: ${Object.keys(parts).length} parts`), (error) => {
  console.error(error)
  process.exit(1)
})
