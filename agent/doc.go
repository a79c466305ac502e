// Package agent is the agent in a sandbox: the HTTP server through which commands run and files move. It
// speaks what E2B's SDKs expect of the agent in theirs, on port 49983.
//
//	GET  /health              204 as soon as the agent serves
//	GET  /init, POST /init    see package initbox
//	POST /sleep               takes an order of the allocator: see packages initbox and freeze
//	POST /archive             the same, and answers with an archive of files: see packages initbox and archive
//	POST /restore             the same, with an archive whose files are restored
//	GET  /busy                200 while a command runs and the sandbox is awake, else 204. It says no more, and
//	                          needs no token, so that it can be the busyProbe of a pool
//	GET  /envs                the environment variables of the sandbox, without its secrets
//	GET  /metrics             CPU, memory and disk of the sandbox
//	GET  /metrics/history     the same every 15 s since its configuration, of the last hour. Not in E2B
//	/process.Process/*        commands and terminals: package process
//	/filesystem.Filesystem/*  files and directories, and /files for their contents: package files
//
// # States
//
// The states are those of package initbox: an agent that is not configured serves /health, /busy, /init and /restore,
// and answers every other call with 503. It is configured once, for one sandbox, until its process ends. It restores
// files once, and is not configured meanwhile, nor after a failure. If they are those of a stopped sandbox, their
// archive has the configuration too, sealed, and it is configured with that one only. Files of the configuration that
// lie below archived paths are not written again.
//
// A configured agent is awake or asleep, as package freeze says. While it is asleep it serves /health, /busy, /init,
// /sleep, /archive and /metrics, and answers every other call with 503. Streams that have begun stay open, and no more
// of their requests is read until it is awake. A call that was read before may still change a file a moment later.
//
// Two boxes are read at one time, each for 10 s at most, and others are answered with 503: a box is up to 1.6 MiB
// of a client that has no token. The same holds for 16 orders of 56 KiB at most, for 2 s. One archive and one restore
// keep their places until they end. Their streams end when they do not move for 30 s, and after one hour.
//
// 4,096 calls with the token are served at one time, and more are answered with resource_exhausted (429). A
// client that sends nothing of a request for 5 minutes ends it, so a stream of requests needs keepalives. A
// body that is not read to its end may take 10 s more. A stream of answers may be silent.
//
// # Access
//
//   - A configured agent serves a call that carries the sandbox's access token in X-Access-Token, a
//     request to /files with a signature that the token has made, and every call if the configuration says
//     public. It answers every other call with 401. The token is compared in constant time.
//   - No address is trusted. A process of the sandbox needs the token too, although it connects from
//     inside. It needs none to do what its own user may do.
//   - The token, the secrets and the private key are in the memory of the agent's process only: not in its environment,
//     its arguments or a file. The archive of a stopped sandbox has the first two sealed. The process is not dumpable
//     (prctl PR_SET_DUMPABLE), so that processes of the same user cannot read its memory through /proc or ptrace.
//
// What breaks this: a process of the sandbox that has CAP_SYS_PTRACE, as root has in many containers.
// A call that runs a command as root was made with the token, so that command learns nothing that its
// caller does not know. But what root runs by itself, such as an image's server that runs as root, can
// read the token. Everything in one sandbox is one security domain: the boundary that Berth keeps is
// that of the pod.
package agent
