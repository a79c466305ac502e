// The terminal of a sandbox in Berth's console. It speaks Connect with the agent in the sandbox: the bytes pass the gateway
// and not the console.
const place = document.getElementById("terminal");
const status = document.getElementById("terminal-state");
const again = document.getElementById("terminal-again");
const {agent, token} = place.dataset;

// xterm.js makes <style> elements and sets attributes "style", which the policy of the page refuses. The elements get the
// nonce of the page, and the styles are set through the CSSOM, which the policy allows.
const nonce = document.querySelector("script[nonce]").nonce;
const create = document.createElement.bind(document);
document.createElement = (name, options) => {
  const made = create(name, options);
  if (name === "style") made.nonce = nonce;
  return made;
};
const setAttribute = Element.prototype.setAttribute;
HTMLElement.prototype.setAttribute = function (name, value) {
  if (name === "style") this.style.cssText = value;
  else setAttribute.call(this, name, value);
};

const [{Terminal}, {FitAddon}] = await Promise.all([import(place.dataset.xterm), import(place.dataset.fit)]);

const say = (text) => { status.textContent = text; };
const sleep = (ms) => new Promise((done) => { setTimeout(done, ms); });

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const theme = () => ({
  background: colour("--sheet"), foreground: colour("--ink"), cursor: colour("--ink"), cursorAccent: colour("--sheet"),
  selectionBackground: colour("--focus") + "55",
});
const terminal = new Terminal({
  cursorBlink: false, scrollback: 5000, fontSize: 14, fontFamily: colour("--mono"), theme: theme(), minimumContrastRatio: 4.5,
  screenReaderMode: true, linkHandler: {activate() {}},
});
// What a program in the sandbox may not do: name the window (0, 1, 2), show links (8), and write the clipboard (52).
for (const command of [0, 1, 2, 8, 52]) terminal.parser.registerOscHandler(command, () => true);
const fit = new FitAddon();
terminal.loadAddon(fit);
terminal.open(place);
fit.fit();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { terminal.options.theme = theme(); });
// The terminal takes the key Tab, so another key must lead out of it.
terminal.attachCustomKeyEventHandler((e) => {
  if (e.key !== "Escape" || !e.shiftKey) return true;
  if (e.type === "keydown") document.getElementById("terminal-leave").focus();
  return false;
});

const bytesOf = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const textOf = (bytes) => {
  let text = "";
  for (const b of bytes) text += String.fromCharCode(b);
  return btoa(text);
};

// Refused is an answer of the agent, or of the router before it, that another attempt does not change.
class Refused extends Error {}

const send = (method, type, body, more) => fetch(agent + "/process.Process/" + method, {
  method: "POST", body, cache: "no-store", credentials: "omit", referrerPolicy: "no-referrer",
  headers: {"Content-Type": type, "Connect-Protocol-Version": "1", "Keepalive-Ping-Interval": String(alive), ...token && {"X-Access-Token": token}}, ...more,
});

const check = async (answer) => {
  if (answer.ok) return;
  let message = "The sandbox answered " + answer.status + ".";
  try { message = String((await answer.json()).message || message).slice(0, 500); } catch { /* it is no JSON */ }
  if (answer.status === 429 || answer.status >= 500) throw new Error(message);
  throw new Refused(message);
};

const unary = async (method, body, more) => {
  const answer = await send(method, "application/json", JSON.stringify(body), more);
  await check(answer);
};

const maxMessage = 4 << 20;
const alive = 10; // s of silence after which the agent sends a message
const silence = 25_000; // ms of silence after which a stream is cut off

// stream calls on with each message of a stream of Connect: a byte of flags, four of the length, and JSON.
const stream = async (method, body, on) => {
  const cut = new AbortController();
  const inTime = async (promise) => {
    const timer = setTimeout(() => cut.abort(), silence);
    try { return await promise; } finally { clearTimeout(timer); }
  };
  const json = new TextEncoder().encode(JSON.stringify(body));
  const request = new Uint8Array(5 + json.length);
  new DataView(request.buffer).setUint32(1, json.length);
  request.set(json, 5);
  const answer = await inTime(send(method, "application/connect+json", request, {signal: cut.signal}));
  await check(answer);
  const reader = answer.body.getReader();
  let rest = new Uint8Array(0);
  for (;;) {
    const {done, value} = await inTime(reader.read());
    if (done) throw new Error("the connection was cut");
    const all = new Uint8Array(rest.length + value.length);
    all.set(rest);
    all.set(value, rest.length);
    rest = all;
    while (rest.length >= 5) {
      const size = new DataView(rest.buffer, rest.byteOffset).getUint32(1);
      if (size > maxMessage) throw new Refused("The agent sent a message of " + size + " bytes.");
      if (rest.length < 5 + size) break;
      const last = rest[0] & 2, message = JSON.parse(new TextDecoder().decode(rest.subarray(5, 5 + size)));
      rest = rest.slice(5 + size);
      if (!last) {
        await on(message);
        continue;
      }
      if (!message.error) return;
      if (message.error.code === "unavailable") throw new Error(message.error.message);
      throw new Refused(String(message.error.message || message.error.code).slice(0, 500));
    }
  }
};

