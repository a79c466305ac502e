// The console in Chromium. node console.cjs <directory with playwright-core> <scenario> <directory with axe-core>
// CHROMIUM is the browser, CONSOLE the address of the console. ADDRESS is where every name below DOMAIN leads to. SHOTS, if
// set, is the directory for pictures. The scenarios have further variables.
'use strict'
const assert = require('node:assert/strict')
const fs = require('node:fs')
const path = require('node:path')
const { createRequire } = require('node:module')

const { chromium } = createRequire(process.argv[2] + '/x.js')('playwright-core')
const axe = fs.readFileSync(path.join(process.argv[4], 'node_modules', 'axe-core', 'axe.min.js'), 'utf8')
const env = process.env
const at = (rest) => new URL(rest, env.CONSOLE).href

// accessible fails with what axe finds serious in a page.
async function accessible (page, what) {
  await page.evaluate(axe + ';0')
  const { violations } = await page.evaluate(() => window.axe.run(document, { resultTypes: ['violations'] }))
  const serious = violations.filter((v) => ['serious', 'critical'].includes(v.impact))
    .map((v) => `${v.id}: ${v.help}: ${v.nodes.slice(0, 3).map((n) => n.html.slice(0, 200) + ' ' + (n.failureSummary || '')).join(' | ')}`)
  assert.deepEqual(serious, [], what)
}

// fits fails if a page is wider than its window.
async function fits (page, what) {
  const [page_, window_] = await page.evaluate(() => [document.documentElement.scrollWidth, document.documentElement.clientWidth])
  assert.ok(page_ <= window_, `${what}: ${page_} pixels in a window of ${window_}`)
}

async function shot (page, name) {
  const picture = await page.screenshot()
  assert.ok(picture.length <= 150 << 10, `${name}: ${picture.length} bytes`)
  if (env.SHOTS) fs.writeFileSync(path.join(env.SHOTS, name + '.png'), picture)
}

async function signIn (page, key) {
  await page.goto(env.CONSOLE)
  if (!key) return // an API without keys has no sign-in
  await page.getByLabel('API key').fill(key)
  await page.getByRole('button', { name: 'Sign in' }).click()
}

// refusals collects what the policies of pages refuse, and errors of scripts.
function refusals (page) {
  const all = []
  page.on('pageerror', (e) => all.push(String(e)))
  page.on('console', (m) => { if (m.type() === 'error' && /Content Security Policy|Refused/.test(m.text())) all.push(m.text()) })
  return all
}

const rows = (page) => page.locator('.xterm-rows').innerText()

// shows waits until the terminal shows a text.
async function shows (page, pattern) {
  for (let i = 0; i < 100; i++) {
    if (pattern.test(await rows(page))) return
    await page.waitForTimeout(100)
  }
  assert.match(await rows(page), pattern)
}

