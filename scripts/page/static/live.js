// Asks the server for its newest picture, and for the rounds before those in it where they are others.

const PERIOD_MS = 2000; // Between two questions; an answer without news has no body.
const LIVE = "page up to date", LOST = "connection lost, trying again";

// Calls `show(picture, keys)` for each picture; `keys` are the top-level names that changed, null for all.
export function follow(show, status) {
  let etag = "", texts = null, older = { name: "", rounds: {}, recent: [] };

  async function look() {
    const answer = await fetched("picture.json", etag);
    if (answer.status === 304) return;
    const newest = await answer.json();
    if (newest.older !== older.name) older = await before(newest.older);
    etag = answer.headers.get("etag");
    performance.mark("update");
    const changed = news(newest);
    show(joined(newest, older), changed);
    performance.measure("update", "update");
  }

  // The names whose values differ from those before; older rounds are named by a hash of what they are.
  function news({ older: name, ...picture }) {
    const before = texts;
    texts = new Map(Object.entries(picture).map(([key, value]) => [key, JSON.stringify(value)]));
    texts.set("rounds", texts.get("rounds") + name).set("recent", texts.get("recent") + name);
    return before && [...new Set([...before.keys(), ...texts.keys()])].filter((key) => before.get(key) !== texts.get(key));
  }

  async function next() {
    try {
      await look();
      report(LIVE);
    } catch (error) {
      console.warn(`flockstep: ${error}`);
      report(LOST);
    }
    setTimeout(next, PERIOD_MS);
  }

  function report(text) {
    if (status.textContent === text) return;
    status.textContent = text;
    status.dataset.state = text === LIVE ? "live" : "lost";
  }

  next();
}

async function fetched(name, etag = "") {
  const answer = await fetch(name, etag ? { cache: "no-store", headers: { "if-none-match": etag } } : {});
  if (!answer.ok && answer.status !== 304) throw new Error(`${name}: ${answer.status} ${answer.statusText}`);
  return answer;
}

async function before(name) {
  if (!name) return { name, rounds: {}, recent: [] };
  const { rounds, peers, recent } = await (await fetched(name)).json();
  return { name, rounds, recent: named(recent, peers) };
}

// The rounds of both, each once: a proxy may show a picture that is older than the file that it names.
function joined({ rounds = {}, peers = [], recent = [], ...picture }, older) {
  const from = rounds.round?.[0] ?? Infinity, num = (older.rounds.round ?? []).filter((round) => round < from).length;
  const columns = Object.entries(rounds).map(([name, column]) => [name, [...(older.rounds[name] ?? []).slice(0, num), ...column]]);
  const before = older.recent.filter(({ round }) => round < from);
  return { ...picture, rounds: Object.fromEntries(columns), recent: [...named(recent, peers), ...before] };
}

// Rounds name peers by their places in a table beside them: by their ids from here on.
function named(recent, peers) {
  const ids = (places) => places.map((place) => peers[place]);
  return recent.map((row) => ({
    ...row, roster: ids(row.roster), cut: ids(row.cut), flagged: ids(row.flagged), voters: ids(row.voters),
    out: row.out.map(({ peer, reason }) => ({ peer: peers[peer], reason })),
  }));
}