// pid is that of the shell, which goes on without a connection. connected: its output arrives.
let pid = 0, over = true, connected = false, failures = 0;
let calls = new AbortController(); // ends the calls with input when the stream is cut
let unsure = false; // one of them has failed
const maxFailures = 6; // one after another: half a minute

// finish ends the attempts. A shell that is kept can be connected to again.
const finish = (text, kept) => {
  over = true;
  connected = false;
  if (!kept) {
    pid = queued = 0;
    queue = []; // another shell must not get it
  }
  say(text);
  again.textContent = pid ? "Connect again" : "New shell";
  again.hidden = false;
};

const heard = async ({event}) => {
  if (event?.start) {
    pid = event.start.pid;
    failures = 0;
    connected = true;
    calls = new AbortController();
    say(unsure ? "Connected. Some input may not have arrived." : "Connected.");
    unsure = false;
    resize(); // the window may have changed meanwhile
    flush();
  } else if (event?.data?.pty) {
    // The agent waits with more until this is drawn.
    await new Promise((drawn) => { terminal.write(bytesOf(event.data.pty), drawn); });
  } else if (event?.end) {
    const {exitCode = 0, exited, error} = event.end;
    finish("The shell has ended" + (exited ? " with exit code " + Number(exitCode) : error ? ": " + String(error).slice(0, 200) : "") + ".");
  }
};

const run = async () => {
  over = false;
  failures = 0;
  again.hidden = true;
  say("Connecting.");
  if (!pid) terminal.reset();
  terminal.focus();
  const start = () => ({
    process: {cmd: "/bin/sh", args: ["-c", "command -v bash >/dev/null && exec bash -il; exec sh -i"], envs: {TERM: "xterm-256color"}},
    pty: {size: {cols: terminal.cols, rows: terminal.rows}},
  });
  while (!over) {
    try {
      if (pid) await stream("Connect", {process: {pid}}, heard);
      else await stream("Start", start(), heard);
      if (!over) finish("The connection to the shell has ended.");
    } catch (e) {
      if (over) return;
      connected = false;
      calls.abort();
      if (e instanceof Refused) {
        finish(e.message);
        return;
      }
      if (++failures > maxFailures) {
        finish(pid ? "The connection was lost. The shell goes on as long as the sandbox." :
          e instanceof TypeError ? "The sandbox cannot be reached, or its pool has no agent." : "The sandbox cannot be reached: " + e.message, true);
        return;
      }
      say((pid ? "The connection was lost, and the shell goes on. Connecting again, attempt " : "The sandbox cannot be reached. Trying again, attempt ") +
        failures + " of " + maxFailures + ".");
      await sleep(Math.min(250 * 2 ** failures, 8000));
    }
  }
};

// Input is sent in its order, one call after the other. Without a connection it waits for the next one.
const maxQueued = 1 << 20;
let queue = [], queued = 0, sending = false;

const flush = async () => {
  if (sending) return;
  sending = true;
  while (queue.length > 0 && connected) {
    const all = new Uint8Array(queued);
    let at = 0;
    for (const part of queue) {
      all.set(part, at);
      at += part.length;
    }
    queue = [];
    queued = 0;
    try {
      for (let i = 0; i < all.length; i += 32 << 10) {
        await unary("SendInput", {process: {pid}, input: {pty: textOf(all.subarray(i, i + (32 << 10)))}}, {signal: calls.signal});
      }
    } catch (e) {
      if (connected) say("Some input may not have arrived: " + e.message);
      else unsure = pid !== 0;
    }
  }
  sending = false;
};

const type = (bytes) => {
  if (over) return;
  if (queued + bytes.length > maxQueued) {
    say("This is too much input at once: " + bytes.length + " bytes were not sent.");
    return;
  }
  queue.push(bytes);
  queued += bytes.length;
  flush();
};
terminal.onData((text) => type(new TextEncoder().encode(text)));
terminal.onBinary((text) => type(Uint8Array.from(text, (c) => c.charCodeAt(0))));

const resize = () => {
  if (!connected) return;
  unary("Update", {process: {pid}, pty: {size: {cols: terminal.cols, rows: terminal.rows}}}, {signal: calls.signal})
    .catch(() => { if (connected) say("The size of the terminal could not be set."); });
};
let resizing = 0;
terminal.onResize(() => {
  clearTimeout(resizing);
  resizing = setTimeout(resize, 100);
});
new ResizeObserver(() => fit.fit()).observe(place);

again.addEventListener("click", run);
// A shell that no page shows would keep the sandbox in use.
addEventListener("pagehide", () => {
  if (pid) unary("SendSignal", {process: {pid}, signal: "SIGNAL_SIGKILL"}, {keepalive: true}).catch(() => {});
});
addEventListener("pageshow", (e) => { if (e.persisted) location.reload(); });
run();
