// Claims a sandbox for a job of several steps, and moves its end as long as there are steps.
import { Sandbox } from 'e2b'

const pool = process.env.POOL ?? 'demo'
const steps = ['plan', 'build', 'test']

// Names the sandbox by its host or, where such names do not resolve, at the gateway by headers.
async function post(sandbox: Sandbox, port: number, path: string): Promise<Response> {
  const gateway = process.env.E2B_SANDBOX_URL
  if (!gateway) return fetch(`https://${sandbox.getHost(port)}/${path}`, { method: 'POST' })
  const headers = { 'E2b-Sandbox-Id': sandbox.sandboxId, 'E2b-Sandbox-Port': String(port) }
  return fetch(`${gateway}/${path}`, { method: 'POST', headers })
}

async function main(): Promise<void> {
  const sandbox = await Sandbox.create(pool, { timeoutMs: 30_000, metadata: { job: 'example' } })
  try {
    for (const step of steps) {
      await sandbox.setTimeout(30_000)
      const answer = await post(sandbox, 8080, step)
      const seen = await answer.json() as { method: string, path: string }
      console.log(`${step}: ${seen.method} ${seen.path}`)
    }
  } finally {
    await sandbox.kill()
  }
}

main().catch((error) => {
  console.error(error)
  process.exit(1)
})
