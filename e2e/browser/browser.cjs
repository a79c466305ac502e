// What a person sees in Chromium. node browser.cjs <directory with playwright-core> <scenario>
// CHROMIUM is the browser. ADDRESS is where every name below DOMAIN leads to. The scenarios have
// further variables.
'use strict'
const assert = require('node:assert/strict')
const fs = require('node:fs')
const http = require('node:http')
const { createRequire } = require('node:module')
const { pathToFileURL } = require('node:url')

const { chromium } = createRequire(process.argv[2] + '/x.js')('playwright-core')
const env = process.env

const scenarios = {
  // The dev server's page shows a changed file without a reload.
  async reload (page) {
    const errors = []
    page.on('pageerror', (e) => errors.push(String(e)))
    await page.goto(env.URL)
    await page.getByRole('heading', { name: 'Hello from a sandbox' }).waitFor()
    await page.evaluate(() => { window.loaded = 'once' })
    fs.writeFileSync(env.FILE, "export const greeting = 'Changed while you watch'\n")
    await page.getByRole('heading', { name: 'Changed while you watch' }).waitFor()
    assert.equal(await page.evaluate(() => window.loaded), 'once', 'the page was loaded again')
    assert.deepEqual(errors, [])
  },

  // Without a masked host the dev server refuses the name of a sandbox.
  async refused (page) {
    const answer = await page.goto(env.URL)
    assert.equal(answer.status(), 403)
    assert.match(await answer.text(), /not allowed/)
  },

  // A link opens a private sandbox, for one port and until the cookie goes.
  async link (page) {
    const plain = await page.goto(env.URL)
    assert.equal(plain.status(), 403)
    assert.match(await page.locator('body').innerText(), /private/)
    const opened = await page.goto(env.LINK)
    assert.equal(opened.status(), 200)
    assert.equal(new URL(page.url()).pathname, '/hello')
    assert.doesNotMatch(await opened.text(), /__Host-berth-access/, 'the pod saw the cookie')
    assert.equal((await page.goto(env.URL)).status(), 200, 'the cookie opens every path')
    assert.equal((await page.goto(env.OTHER_PORT)).status(), 403)
    assert.deepEqual(await page.evaluate(() => document.cookie), '', 'scripts can read the cookie')
    const cookies = (await page.context().cookies()).filter((c) => c.name === '__Host-berth-access')
    assert.equal(cookies.length, 1)
    assert.ok(cookies[0].secure && cookies[0].httpOnly, JSON.stringify(cookies[0]))
    await page.context().clearCookies()
    assert.equal((await page.goto(env.URL)).status(), 403)
  },

  // What a page of another sandbox can do with the cookie of a person who has opened this one: open it, and nothing else.
  // MINE and API are two ports of one private sandbox, MASKED is one with a masked host, SIBLING is of another one.
  async siblings (page) {
    const context = page.context()
    const tabs = {}
    for (const [name, link] of Object.entries(JSON.parse(env.LINKS))) {
      tabs[name] = await context.newPage()
      assert.equal((await tabs[name].goto(link)).status(), 200, name)
    }
    const hits = async (name) => tabs[name].evaluate(async () => (await (await fetch('/hits')).json()).hits)

    // Scripts, forms and WebSockets of its own pages. POST is named by Origin.
    for (const name of ['MINE', 'MASKED']) {
      assert.equal(await tabs[name].evaluate(async () => (await fetch('/get')).status), 200, name)
      assert.equal(await tabs[name].evaluate(async () => (await fetch('/post', { method: 'POST', body: 'x' })).status), 200, name)
      assert.equal(await tabs[name].evaluate(webSocket, env[name] + 'ws'), 'hello', name)
      const posted = await form(tabs[name], env[name] + 'form')
      assert.equal(posted.status(), 200, name)
      const sent = JSON.parse(await posted.text()).headers
      assert.deepEqual(sent['Origin'], ['null'], 'what Chromium sends under no-referrer')
      assert.deepEqual(sent['Sec-Fetch-Site'], ['same-origin'])
      const framed = await tabs[name].evaluate(async () => {
        const frame = document.createElement('iframe')
        frame.src = '/frame'
        const loaded = new Promise((resolve) => { frame.onload = resolve })
        document.body.append(frame)
        await loaded
        return frame.contentDocument.body.innerText
      })
      assert.match(framed, /"pod"/, name)
    }

    // A front end at one port, and its API at another one. The pod allows no CORS, so the hits tell.
    const before = await hits('API')
    await tabs.MINE.evaluate(async (url) => {
      await fetch(url + 'cors', { credentials: 'include' }).catch(() => {})
      await fetch(url + 'post', { method: 'POST', mode: 'no-cors', credentials: 'include', body: 'x' })
    }, env.API)
    assert.equal(await tabs.MINE.evaluate(webSocket, env.API + 'ws'), 'hello')
    assert.equal(await hits('API'), before + 3)

    // The page of a sibling. Whatever it tries sends the cookie, and reaches no pod.
    assert.equal((await page.goto(env.SIBLING)).status(), 200)
    let sent = 0 // requests with the cookie
    const network = await context.newCDPSession(page)
    await network.send('Network.enable')
    network.on('Network.requestWillBeSentExtraInfo', (r) => {
      if (r.associatedCookies.some((c) => c.cookie.name === '__Host-berth-access' && c.blockedReasons.length === 0)) sent++
    })
    for (const name of ['MINE', 'MASKED', 'API']) {
      const before = await hits(name)
      assert.equal(await page.evaluate(webSocket, env[name] + 'ws'), 'refused', name)
      sent = 0
      const tries = await page.evaluate(async (url) => {
        const tries = [
          (at) => fetch(at, { credentials: 'include' }),
          (at) => fetch(at, { credentials: 'include', referrerPolicy: 'no-referrer' }),
          (at) => fetch(at, { credentials: 'include', mode: 'no-cors' }),
          (at) => fetch(at, { credentials: 'include', mode: 'no-cors', method: 'POST', body: 'x' }),
          (at) => fetch(at, { credentials: 'include', mode: 'no-cors', method: 'POST', body: 'x', referrerPolicy: 'no-referrer' }),
          (at) => fetch(at, { credentials: 'include', mode: 'no-cors', keepalive: true })
        ]
        for (const tag of ['img', 'script', 'iframe', 'embed', 'object', 'link']) {
          tries.push((at) => new Promise((resolve) => {
            const e = document.createElement(tag)
            e.onload = e.onerror = resolve
            e.rel = 'stylesheet'
            e[{ object: 'data', link: 'href' }[tag] || 'src'] = at
            document.body.append(e)
          }))
        }
        for (const policy of ['unsafe-url', 'no-referrer']) {
          tries.push((at) => new Promise((resolve) => { // a form, into a frame
            const meta = document.createElement('meta')
            Object.assign(meta, { name: 'referrer', content: policy })
            document.head.append(meta)
            const frame = document.createElement('iframe')
            frame.name = policy + at
            document.body.append(frame)
            const f = document.createElement('form')
            Object.assign(f, { method: 'POST', action: at, target: frame.name })
            document.body.append(f)
            frame.onload = resolve
            f.submit()
          }))
        }
        for (const [i, one] of tries.entries()) await Promise.resolve(one(url + 'try' + i)).catch(() => {})
        return tries.length
      }, env[name])
      while (sent < tries) await page.waitForTimeout(50) // the events may come later than the answers
      assert.equal(await hits(name), before, name)
    }
    const opened = []
    for (const [method, status] of [['GET', 200], ['POST', 403]]) { // in a window of its own
      const [popup] = await Promise.all([context.waitForEvent('page'), page.evaluate(([method, action]) => {
        const f = document.createElement('form')
        Object.assign(f, { method, action, target: 'window-' + method })
        document.body.append(f)
        f.submit()
      }, [method, env.MINE + 'window'])])
      await popup.waitForLoadState()
      opened.push([status, await popup.evaluate(() => performance.getEntriesByType('navigation')[0].responseStatus)])
    }
    assert.deepEqual(opened, [[200, 200], [403, 403]])
    const answer = await Promise.all([page.waitForNavigation(), page.evaluate((url) => { location.href = url }, env.MASKED)])
    assert.equal(answer[0].status(), 200, 'a person may follow a link of a sibling')
  },

  // A page of another origin uses the stock SDK, bundled by Vite: VITE and SDK are the directories with the packages.
  async sdk (page) {
    const { build } = await import(pathToFileURL(createRequire(env.VITE + '/x.js').resolve('vite')))
    const root = fs.mkdtempSync(env.DIR + '/page-')
    fs.symlinkSync(env.SDK + '/node_modules', root + '/node_modules')
    fs.writeFileSync(root + '/page.js', "import * as e2b from 'e2b'\nwindow.e2b = e2b\n")
    fs.writeFileSync(root + '/index.html', '<!doctype html><script type="module" src="/page.js"></script>')
    await build({ root, logLevel: 'error', configFile: false, build: { outDir: 'dist', target: 'esnext', minify: false } })
    const server = http.createServer((request, response) => {
      const file = root + '/dist' + (request.url === '/' ? '/index.html' : request.url)
      response.setHeader('Content-Type', file.endsWith('.js') ? 'text/javascript' : 'text/html')
      response.end(fs.existsSync(file) ? fs.readFileSync(file) : '')
    })
    await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve))
    const seen = await (async () => {
      await page.goto(`http://127.0.0.1:${server.address().port}/`)
      await page.waitForFunction(() => window.e2b)
      return page.evaluate(useSDK, { apiKey: env.KEY, domain: env.E2B_DOMAIN, pool: env.POOL, dir: env.DIR })
    })().finally(() => server.close())
    assert.deepEqual(seen, {
      run: [0, 'out\n', 'err\n'], exit: ['CommandExitError', 7], read: 'written ☃', listed: ['file'], watched: 'watched',
      terminal: true, uploaded: [200, 'signed'], unsigned: [401, 401], noToken: [401, 'agent_token'], unknown: 'sandbox_not_found',
      running: [true, false], key: 'AuthenticationError', killed: true
    })
  },

  // Error pages run no script, load nothing and say what to do.
  async pages (page) {
    const complaints = []
    page.on('console', (m) => { if (/Content.Security.Policy/i.test(m.text())) complaints.push(m.text()) })
    for (const [url, status, text] of JSON.parse(env.PAGES)) {
      const answer = await page.goto(url)
      assert.equal(answer.status(), status, url)
      assert.match(await page.locator('body').innerText(), new RegExp(text), url)
      assert.notEqual(await page.title(), '', url)
    }
    assert.deepEqual(complaints, [])
  }
}

