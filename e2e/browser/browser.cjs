// What a person sees in Chromium. node browser.cjs <directory with playwright-core> <scenario>
// CHROMIUM is the browser. ADDRESS is where every name below DOMAIN leads to. The scenarios have
// further variables.
'use strict'
const assert = require('node:assert/strict')
const fs = require('node:fs')
const { createRequire } = require('node:module')

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