const scenarios = {
  // Signs in, looks at every page in both colours and widths, scales a pool, opens a sandbox, uses its terminal and its
  // files, and ends it.
  async tour (page) {
    const errors = refusals(page)
    await signIn(page, 'e2b_00000000000000000000000000000000')
    await page.getByRole('alert').waitFor()
    await accessible(page, 'a refused sign-in')
    await signIn(page, env.KEY)
    await page.getByRole('heading', { name: 'Overview', level: 1 }).waitFor()
    await page.locator('figure.chart').first().waitFor()

    const pages = { overview: '', pools: 'pools', pool: 'pools/' + env.POOL, sandboxes: 'sandboxes', sandbox: 'sandboxes/' + env.SANDBOX,
      end: `sandboxes/${env.SANDBOX}/end`, routers: 'routers', fences: 'fences', teams: 'teams', connect: 'connect',
      files: `sandboxes/${env.SANDBOX}/files`, terminal: `sandboxes/${env.SANDBOX}/terminal` }
    for (const colorScheme of ['light', 'dark']) {
      await page.emulateMedia({ colorScheme })
      for (const width of [1920, 320]) {
        await page.setViewportSize({ width, height: 1080 })
        for (const [name, where] of Object.entries(pages)) {
          const what = `${name}, ${colorScheme}, ${width}`
          const answer = await page.goto(at(where))
          assert.equal(answer.status(), 200, what)
          await fits(page, what)
          await accessible(page, what)
        }
      }
    }
    assert.deepEqual(errors, [])
    await page.setViewportSize({ width: 1280, height: 800 })

    await page.goto(at('pools/' + env.POOL))
    await page.locator('input[name=warm]').fill(env.WARM)
    await page.getByRole('button', { name: /scale|set|change/i }).first().click()
    await page.getByText('The pool is being scaled.').waitFor()
    await page.emulateMedia({ colorScheme: 'light' })
    await shot(page, 'console-pool')

    await page.goto(at('sandboxes'))
    await page.getByLabel('Metadata').fill('job=17')
    await page.getByRole('button', { name: 'Search' }).click()
    await page.getByRole('link', { name: env.SANDBOX, exact: true }).click()
    await page.getByRole('heading', { name: env.SANDBOX }).waitFor()
    await shot(page, 'console-sandbox')

    // What the program prints is the sum, which is not in what is typed.
    await page.getByRole('link', { name: 'Terminal' }).click()
    await page.getByText('Connected.').waitFor()
    await page.keyboard.type('echo sum-$((40+2))\n')
    await shows(page, /^sum-42/m)
    await page.keyboard.type("printf '\\033]0;owned\\007\\033]2;owned\\007\\033]8;;https://evil.example\\007link\\033]8;;\\007\\033]52;c;b3duZWQ=\\007done-%d\\n' $((40+3))\n")
    await shows(page, /done-43/)
    assert.doesNotMatch(await page.title(), /owned/, 'the program has named the window')
    assert.equal(await page.locator('.xterm-rows a, .xterm-underline-5').count(), 0)
    const columns = async (mark) => {
      await page.keyboard.type(`stty size | sed 's/^/${mark}"is /; s/"//'\n`)
      await shows(page, new RegExp(`^${mark}is \\d+ \\d+`, 'm'))
      return Number((await rows(page)).match(new RegExp(`^${mark}is \\d+ (\\d+)`, 'm'))[1])
    }
    const wide = await columns('a')
    await page.setViewportSize({ width: 700, height: 800 })
    await page.waitForTimeout(500)
    const narrow = await columns('b')
    assert.ok(narrow < wide, `${narrow} columns after ${wide}`)
    await page.setViewportSize({ width: 1280, height: 800 })
    const hostile = '<img src=x onerror=alert(1)>\u202e.txt'
    await page.keyboard.type(`mkdir -p ${env.DIR}/sub && printf hello > ${env.DIR}/a.txt && printf x > "${env.DIR}/$(printf '<img src=x onerror=alert(1)>\\342\\200\\256.txt')" && echo made-$((40+4))\n`)
    await shows(page, /^made-44/m)
    await page.keyboard.type(`cd ${env.DIR} && clear && ls -l\n`)
    await shows(page, /a\.txt/)
    await page.waitForTimeout(300)
    await shot(page, 'console-terminal')
    await page.keyboard.press('Shift+Escape')
    assert.equal(await page.evaluate(() => document.activeElement.id), 'terminal-leave', 'a key leads out of the terminal')

    await page.goto(at(`sandboxes/${env.SANDBOX}/files?path=${encodeURIComponent(env.DIR)}`))
    await page.getByText('3 entries.').waitFor()
    assert.equal(await page.locator('#files-rows img').count(), 0)
    await page.getByText('<img src=x onerror=alert(1)>\\u{202e}.txt').waitFor()
    const [download] = await Promise.all([page.waitForEvent('download'), page.getByRole('button', { name: 'Download a.txt' }).click()])
    assert.equal(fs.readFileSync(await download.path(), 'utf8'), 'hello')
    await page.getByRole('button', { name: 'Open sub' }).click()
    await page.getByText('The directory is empty.').waitFor()
    await page.goBack()
    await page.getByText('3 entries.').waitFor()
    await accessible(page, 'files')
    await shot(page, 'console-files')

    // Another window shows the end without a reload.
    const other = await page.context().newPage()
    await other.goto(at('sandboxes?metadata=job%3D17'))
    await other.getByRole('link', { name: env.SANDBOX, exact: true }).waitFor()
    await other.bringToFront()
    await page.goto(at(`sandboxes/${env.SANDBOX}/end`))
    const began = Date.now()
    await page.getByRole('button', { name: /^End/ }).click()
    await other.getByRole('link', { name: env.SANDBOX, exact: true }).waitFor({ state: 'hidden' })
    console.log(`the list showed the end ${Date.now() - began} ms after the click`)

    assert.deepEqual(errors, [])
    await page.getByRole('button', { name: 'Sign out' }).click()
    await page.goto(at('pools'))
    await page.getByLabel('API key').waitFor()
  },

  // A terminal whose connection ends, hangs, or is away for longer than the page tries.
  async cut (page) {
    const gateway = async (what) => assert.equal((await fetch(env.GATEWAY + what)).status, 200, what)
    const errors = refusals(page)
    await signIn(page, env.KEY)
    await page.getByRole('heading', { name: 'Overview', level: 1 }).waitFor()
    await page.goto(at(`sandboxes/${env.SANDBOX}/terminal`))
    const state = (text, timeout = 60_000) => page.locator('#terminal-state', { hasText: text }).waitFor({ timeout })
    const again = page.getByRole('button', { name: 'Connect again' })
    await state('Connected.')
    let n = 0
    // same fails if the shell is another one, or if input of the time without a connection is lost or doubled.
    const same = async (cut, back) => {
      const mark = ++n
      await page.keyboard.type(`echo cut-$((${mark}+40)); sleep 3; echo output-$((${mark}+40))\n`)
      await shows(page, new RegExp(`^cut-${mark + 40}`, 'm'))
      await cut()
      await state('The connection was lost')
      await page.keyboard.type(`echo input-$((${mark}+40))-$kept\n`)
      await back()
      await state('Connected.')
      await shows(page, new RegExp(`^input-${mark + 40}-here`, 'm'))
      return (await rows(page)).match(new RegExp(`^output-${mark + 40}|^input-${mark + 40}`, 'gm'))
    }
    await page.keyboard.type("kept=here; columns() { stty size | cut -d' ' -f2; }; wide=$(columns); echo begun-$((40+2))\n")
    await shows(page, /^begun-42/m)
    assert.deepEqual(await same(() => gateway('/kill'), async () => {
      await page.setViewportSize({ width: 900, height: 800 }) // meanwhile
      await gateway('/start')
    }), ['output-41', 'input-41'])
    await page.keyboard.type('until [ $(columns) -lt $wide ]; do sleep .1; done; echo narrow-$((40+2))\n')
    await shows(page, /^narrow-42/m)
    assert.equal(await again.isVisible(), false)
    // What the agent has given to a connection that hangs may be lost.
    const heard = await same(() => gateway('/pause'), () => gateway('/resume'))
    assert.deepEqual(heard.filter((line) => line !== 'output-42'), ['input-42'])
    await page.keyboard.type('echo before-$((40+3))\n')
    await shows(page, /^before-43/m)
    await gateway('/kill')
    await again.waitFor({ timeout: 90_000 })
    await state('The shell goes on')
    await gateway('/start')
    await again.click()
    await state('Connected.')
    await page.keyboard.type('echo after-$((40+4))-$kept\n')
    await shows(page, /^after-44-here/m)
    await shows(page, /^before-43/m)
    await page.keyboard.type('exit 3\n')
    await state('The shell has ended with exit code 3.')
    await page.getByRole('button', { name: 'New shell' }).click()
    await state('Connected.')
    await page.keyboard.type('echo other-$((40+5))-$kept.\n')
    await shows(page, /^other-45-\./m)
    assert.deepEqual(errors, [])
  },

  // What a page of a sandbox can do with the session of a person who has signed in: nothing.
  async stranger (page) {
    await signIn(page, env.KEY)
    await page.getByRole('heading', { name: 'Overview', level: 1 }).waitFor()
    const evil = await page.context().newPage()
    await evil.goto(env.EVIL)
    const end = at(`sandboxes/${env.SANDBOX}/end`)
    // By script, with the cookies.
    assert.equal(await evil.evaluate(async (url) => {
      try { return (await fetch(url, { credentials: 'include' })).status } catch { return 'refused' }
    }, at('pools')), 'refused')
    await evil.evaluate(async (url) => { try { await fetch(url, { method: 'POST', mode: 'no-cors', credentials: 'include', body: new URLSearchParams() }) } catch {} }, end)
    // By a form.
    const [answer] = await Promise.all([evil.waitForNavigation(), evil.evaluate((action) => {
      const f = document.createElement('form')
      Object.assign(f, { method: 'POST', action })
      document.body.append(f)
      f.submit()
    }, end)])
    assert.ok([303, 403].includes(answer.status()) || /sign-in/.test(answer.url()), `${answer.status()} ${answer.url()}`)
    // In a frame.
    await evil.goto(env.EVIL)
    const framed = await evil.evaluate(async (url) => {
      const frame = document.createElement('iframe')
      frame.src = url
      const loaded = new Promise((resolve) => { frame.onload = resolve })
      document.body.append(frame)
      await loaded
      try { return frame.contentDocument.title } catch { return 'closed' }
    }, at('pools'))
    assert.equal(framed, 'closed')
    assert.equal((await page.context().cookies(env.EVIL)).filter((c) => /berth-console/.test(c.name)).length, 0)
    await page.goto(at('sandboxes/' + env.SANDBOX))
    await page.locator('#title').getByText('running').waitFor()
    const policy = (await page.goto(at(''))).headers()['content-security-policy']
    assert.match(policy, /frame-ancestors 'none'/)
  },

  // A list of thousands of sandboxes: bytes and the time of the server are bounded, the time to paint is said.
  async many (page) {
    await signIn(page, env.KEY)
    await page.getByRole('heading', { name: 'Overview', level: 1 }).waitFor()
    const spent = []
    for (let i = 0; i < 10; i++) {
      const answer = await page.goto(at('sandboxes'))
      const bytes = (await answer.body()).length
      assert.ok(bytes < 200 << 10, `${bytes} bytes`)
      const [server, paint] = await page.evaluate(() => {
        const n = performance.getEntriesByType('navigation')[0]
        return [n.responseEnd - n.requestStart, performance.getEntriesByName('first-contentful-paint')[0]?.startTime]
      })
      spent.push([server, paint, bytes])
    }
    const of = (n) => {
      // A page may have no time of its paint yet.
      const sorted = spent.map((one) => one[n]).filter((value) => value !== undefined).sort((a, b) => a - b)
      if (sorted.length === 0) return 'unknown'
      const middle = (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2
      return `${middle.toFixed(0)} (${sorted[0].toFixed(0)} to ${sorted.at(-1).toFixed(0)} in ${sorted.length})`
    }
    console.log(`medians: answered within ${of(0)} ms, painted at ${of(1)} ms, ${of(2)} bytes`)
    await page.getByRole('link', { name: 'Next page' }).click()
    await page.getByRole('link', { name: 'First page' }).waitFor()
    await page.getByLabel('ID, or its begin').fill(env.SANDBOX)
    await page.getByRole('button', { name: 'Search' }).click()
    await page.getByRole('link', { name: env.SANDBOX, exact: true }).waitFor()
    assert.equal(await page.locator('#sandboxes tbody tr').count(), 1)
    await page.goto(at('sandboxes'))
    await page.setViewportSize({ width: 1280, height: 600 })
    await shot(page, 'console-sandboxes')
  },

  // The overview after some load: each chart has a line that has left zero.
  async charts (page) {
    await page.setViewportSize({ width: 1280, height: 1080 })
    await page.goto(env.CONSOLE)
    for (const [chart, line] of [['claims', 'granted'], ['claim-time', '99 of 100'], ['warm', 'warm'], ['live', 'live'],
      ['releases', 'by a call'], ['acknowledged', '99 of 100']]) {
      const shown = await page.locator(`#chart-${chart} desc`).textContent()
      assert.match(shown, new RegExp(`${line}: latest [^,]+, highest (?!0[ /;]|0$)`), chart)
      assert.ok(await page.locator(`#chart-${chart} path.line-1`).count(), chart)
    }
    await shot(page, 'console-overview')
    await page.emulateMedia({ colorScheme: 'dark' })
    await shot(page, 'console-overview-dark')
  }
}

async function main () {
  const browser = await chromium.launch({
    executablePath: env.CHROMIUM,
    args: ['--no-sandbox', `--host-resolver-rules=MAP *.${env.DOMAIN} ${env.ADDRESS}, MAP ${env.DOMAIN} ${env.ADDRESS}`]
  })
  try {
    const context = await browser.newContext({ ignoreHTTPSErrors: true, acceptDownloads: true })
    context.setDefaultTimeout(30_000)
    await scenarios[process.argv[3]](await context.newPage())
  } finally {
    await browser.close()
  }
}

main().catch((e) => { console.error(e); process.exit(1) })
