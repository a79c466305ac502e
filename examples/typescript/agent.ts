// Claims a sandbox for a job of several steps, and moves its end as long as there are steps.
import { Sandbox } from 'e2b'

const pool = process.env.POOL ?? 'demo'
const steps = ['plan', 'build', 'test']

async function main(): Promise<void> {
  const sandbox = await Sandbox.create(pool, { timeoutMs: 30_000, metadata: { job: 'example' } })
  try {
    for (const step of steps) {
      await sandbox.setTimeout(30_000)
      const answer = await fetch(`https://${sandbox.getHost(8080)}/${step}`, { method: 'POST' })
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