// useSDK runs in a page that has the SDK. It returns what it has seen.
async function useSDK ({ apiKey, domain, pool, dir }) {
  const { Sandbox } = window.e2b
  const name = (call) => call.then(() => 'none', (e) => e)
  const until = async (check) => { while (!check()) await new Promise((resolve) => setTimeout(resolve, 10)) } // the test has a limit
  const json = async (url, options) => { const a = await fetch(url, options); return [a.status, await a.json()] }
  const seen = {}
  const sandbox = await Sandbox.create(pool, { apiKey, domain, timeoutMs: 120_000 })
  const run = await sandbox.commands.run('echo out; echo err >&2')
  seen.run = [run.exitCode, run.stdout, run.stderr]
  const exit = await name(sandbox.commands.run('exit 7'))
  seen.exit = [exit.constructor.name, exit.exitCode]

  const at = dir + '/of the page'
  const events = []
  await sandbox.files.makeDir(at)
  const watch = await sandbox.files.watchDir(at, (e) => events.push(e.name))
  await sandbox.files.write(at + '/file', 'written ☃')
  seen.read = await sandbox.files.read(at + '/file')
  seen.listed = (await sandbox.files.list(at)).map((f) => f.name)
  await sandbox.files.write(at + '/watched', '')
  await until(() => events.includes('watched'))
  seen.watched = 'watched'
  await watch.stop()

  let screen = ''
  const terminal = await sandbox.pty.create({ cols: 80, rows: 24, onData: (data) => { screen += new TextDecoder().decode(data) } })
  await sandbox.pty.sendInput(terminal.pid, new TextEncoder().encode('echo [$((40 + 2))]\n'))
  await until(() => screen.includes('[42]'))
  seen.terminal = await sandbox.pty.kill(terminal.pid)

  const form = new FormData()
  form.append('file', new Blob(['signed']), 'x')
  const up = await fetch(await sandbox.uploadUrl(at + '/signed'), { method: 'POST', body: form })
  const down = await sandbox.downloadUrl(at + '/signed')
  seen.uploaded = [up.status, await (await fetch(down)).text()]
  const [status, body] = await json(down.replace(/signature=v1_./, 'signature=v1_-')) // the agent refuses it
  seen.unsigned = [status, body.code]

  const agent = `https://${sandbox.getHost(49983)}`
  const call = { method: 'POST', headers: { 'content-type': 'application/json', authorization: 'Basic dXNlcjo=' }, body: '{}' }
  const refused = await json(agent + '/process.Process/List', call) // the router refuses it
  seen.noToken = [refused[0], refused[1].reason]
  seen.unknown = (await json(agent.replace(sandbox.sandboxId, 'zzzzzzzzzzzzzzzzzzzz') + '/process.Process/List', call))[1].reason
  seen.running = [await sandbox.isRunning()]
  seen.key = (await name(Sandbox.create(pool, { apiKey: 'e2b_00000000000000000000', domain }))).constructor.name
  seen.killed = await sandbox.kill()
  seen.running.push(await sandbox.isRunning())
  return seen
}

