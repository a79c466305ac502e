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
