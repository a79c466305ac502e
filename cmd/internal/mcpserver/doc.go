// Package mcpserver offers Berth's sandboxes as tools of the Model Context Protocol (MCP), over standard input and
// output or over streamable HTTP. Every call goes to Berth's API and to the agents of sandboxes with the key of
// its caller, through package client.
//
// # Guarantees
//
//   - The key of a caller is in no answer and in no error, and is sent to the API only.
//   - Over HTTP nothing is kept between two requests. The key of a request decides what it reaches, so a request
//     can use no other caller's sandboxes. The API has accepted the key before the body is read.
//   - Whatever a sandbox sends is data in an answer, of bounded size, and an answer says what was left out.
//   - A command ends when its caller goes, when its time is over, and when the server ends.
//   - Requests over HTTP have bounds for bodies, time, and how many there are, in all and of one team.
//
// # What breaks them
//
// A sandbox outlives the session that has created it, unless Stdio is asked to kill it. A command that leaves
// processes behind leaves them running in its sandbox.
package mcpserver
