// The script of Berth's console. Pages work without it: it only shows changes as they happen. It fetches the page again
// when something happens, and swaps the elements with data-live, which have an id.
(() => {
  "use strict";

  const shortest = 500; // ms between two fetches
  const slow = 10_000; // ms until a page is fetched again although nothing was heard
  const body = document.body;

  for (const button of document.querySelectorAll("button[data-copy]")) {
    if (!navigator.clipboard) continue;
    button.hidden = false;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }

  if (!body.dataset.events) return;
  const status = document.getElementById("live");
  let source = null, timer = 0, last = 0, running = false, again = false;

  const say = (text) => { if (status && status.textContent !== text) status.textContent = text; };

  // busy reports whether a person types or selects in an element.
  const busy = (element) => {
    const focus = document.activeElement, selection = document.getSelection();
    return element.contains(focus) && focus.matches("input, textarea, select") ||
      selection && !selection.isCollapsed && selection.containsNode(element, true);
  };

  // mark describes the focused element in a way that finds it in the new content.
  const mark = (element) => {
    const focus = document.activeElement;
    if (!element.contains(focus) || focus === element) return null;
    if (focus.id) return "#" + CSS.escape(focus.id);
    const href = focus.getAttribute("href");
    if (href) return focus.localName + "[href=\"" + CSS.escape(href) + "\"]";
    const region = focus.closest("[id]");
    return region && region !== element ? "#" + CSS.escape(region.id) + " " + focus.localName : null;
  };

  const swap = (now, next) => {
    if (now.isEqualNode(next) || busy(now)) return;
    const open = [...now.querySelectorAll("details[open][id]")].map((d) => d.id);
    const shut = [...now.querySelectorAll("details[id]:not([open])")].map((d) => d.id);
    const focus = mark(now);
    const scrolled = [...now.querySelectorAll(".scroll")].map((s) => [s.scrollLeft, s.scrollTop]);
    const content = document.importNode(next, true);
    for (const d of content.querySelectorAll("details[id]")) {
      if (open.includes(d.id)) d.open = true;
      else if (shut.includes(d.id)) d.open = false;
    }
    now.replaceWith(content);
    content.querySelectorAll(".scroll").forEach((s, i) => { if (scrolled[i]) [s.scrollLeft, s.scrollTop] = scrolled[i]; });
    if (focus) content.querySelector(focus)?.focus({preventScroll: true});
  };

  const refresh = async () => {
    clearTimeout(timer);
    if (running) { again = true; return; }
    running = true;
    try {
      const answer = await fetch(location.href, {headers: {Accept: "text/html"}, cache: "no-store"});
      if (answer.status === 401) { location.reload(); return; }
      const next = new DOMParser().parseFromString(await answer.text(), "text/html");
      for (const now of document.querySelectorAll("[data-live][id]")) {
        const found = next.getElementById(now.id);
        if (found) swap(now, found);
      }
      if (answer.status >= 500) say("The API does not answer now. Trying again.");
      else if (answer.status >= 400 && !document.getElementById("failed")) location.reload();
      else if (answer.ok && document.getElementById("failed")) location.reload();
      else say(source ? "Live" : "");
    } catch {
      say("The console cannot be reached now. Trying again.");
    } finally {
      running = false;
      last = Date.now();
      plan(again ? shortest : slow);
      again = false;
    }
  };

  const plan = (wait) => {
    clearTimeout(timer);
    if (document.visibilityState === "visible") timer = setTimeout(refresh, wait);
  };

  const heard = () => {
    if (running) again = true;
    else plan(Math.max(0, last + shortest - Date.now()));
  };

  // A hidden page holds no stream: a browser has few connections to one host.
  const listen = () => {
    if (document.visibilityState !== "visible") {
      source?.close();
      source = null;
      clearTimeout(timer);
      return;
    }
    if (!source || source.readyState === EventSource.CLOSED) {
      source = new EventSource(body.dataset.events);
      for (const name of ["created", "ready", "released", "gap"]) source.addEventListener(name, heard);
      source.addEventListener("open", () => say("Live"));
      source.addEventListener("error", () => {
        if (source && source.readyState === EventSource.CLOSED) { source = null; say(""); }
      });
    }
  };

  document.addEventListener("visibilitychange", () => { listen(); if (document.visibilityState === "visible") heard(); });
  setInterval(listen, 30_000);
  last = Date.now();
  listen();
  plan(slow);
})();