// webSocket runs in a page. It returns what is echoed, or that there is no WebSocket.
async function webSocket (url) {
  const socket = new WebSocket(url.replace('https:', 'wss:'))
  const answer = new Promise((resolve) => {
    socket.onopen = () => socket.send('hello')
    socket.onmessage = (m) => resolve(m.data)
    socket.onerror = () => resolve('refused')
  })
  const data = await answer
  socket.close()
  return data
}

// form submits a form to a URL from a page without referrers, and returns the answer.
async function form (page, url) {
  const [answer] = await Promise.all([page.waitForNavigation(), page.evaluate((action) => {
    const meta = document.createElement('meta')
    Object.assign(meta, { name: 'referrer', content: 'no-referrer' })
    document.head.append(meta)
    const f = document.createElement('form')
    Object.assign(f, { method: 'POST', action })
    document.body.append(f)
    f.submit()
  }, url)])
  return answer
}

async function main () {
  const browser = await chromium.launch({
    executablePath: env.CHROMIUM,
    args: ['--no-sandbox', `--host-resolver-rules=MAP *.${env.DOMAIN} ${env.ADDRESS}, MAP ${env.DOMAIN} ${env.ADDRESS}`]
  })
  try {
    const context = await browser.newContext({ ignoreHTTPSErrors: true })
    context.setDefaultTimeout(30_000)
    await scenarios[process.argv[3]](await context.newPage())
  } finally {
    await browser.close()
  }
}

main().catch((e) => { console.error(e); process.exit(1) })
