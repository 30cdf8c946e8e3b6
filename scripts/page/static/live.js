// Keeps a copy of the server's picture: fetches the whole once, then applies what changed, as server-sent events.

import { apply } from "./patch.js";

const RETRY_MS = 3000; // After a failure; a server that restarts is back by then.
const REFUSED_MS = 30000; // After a stream was refused, as by a server with too many viewers.
const STATES = { live: "page up to date", lost: "connection lost, trying again", old: "too many viewers: renewed every 30 s" };

// Calls `show(picture, keys)` for each picture; `keys` are the top-level names that changed, null for all.
export function follow(show, status) {
  let picture = null, source = null, timer = null;

  async function start() {
    stop();
    try {
      const answer = await fetch("picture.json", { cache: "no-cache" });
      if (!answer.ok) throw new Error(answer.statusText);
      const whole = await answer.json();
      picture = whole.picture;
      show(picture, null);
      listen(whole.mark);
    } catch (error) {
      console.warn(`flockstep: ${error}`);
      again(RETRY_MS, STATES.lost);
    }
  }

  function listen(mark) {
    source = new EventSource(`events?after=${encodeURIComponent(mark)}`);
    source.onopen = () => report(STATES.live);
    source.onerror = () => {
      // The browser connects again by itself, and names the last event it has; a refusal is final to it.
      if (source.readyState === EventSource.CLOSED) again(REFUSED_MS, STATES.old);
      else report(STATES.lost);
    };
    source.onmessage = (event) => change(JSON.parse(event.data));
    source.addEventListener("anew", start);
  }

  function change(operations) {
    performance.mark("update");
    try {
      apply(picture, operations);
    } catch (error) {
      console.warn(`flockstep: ${error}`);
      start();
      return;
    }
    show(picture, [...new Set(operations.map(([, path]) => path[0] ?? ""))]);
    performance.measure("update", "update");
  }

  function again(delay, text) {
    stop();
    report(text);
    timer = setTimeout(start, delay);
  }

  function stop() {
    clearTimeout(timer);
    source?.close();
    source = null;
  }

  function report(text) {
    if (status.textContent === text) return;
    status.textContent = text;
    status.dataset.state = text === STATES.live ? "live" : "lost";
  }

  start();
}
