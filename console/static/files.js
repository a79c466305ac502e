// The files of a sandbox in Berth's console. The agent in the sandbox answers: the bytes pass the gateway and not the console.
(() => {
  "use strict";

  const place = document.getElementById("files");
  const status = document.getElementById("files-state");
  const form = document.getElementById("files-form");
  const input = document.getElementById("files-path");
  const rows = document.getElementById("files-rows");
  const {agent, token} = place.dataset;
  const maxRows = 1000;
  const maxDownload = 64 << 20;

  const say = (text) => { status.textContent = text; };
  // visible shows characters that a person cannot see, or that reorder others, as escape sequences.
  const visible = (text) => String(text).replace(/[\p{Cc}\p{Cf}\u2028\u2029]/gu, (c) => "\\u{" + c.codePointAt(0).toString(16) + "}");

  const call = (path, options) => fetch(agent + path, {
    cache: "no-store", credentials: "omit", referrerPolicy: "no-referrer", ...options,
    headers: {...token && {"X-Access-Token": token}, ...options.headers},
  });

  const check = async (answer) => {
    if (answer.ok) return answer;
    let message = "The sandbox answered " + answer.status + ".";
    try { message = String((await answer.json()).message || message); } catch { /* it is no JSON */ }
    throw new Error(message.slice(0, 500));
  };

  const inWords = (e) => e instanceof TypeError ? "The sandbox cannot be reached, or its pool has no agent." : visible(e.message);

  const size = (bytes) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let n = Number(bytes) || 0, unit = 0;
    for (; n >= 1024 && unit < units.length - 1; unit++) n /= 1024;
    return (unit ? n.toFixed(1) : n) + " " + units[unit];
  };

  const cell = (content) => {
    const made = document.createElement("td");
    made.append(content);
    return made;
  };

  const button = (text, label, act) => {
    const made = document.createElement("button");
    made.type = "button";
    made.className = "plain";
    made.textContent = text;
    made.setAttribute("aria-label", label);
    made.addEventListener("click", act);
    return made;
  };

  const download = async (entry) => {
    if (Number(entry.size) > maxDownload) {
      say(visible(entry.name) + " has " + size(entry.size) + ". Take files above " + size(maxDownload) + " with berth cp.");
      return;
    }
    say("Downloading " + visible(entry.name) + ".");
    try {
      const answer = await check(await call("/files?path=" + encodeURIComponent(entry.path), {method: "GET"}));
      const parts = [], reader = answer.body.getReader();
      for (let total = 0; ;) {
        const {done, value} = await reader.read();
        if (done) break;
        if ((total += value.length) > maxDownload) {
          reader.cancel();
          throw new Error("The file is larger than " + size(maxDownload) + ". Take it with berth cp.");
        }
        parts.push(value);
      }
      const link = document.createElement("a");
      // Of no type that a browser would show: a file of a sandbox must not run as a page of the console.
      link.href = URL.createObjectURL(new Blob(parts, {type: "application/octet-stream"}));
      link.download = entry.name;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
      say("Downloaded " + visible(entry.name) + ".");
    } catch (e) {
      say(inWords(e));
    }
  };

  const row = (entry) => {
    const made = document.createElement("tr");
    const name = document.createElement("th");
    name.scope = "row";
    const directory = entry.type === "FILE_TYPE_DIRECTORY";
    const shown = visible(entry.name);
    if (directory) {
      name.append(button(shown + "/", "Open " + shown, () => open(entry.path)));
    } else {
      const text = document.createElement("bdi");
      text.textContent = shown;
      name.append(text);
    }
    if (entry.symlinkTarget) name.append(" → " + visible(entry.symlinkTarget));
    const time = entry.modifiedTime ? entry.modifiedTime.replace("T", " ").slice(0, 19) : "";
    made.append(name, cell(directory ? "" : size(entry.size)), cell(visible(entry.permissions || "")),
      cell(visible((entry.owner || "") + ":" + (entry.group || ""))), cell(time),
      cell(entry.type === "FILE_TYPE_FILE" ? button("Download", "Download " + shown, () => download(entry)) : ""));
    return made;
  };

  let asked = 0;

  const open = async (path, travel) => {
    const turn = ++asked;
    say("Reading " + visible(path) + ".");
    try {
      const answer = await check(await call("/filesystem.Filesystem/ListDir", {
        method: "POST", body: JSON.stringify({path, depth: 1}), headers: {"Content-Type": "application/json", "Connect-Protocol-Version": "1"},
      }));
      const {entries = []} = await answer.json();
      if (turn !== asked) return;
      const first = (e) => e.type === "FILE_TYPE_DIRECTORY" ? 0 : 1;
      entries.sort((a, b) => first(a) - first(b) || (a.name < b.name ? -1 : 1));
      rows.replaceChildren(...entries.slice(0, maxRows).map(row));
      input.value = path;
      if (!travel) history.pushState({path}, "", "?path=" + encodeURIComponent(path));
      const left = entries.length - maxRows;
      say(entries.length === 0 ? "The directory is empty." : entries.length + " entries" + (left > 0 ? ", of which the first " + maxRows + " are shown." : "."));
    } catch (e) {
      if (turn === asked) say(inWords(e));
    }
  };

  const parent = (path) => path.replace(/\/+$/, "").replace(/[^/]*$/, "").replace(/(.)\/+$/, "$1") || "/";

  form.addEventListener("submit", (e) => {
    e.preventDefault();
    open(input.value || "/");
  });
  document.getElementById("files-up").addEventListener("click", () => open(parent(input.value)));
  addEventListener("popstate", (e) => open(e.state?.path || place.dataset.path || "/", true));
  history.replaceState({path: input.value}, "");
  open(input.value || "/", true);
})();
