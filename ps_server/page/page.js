// The page: asks for the view once a second and draws it. Nothing that a peer sent is ever markup: texts are set as
// textContent, and all else is numbers.

const PHASES = ["data", "forward", "backward", "push", "pull", "wait"];
const KEPT = 900; // samples
const EVENTS_KEPT = 200;
const OLD_CHECKPOINT = 900; // seconds
const SHOWN = 12; // workers that are shown one by one; of more, the slowest and the fastest
const [SLOWEST, FASTEST] = [8, 2];
const RELAYS = 8; // that have a row each
const FIGURE_WIDTH = 160; // pixels, at least
const LINES = ["#3b82d4", "#d9822b", "#2c9a6b", "#b455c9", "#c94a4a", "#7a8a2b", "#3aa7b8", "#8b6f5a"];

const $ = (id) => document.getElementById(id);
const seen = { process: 0, last_event: 0, next_sample: 0 };
let times = [];
let series = new Map(); // by job, name and rank: { job, name, rank, values }
let events = new Map(); // by first number
let finished = new Map(); // the jobs that have ended, by run: as the view has them, with their curves
let wanted = wantedByAddress(); // the job that somebody has asked for; null: nobody has
let shown = null; // the job that is shown
let all = false; // all workers are shown, however many
const charts = new Map(); // by title
const logs = new Set(); // the titles of charts for which somebody has asked for a logarithmic scale

// -- elements ---------------------------------------------------------------------------------------------------------

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.map(String));
  return made;
}

function holding(tag, attributes, children) {
  const made = element(tag, attributes);
  made.append(...children);
  return made;
}

function drawn(tag, attributes = {}, text = null) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== null) made.textContent = text;
  return made;
}

// A table: heads are [text, class]; rows are lists of cells, each a text, a node, or [text, class].
function fill(table, heads, rows) {
  const cell = (tag, content) => {
    const [value, kind] = Array.isArray(content) ? content : [content, ""];
    const made = element(tag, kind ? { class: kind } : {});
    made.append(value instanceof Node ? value : String(value));
    return made;
  };
  const head = holding("thead", {}, [holding("tr", {}, heads.map((each) => cell("th", each)))]);
  const body = rows.map((row) => holding("tr", {}, row.map((each) => cell("td", each))));
  table.replaceChildren(head, holding("tbody", {}, body));
}

// `#job=NAME` in the page's address is the job to show.
function wantedByAddress() {
  try {
    return decodeURIComponent(location.hash.match(/^#job=(.+)$/)?.[1] ?? "") || null;
  } catch {
    return null; // it is no text
  }
}

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
const rate = (value) => (value === null || value === undefined ? "–" : value >= 100 ? value.toFixed(0) : value.toFixed(1));

function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) [count, unit] = [count / 1000, unit + 1];
  return `${count.toFixed(unit && count < 100 ? 1 : 0)}\u00a0${units[unit]}`; // it stays on one line
}

function span(seconds) {
  if (seconds < 1) return `${(1000 * seconds).toFixed(seconds < 0.01 ? 2 : 0)} ms`;
  if (seconds < 120) return `${seconds.toFixed(0)} s`;
  return seconds < 7200 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function number(value) {
  if (typeof value === "string") return value; // NaN and infinities come as words
  return Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(2) : String(+value.toPrecision(4));
}

// -- what came --------------------------------------------------------------------------------------------------------

function take(view) {
  if (view.process !== seen.process) {
    [times, series, events, finished] = [[], new Map(), new Map(), new Map()];
    Object.assign(seen, { process: view.process, last_event: 0, next_sample: 0 });
  }
  for (const event of view.events) {
    events.set(event.first_number, event);
    seen.last_event = Math.max(seen.last_event, event.number);
  }
  events = new Map([...events.values()].sort((a, b) => a.number - b.number).slice(-EVENTS_KEPT).map((e) => [e.first_number, e]));
  takeSamples(view.history);
  // Curves of a job that has ended come once.
  finished = new Map((view.finished_jobs ?? []).map((job) => [job.run, { ...job, history: job.history ?? finished.get(job.run)?.history ?? null }]));
}

function takeSamples(history) {
  if (history === null || history.times.length === 0) return;
  if (history.first_sample !== seen.next_sample) [times, series] = [[], new Map()]; // some are forgotten
  const before = times.length;
  times.push(...history.times);
  for (const each of history.series) {
    const key = `${each.job} ${each.name} ${each.rank}`;
    if (!series.has(key)) series.set(key, { ...each, values: Array(before).fill(null) });
    const kept = series.get(key);
    kept.values.push(...each.values);
  }
  seen.next_sample = history.first_sample + history.times.length;
  const surplus = Math.max(0, times.length - KEPT);
  times.splice(0, surplus);
  for (const [key, kept] of series) {
    while (kept.values.length < times.length + surplus) kept.values.push(null);
    kept.values.splice(0, surplus);
    if (kept.values.every((value) => value === null)) series.delete(key);
  }
}

// -- the head ---------------------------------------------------------------------------------------------------------

// The name of a job's mode.
const mode = (job) => job.mode || "unknown mode";

// What a worker's clock counts.
const counted = (job) => (mode(job).startsWith("local:") ? "rounds" : "steps");

function drawHead(job, view) {
  $("title").textContent = `${job.name} · ${mode(job)} · ${view.state}`;
  $("title").className = view.state === "training" ? "" : "bad";
  $("diagnosis").textContent = view.diagnosis;
  document.title = `${job.name}: ${view.state}`;
}

function drawFigures(job, view, status) {
  const clocks = job.workers.map((worker) => worker.clock);
  const low = Math.min(...clocks), high = Math.max(...clocks);
  const held = status.shards.flatMap((shard) => shard.jobs).filter((each) => each.job === job.name);
  const state = held.reduce((sum, each) => sum + each.optimizer_bytes, 0);
  const silent = status.shards.filter((shard) => !shard.reachable).length;
  const age = view.checkpoint_age_duration;
  const loader = job.loaders[0];
  const part = loader ? `${Math.floor((100 * loader.committed_count) / Math.max(1, loader.sample_count))} % of pass ${loader.pass_number}` : "–";
  const reported = job.workers.map((worker) => worker.figures).filter((each) => each && each.step_count > 0);
  const steps = sum(reported, "step_count"), moved = sum(reported, "sent_bytes") + sum(reported, "received_bytes");
  // Rows of tables are moved, too: nothing says what float32 would be.
  const fewer = held.some((each) => each.tables.length) || moved === 0 ? 0 : (2 * job.trained_bytes * steps) / moved;
  const less = fewer > 1.05 ? `, ${fewer.toFixed(1)} times fewer than float32 sync` : "";
  const totals = job.workers.map((worker) => worker.figures).filter((each) => each?.total_step_count);
  const left = view.left_duration ? `, ${span(view.left_duration)} left` : "";
  const done = totals.length ? [[`of ${Math.max(...totals.map((each) => each.total_step_count))} steps${left}`, `${Math.round(100 * view.done_fraction)} %`]] : [];
  const figures = [
    ...done,
    [`${counted(job)} made`, clocks.length === 0 ? "–" : low === high ? String(low) : `${low} – ${high}`],
    ["steps a second", rate(view.steps_per_second)],
    ...(view.age_duration === null || view.age_duration === undefined ? [] : [["running for", span(view.age_duration)]]),
    [job.group_size > 1 ? `groups of ${job.group_size} processes` : "workers", job.world_size ? `${clocks.length} of ${job.world_size}` : `${clocks.length}, elastic`],
    ["shards", `${status.shards.length - silent} of ${status.coordinator.shard_count}`, silent ? "bad" : ""],
    ["weights + state", `${bytes(job.parameter_bytes)} + ${bytes(state)}`],
    [`bytes a step${less}`, steps ? `${bytes(sum(reported, "sent_bytes") / steps)} + ${bytes(sum(reported, "received_bytes") / steps)}` : "–"],
    ...(loader ? [["leased data", part]] : []),
    ["last checkpoint", age === null ? "none" : `${span(age)} ago`, age !== null && age > OLD_CHECKPOINT ? "bad" : ""],
    ...readers(status, job.name),
  ];
  showFigures(figures);
}

// Who reads the job's weights. A reader asks all shards, and has an edition when it has the part of each.
function readers(status, name) {
  const feeds = status.shards.flatMap((shard) => shard.jobs.filter((held) => held.job === name && held.feed).map((held) => ({ ...held.feed, index: shard.index })));
  if (feeds.length === 0) return [];
  const most = (what) => Math.max(...feeds.map((feed) => feed[what]));
  const versions = feeds.map((feed) => feed.edition_version).filter((version) => version !== null);
  const ages = feeds.map((feed) => feed.age_duration).filter((age) => age !== null);
  const old = ages.length ? ` and ${span(Math.max(...ages))} old` : "";
  const edition = versions.length ? `, edition ${Math.min(...versions)} is ${plural(most("behind"), "update")} behind${old}` : "";
  const stopped = feeds.find((feed) => feed.trouble);
  const why = stopped ? `; shard ${stopped.index}: ${stopped.trouble}` : "";
  const sent = sum(feeds, "sent_bytes"), whole = sum(feeds, "element_bytes");
  const saved = whole > sent ? ` in place of ${bytes(whole)} in whole editions` : "";
  return [
    [`readers of the weights${edition}${why}`, String(most("reader_count")), stopped ? "bad" : ""],
    [`sent to readers${saved}; ${bytes(sum(feeds, "size_bytes"))} of editions in memory`, bytes(sent)],
  ];
}

function showFigures(figures) {
  // Rows of about as many figures each: none is alone in the last one.
  const room = Math.max(1, Math.floor(($("figures").clientWidth || 1000) / FIGURE_WIDTH));
  const columns = Math.ceil(figures.length / Math.ceil(figures.length / room));
  $("figures").style.setProperty("grid-template-columns", `repeat(${columns}, minmax(0, 1fr))`);
  $("figures").replaceChildren(
    ...figures.map(([name, value, kind]) => holding("div", {}, [element("b", kind ? { class: kind } : {}, value), element("span", {}, name)])),
  );
}

// -- which workers ----------------------------------------------------------------------------------------------------

// The workers that are shown, in their order, and how many are left out behind the first of them. Of many, those in
// trouble come first: silent ones, then those that are furthest behind; and the fastest last.
function shownWorkers(job, views) {
  const workers = [...job.workers];
  if (all || workers.length <= SHOWN) return { workers, between: 0 };
  const silent = (worker) => (views.get(worker.rank).activity.startsWith("silent") ? 0 : 1);
  const awaited = (worker) => views.get(worker.rank).awaited_fraction;
  workers.sort((a, b) => silent(a) - silent(b) || a.clock - b.clock || awaited(b) - awaited(a) || a.rank - b.rank);
  return { workers: [...workers.slice(0, SLOWEST), ...workers.slice(-FASTEST)], between: workers.length - SLOWEST - FASTEST };
}

function drawAll(job) {
  $("all").hidden = job.workers.length <= SHOWN;
  $("all").textContent = all ? "show those in trouble and the fastest" : `show all ${job.workers.length} workers`;
}

// What a worker of a job is called: a group of processes is one.
const called = (job, worker) => `${job.group_size > 1 ? "group" : "worker"} ${worker.rank}`;

// -- the race ---------------------------------------------------------------------------------------------------------

function drawRace(job, views) {
  const { workers, between } = shownWorkers(job, views);
  // The names have room beside the runners: a letter is about 6.5 wide.
  const letters = Math.max(...workers.map((worker) => called(job, worker).length));
  const lane = 24, left = Math.ceil(14 + 6.5 * letters), right = 20;
  const width = Math.max(320, Math.min(1060, $("race").clientWidth || 700));
  const clocks = job.workers.map((worker) => worker.clock);
  // With a quorum each worker counts its own steps, and no number of them bounds how far one may be ahead.
  const bound = job.consistency.quorum === undefined || job.consistency.quorum === null ? job.consistency.max_staleness : null;
  const low = Math.min(...clocks), wall = bound === null ? null : low + bound + 1;
  const high = Math.max(...clocks, wall ?? 0, low + 4);
  const x = (clock) => left + ((clock - low) / (high - low)) * (width - left - right);
  const y = (index) => 14 + (index + (between && index >= SLOWEST ? 1 : 0)) * lane;
  const height = y(workers.length) + 14;
  const svg = drawn("svg", { width, height, role: "img", "aria-label": `the workers' ${counted(job)}` });
  if (wall !== null) {
    svg.append(drawn("rect", { class: "band", x: x(low), y: 2, width: x(wall) - x(low), height: height - 22 }));
    svg.append(drawn("line", { class: "wall", x1: x(wall), x2: x(wall), y1: 2, y2: height - 20 }));
  }
  const places = new Map(workers.map((worker, index) => [worker.rank, { x: x(worker.clock), y: y(index) }]));
  if (between) svg.append(drawn("text", { class: "faint", x: left, y: y(SLOWEST) - lane + 4 }, `${between} more between`));
  workers.forEach((worker, index) => {
    svg.append(drawn("line", { class: "lane", x1: left, x2: width - right, y1: y(index), y2: y(index) }));
    svg.append(drawn("text", { x: 0, y: y(index) + 4 }, called(job, worker)));
  });
  workers.forEach((worker) => {
    const from = places.get(worker.rank), view = views.get(worker.rank);
    for (const rank of view.awaited_ranks) {
      const to = places.get(rank);
      if (to && to !== from) svg.append(...arrow(from, to));
    }
  });
  workers.forEach((worker) => {
    const { x: cx, y: cy } = places.get(worker.rank), view = views.get(worker.rank);
    const kind = view.activity.startsWith("silent") ? " silent" : view.activity.startsWith("waits") ? " waiting" : "";
    const runner = drawn("circle", { class: `runner${kind}`, cx, cy, r: 6 });
    runner.append(drawn("title", {}, `${called(job, worker)}: ${worker.clock} ${counted(job)}, ${view.activity}`));
    svg.append(runner);
  });
  svg.append(drawn("text", { class: "faint", x: left, y: height - 4 }, String(low)));
  svg.append(drawn("text", { class: "faint", x: width - right, y: height - 4, "text-anchor": "end" }, String(high)));
  $("race").replaceChildren(svg);
  const word = counted(job) === "rounds" ? "Rounds" : "Steps";
  $("race-note").textContent =
    wall === null
      ? `${word} made, slowest to fastest. In async no worker waits for another. Arrows: who waits for whom.`
      : `${word} made. The band is what ${mode(job)} allows: up to ${bound + 1} ahead of the slowest. Arrows: who waits for whom.`;
}

function arrow(from, to) {
  const length = Math.hypot(to.x - from.x, to.y - from.y) || 1;
  const [ux, uy] = [(to.x - from.x) / length, (to.y - from.y) / length];
  const end = { x: to.x - 8 * ux, y: to.y - 8 * uy };
  const points = [
    [end.x, end.y],
    [end.x - 7 * ux + 3.5 * uy, end.y - 7 * uy - 3.5 * ux],
    [end.x - 7 * ux - 3.5 * uy, end.y - 7 * uy + 3.5 * ux],
  ];
  return [
    drawn("line", { class: "waits", x1: from.x, y1: from.y, x2: end.x, y2: end.y }),
    drawn("polygon", { class: "head", points: points.map((point) => point.join(",")).join(" ") }),
  ];
}

// -- workers and shards -----------------------------------------------------------------------------------------------

function split(fractions) {
  const width = 150, height = 12; // of a drawing that is as wide as its column
  const svg = drawn("svg", { class: "split", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img" });
  let at = 0;
  fractions.forEach((fraction, index) => {
    const part = drawn("rect", { class: PHASES[index], x: at * width, y: 0, width: fraction * width, height });
    part.append(drawn("title", {}, `${PHASES[index]} ${(100 * fraction).toFixed(0)} %`));
    svg.append(part);
    at += fraction;
  });
  return svg;
}

function drawWorkers(job, views) {
  const values = [...new Set(job.workers.flatMap((worker) => worker.figures?.values.map((value) => value.name) ?? []))].sort();
  const heads = ["rank", "host", [counted(job), "number"], ["steps/s", "number"], "where a step's time goes", "now", ...values.map((name) => [name, "number"])];
  const { workers, between } = shownWorkers(job, views);
  const rows = workers.map((worker) => {
    const view = views.get(worker.rank);
    const logged = new Map(worker.figures?.values.map((value) => [value.name, value.last]) ?? []);
    return [
      worker.rank,
      worker.host || "–",
      [worker.clock, "number"],
      [rate(view.steps_per_second), "number"],
      view.phase_fractions.length ? split(view.phase_fractions) : ["not known", "faint"],
      [view.activity, view.activity.startsWith("silent") ? "bad" : ""],
      ...values.map((name) => [logged.has(name) ? number(logged.get(name)) : "–", "number"]),
    ];
  });
  if (between) rows.splice(SLOWEST, 0, ["", [`${between} more between`, "faint"], ...heads.slice(2).map(() => "")]);
  fill($("workers"), heads, rows);
}

function drawLegend() {
  $("phases").replaceChildren(
    ...PHASES.flatMap((phase) => {
      const key = drawn("svg", { width: 10, height: 10 });
      key.append(drawn("rect", { class: phase, width: 10, height: 10 }));
      return [key, phase];
    }),
  );
}

function drawShards(job, view) {
  const does = new Map(view.shards.map((shard) => [shard.index, shard]));
  const heads = ["shard", "address", "state", "memory", "weights + state", "tables", "staged", "versions", "in", "out", "applies/s", "one apply"].map((head, index) => (index > 2 ? [head, "number"] : head));
  const rows = view.status.shards.map((shard) => {
    const held = shard.jobs.find((each) => each.job === job.name);
    const { silent_duration: silent, ...work } = does.get(shard.index);
    const memory = shard.figures ? `${bytes(shard.figures.resident_bytes)} of ${bytes(shard.figures.memory_limit_bytes)}` : "–";
    const { min_version: low, max_version: high } = held?.versions ?? {};
    const state = silent > 0 ? [`does not answer for ${span(silent)}`, "bad"] : shard.reachable ? ["answers", "good"] : ["starts", "faint"];
    const cells = [
      memory,
      held ? `${bytes(held.parameter_bytes)} + ${bytes(held.optimizer_bytes)}` : "holds nothing",
      held?.tables.length ? bytes(sum(held.tables, "size_bytes")) : "–",
      held ? bytes(held.staged_bytes) : "–",
      held ? (low === high ? low : `${low}–${high}`) : "–",
      `${bytes(work.received_bytes_per_second)}/s`,
      `${bytes(work.sent_bytes_per_second)}/s`,
      rate(work.applies_per_second),
      work.apply_duration === null ? "–" : span(work.apply_duration),
    ];
    const name = shard.restart_count ? `${shard.index} (${plural(shard.restart_count, "restart")})` : shard.index;
    return [name, shard.address, state, ...cells.map((cell) => [cell, "number"])];
  });
  fill($("shards"), heads, rows);
}

const sum = (parts, name) => parts.reduce((total, part) => total + part[name], 0);

function drawTables(job, status) {
  const parts = status.shards.flatMap((shard) => shard.jobs.filter((held) => held.job === job.name).flatMap((held) => held.tables));
  const names = [...new Set(parts.map((part) => part.table))];
  const heads = ["table", "rows", "memory", "in files", "admitted", "expired", "evicted", "ids looked up", "found"].map((head, index) => (index ? [head, "number"] : head));
  const rows = names.map((name) => {
    const of = parts.filter((part) => part.table === name);
    const found = sum(of, "found_id_count"), asked = found + sum(of, "missing_id_count");
    const cells = [
      sum(of, "row_count"),
      bytes(sum(of, "size_bytes")),
      sum(of, "file_row_count"),
      ...["admitted", "expired", "evicted"].map((what) => sum(of, `${what}_row_count`)),
      asked,
      asked ? `${((100 * found) / asked).toFixed(1)} %` : "–",
    ];
    return [name, ...cells.map((cell) => [cell, "number"])];
  });
  $("rows").hidden = names.length === 0;
  fill($("tables"), heads, rows);
}

// What relays have said of themselves, each to all shards. Those with the most readers come first.
function drawRelays(job, status) {
  const held = status.shards.flatMap((shard) => shard.jobs).filter((each) => each.job === job.name && each.feed);
  const feeds = held.map((each) => each.feed), reported = new Map();
  for (const relay of feeds.flatMap((feed) => feed.relays)) {
    const before = reported.get(relay.name), newer = (relay.edition_version ?? -1) - (before?.edition_version ?? -1);
    if (!before || newer > 0 || (newer === 0 && relay.behind > before.behind)) reported.set(relay.name, relay);
  }
  const relays = [...reported.values()].sort((a, b) => b.reader_count - a.reader_count || (a.name < b.name ? -1 : 1));
  const shown = relays.slice(0, RELAYS);
  const heads = ["relay", ["readers", "number"], ["edition", "number"], ["updates behind", "number"]];
  const rows = shown.map((relay) => {
    const cells = [relay.reader_count, ...(relay.edition_version === null ? ["–", "–"] : [relay.edition_version, relay.behind])];
    return [relay.name, ...cells.map((cell) => [cell, "number"])];
  });
  // A shard counts all relays, and names those with the most readers. Shards may have heard of different ones.
  const more = Math.max(relays.length, ...feeds.map((feed) => feed.relay_count)) - shown.length;
  const readers = Math.max(sum(relays, "reader_count"), ...feeds.map((feed) => feed.relayed_reader_count)) - sum(shown, "reader_count");
  $("relays-part").hidden = relays.length === 0;
  const rest = more ? `and ${plural(more, "more relay")} with ${plural(readers, "reader")}. ` : "";
  $("relays-note").textContent = `${rest}This is what relays say of themselves. Readers of relays behind a relay count as its own.`;
  fill($("relays"), heads, rows);
}

// -- bars -------------------------------------------------------------------------------------------------------------

function bars(place, entries, nothing) {
  if (entries.length === 0) {
    place.replaceChildren(element("p", { class: "faint" }, nothing));
    return;
  }
  const most = Math.max(...entries.map(([, value]) => value)) || 1;
  const width = Math.max(240, Math.min(520, place.clientWidth || 320)), line = 20, left = 78, right = 70;
  const svg = drawn("svg", { width, height: entries.length * line, role: "img" });
  entries.forEach(([name, value, text], index) => {
    svg.append(drawn("text", { x: 0, y: index * line + 14 }, name));
    svg.append(drawn("rect", { class: "bar", x: left, y: index * line + 4, width: (value / most) * (width - left - right), height: 12 }));
    svg.append(drawn("text", { class: "faint", x: left + (value / most) * (width - left - right) + 6, y: index * line + 14 }, text));
  });
  place.replaceChildren(svg);
}

function drawStaleness(job, status) {
  const counts = new Map();
  for (const held of status.shards.flatMap((shard) => shard.jobs)) {
    if (held.job !== job.name || !held.figures) continue;
    for (const { max_clocks: most, gradient_count: count } of held.figures.staleness) {
      counts.set(most ?? Infinity, (counts.get(most ?? Infinity) ?? 0) + count);
    }
  }
  const ends = [...counts.keys()].sort((a, b) => a - b);
  const total = [...counts.values()].reduce((sum, count) => sum + count, 0);
  const name = (end, index) => {
    const begin = index ? ends[index - 1] + 1 : 0;
    return end === Infinity ? `${begin} or more` : begin === end ? String(end) : `${begin}–${end}`;
  };
  const last = ends.findLastIndex((end) => counts.get(end) > 0);
  const entries = ends.slice(0, last + 1).map((end, index) => [name(end, index), counts.get(end), `${((100 * counts.get(end)) / total).toFixed(1)} %`]);
  bars($("staleness"), entries, "No gradient was applied yet.");
}

function drawAwaited(view) {
  const entries = view.workers.filter((worker) => worker.awaited_fraction > 0).sort((a, b) => b.awaited_fraction - a.awaited_fraction).slice(0, 12);
  bars(
    $("awaited"),
    entries.map((worker) => [`worker ${worker.rank}`, worker.awaited_fraction, `${(100 * worker.awaited_fraction).toFixed(0)} %`]),
    "No worker was waited for.",
  );
}

// -- curves -----------------------------------------------------------------------------------------------------------

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// The curves of a job: of one that runs from its beginning on, of one that has ended to its end.
function curvesOf(job, view, now) {
  if (job.history !== undefined) return { times: job.history?.times ?? [], own: job.history?.series ?? [] };
  const own = [...series.values()].filter((each) => each.job === job.name);
  const age = view.age_duration;
  const began = age === null || age === undefined ? 0 : now - age;
  const first = times.findIndex((time) => time >= began);
  const from = first < 0 ? times.length : first;
  return { times: times.slice(from), own: own.map((each) => ({ ...each, values: each.values.slice(from) })) };
}

function drawCurves({ times, own }) {
  const wanted = new Map();
  const ofJob = (name) => own.find((each) => each.name === name && each.rank === null)?.values;
  const logged = own.filter((each) => each.name.startsWith("value.")).map((each) => each.name.slice("value.".length));
  logged.sort((a, b) => isLoss(b) - isLoss(a));
  for (const name of logged) {
    const spread = [["least of a worker", ofJob(`least.${name}`)], ["most of a worker", ofJob(`most.${name}`)]];
    const isSpread = spread.every(([, values]) => values);
    wanted.set(name, isSpread ? [[`${name}, mean`, ofJob(`value.${name}`)], ...spread] : [[name, ofJob(`value.${name}`)]]);
  }
  const byRank = own.filter((each) => each.name === "steps_per_second" && each.rank !== null).sort((a, b) => a.rank - b.rank);
  wanted.set("steps a second, by worker", byRank.slice(0, LINES.length).map((each) => [`worker ${each.rank}`, each.values]));
  const flows = [["to the shards", ofJob("received_bytes_per_second")], ["to the workers", ofJob("sent_bytes_per_second")]];
  wanted.set("bytes a second", flows.filter(([, values]) => values));
  for (const [title, chart] of charts) {
    if (!wanted.has(title) || chart.names !== wanted.get(title).map(([name]) => name).join("\n")) removeChart(title);
  }
  for (const [title, lines] of wanted) {
    if (lines.length === 0) continue;
    const data = [times, ...lines.map(([, values]) => values)];
    const isLog = logs.has(title) && spansMuch(data);
    if (charts.get(title)?.isLog !== isLog) removeChart(title);
    if (charts.has(title)) charts.get(title).plot.setData(data);
    else addChart(title, lines, data, isLog);
    charts.get(title).button.hidden = !spansMuch(data);
  }
}

const isLoss = (name) => /loss/.test(name);

// Whether a logarithmic scale shows more: all values are positive, and the largest is more than 100 times the smallest.
function spansMuch([, ...lines]) {
  let [least, most] = [Infinity, 0];
  for (const value of lines.flat()) {
    if (typeof value !== "number") continue;
    if (value <= 0) return false;
    [least, most] = [Math.min(least, value), Math.max(most, value)];
  }
  return most > 100 * least;
}

function removeChart(title) {
  charts.get(title)?.plot.destroy();
  charts.get(title)?.place.remove();
  charts.delete(title);
}

const bytesOf = (title) => title.startsWith("bytes a second"); // two lines, which often lie on each other: one is dashed

function addChart(title, lines, data, isLog) {
  const button = element("button", {}, isLog ? "linear scale" : "logarithmic scale");
  const place = holding("div", isLoss(title) ? { class: "row" } : {}, [element("h2", {}, title), button]);
  button.addEventListener("click", () => {
    if (!logs.delete(title)) logs.add(title);
    if (latest !== null) draw(latest);
  });
  if (isLoss(title)) $("curves").prepend(place);
  else $("curves").append(place);
  const isSpread = lines.length === 3 && lines[1][0] === "least of a worker";
  const dash = (index) => (bytesOf(title) && index ? [6, 5] : undefined);
  const line = (index) => (isSpread && index ? { stroke: `${LINES[0]}66`, width: 1 } : { stroke: LINES[index % LINES.length], width: 1.5 });
  const short = (plot, values) => values.map((value) => (value === null ? "" : bytesOf(title) ? bytes(value) : number(value)));
  const hours = (plot, moments) => moments.map((moment) => new Date(1000 * moment).toLocaleTimeString("en-GB"));
  const axis = { stroke: () => color("--faint"), grid: { stroke: () => color("--grid"), width: 1 }, ticks: { stroke: () => color("--grid"), width: 1 } };
  const options = {
    width: place.clientWidth || 320,
    height: 170,
    cursor: { y: false },
    legend: { show: lines.length > 1, live: false },
    axes: [{ ...axis, space: 80, values: hours }, { ...axis, size: 62, values: short }],
    series: [{}, ...lines.map(([name], index) => ({ label: name, ...line(index), dash: dash(index), points: { show: false } }))],
    bands: isSpread ? [{ series: [3, 2], fill: `${LINES[0]}22` }] : [],
    scales: { y: { distr: isLog ? 3 : 1 } },
  };
  charts.set(title, { plot: new uPlot(options, data, place), place, button, isLog, names: lines.map(([name]) => name).join("\n") });
}

function redraw() {
  for (const { plot, place } of charts.values()) {
    plot.setSize({ width: place.clientWidth || 320, height: 170 });
    plot.redraw();
  }
}

// -- what was and what happened ---------------------------------------------------------------------------------------

function drawProgress(job) {
  const parts = job.loaders.flatMap((loader) => [
    element("p", {}, `loader ${loader.loader}, pass ${loader.pass_number}: ${loader.committed_count} of ${loader.sample_count} samples, ${loader.leased_count} leased, ${loader.returned_count} came back`),
    element("progress", { max: Math.max(1, loader.sample_count), value: loader.committed_count }),
  ]);
  const last = job.last_checkpoint;
  parts.push(element("p", {}, last ? `Last checkpoint: ${last.name}, after ${last.clock} ${counted(job)}.` : "There is no checkpoint."));
  if (last?.missing_ranks.length) parts.push(element("p", { class: "bad" }, `It lacks the state of workers ${last.missing_ranks.join(", ")}.`));
  if (job.restore_count) parts.push(element("p", {}, `Rolled back ${plural(job.restore_count, "time")}: ${plural(job.redone_step_count, "step")} made again.`));
  if (job.lost_step_count) parts.push(element("p", {}, `${plural(job.lost_step_count, "step")} lost with shards.`));
  $("progress").replaceChildren(...parts);
}

function drawEvents(name) {
  const shown = [...events.values()].filter((event) => !event.job || event.job === name).reverse();
  const clock = (time) => new Date(time).toLocaleTimeString("en-GB");
  const bad = new Set(["lost", "rollback", "refused", "fenced"]);
  const row = (event) => [
    [clock(event.event_time), "faint"],
    [event.kind, bad.has(event.kind) || event.text.includes("does not answer") ? "bad" : ""],
    [event.count > 1 ? `${event.text} (${event.count} times)` : event.text, "words"],
  ];
  fill($("events"), ["when", "what", ""], shown.slice(0, 50).map(row));
}

// -- round and round --------------------------------------------------------------------------------------------------

// Returns the job that is shown: one that runs, or one that has ended.
function choose(jobs) {
  const known = [...jobs.map((job) => [job.name, job.name, job]), ...[...finished.values()].map((job) => [job.job, `${job.job}, ended`, job])];
  const names = known.map(([name]) => name);
  const running = jobs.map((job) => job.name);
  if (names.includes(wanted)) shown = wanted;
  else if (!running.includes(shown)) shown = running[0] ?? (names.includes(shown) ? shown : (names[0] ?? null));
  $("choice").hidden = names.length < 2;
  const options = [...$("jobs").options].map((option) => option.textContent);
  if (options.join("\n") !== known.map(([, text]) => text).join("\n")) $("jobs").replaceChildren(...known.map(([name, text]) => element("option", { value: name }, text)));
  $("jobs").value = shown ?? "";
  return known.find(([name]) => name === shown)?.[2];
}

const OF_RUNNING = ["race-part", "workers-part", "bars-part", "shards-part", "progress-part", "rows", "relays-part"];

function drawRunning(job, view) {
  const of = view.jobs.find((each) => each.job === job.name);
  const views = new Map(of.workers.map((worker) => [worker.rank, worker]));
  drawHead(job, of);
  drawFigures(job, of, view.status);
  drawAll(job);
  if (job.workers.length) drawRace(job, views);
  else $("race").replaceChildren();
  drawWorkers(job, views);
  drawShards(job, view);
  drawTables(job, view.status);
  drawRelays(job, view.status);
  drawStaleness(job, view.status);
  drawAwaited(of);
  drawProgress(job);
  drawCurves(curvesOf(job, of, Date.parse(view.view_time) / 1000));
}

function drawFinished(job, view) {
  const ago = span(Math.max(0, (Date.parse(view.view_time) - Date.parse(job.end_time)) / 1000));
  $("title").textContent = `${job.job} · ended`;
  $("title").className = "";
  $("diagnosis").textContent = `${job.text}, ${ago} ago`;
  document.title = `${job.job}: ended`;
  const { min_clock: low, max_clock: high, last_checkpoint: last } = job;
  showFigures([
    ["steps made", low === high ? String(low) : `${low} – ${high}`],
    ...job.values.map((value) => [`${value.name}, mean at the end`, number(value.mean)]),
    ["ran for", job.age_duration === null ? "–" : span(job.age_duration)],
    [last ? `steps (rounds in local:H) at the last checkpoint, ${last.name}` : "last checkpoint", last ? String(last.clock) : "none"],
  ]);
  drawCurves(curvesOf(job));
}

function draw(view) {
  const job = choose(view.status.jobs);
  const runs = job !== undefined && job.history === undefined;
  $("content").hidden = job === undefined;
  $("empty").hidden = job !== undefined;
  for (const part of OF_RUNNING) $(part).hidden = !runs;
  if (job === undefined) {
    const silent = view.shards.filter((shard) => shard.silent_duration > 0);
    $("title").textContent = `ps-torch · ${view.status.shards.length} of ${plural(view.status.coordinator.shard_count, "shard")}`;
    $("diagnosis").textContent = silent.map((shard) => `shard ${shard.index} does not answer for ${span(shard.silent_duration)}`).join("; ");
    document.title = "ps-torch";
  } else {
    if (runs) drawRunning(job, view);
    else drawFinished(job, view);
    drawEvents(runs ? job.name : job.job);
  }
  $("footer").textContent = `coordinator ${view.status.coordinator.address}, pid ${view.status.coordinator.pid} · as of ${new Date(view.view_time).toLocaleTimeString("en-GB")}`;
}

let latest = null;

async function look() {
  try {
    const answer = await fetch(`/api/view?${new URLSearchParams(seen)}`, { signal: AbortSignal.timeout(10000) });
    if (!answer.ok) throw new Error(await answer.text());
    latest = await answer.json();
    take(latest);
    $("trouble").hidden = true;
    draw(latest);
    document.body.dataset.looks = String(Number(document.body.dataset.looks ?? 0) + 1);
  } catch (error) {
    $("trouble").textContent = `The coordinator does not answer (${error.message.trim()}). Below is what it said last.`;
    $("trouble").hidden = false;
  }
  setTimeout(look, 1000);
}

$("jobs").addEventListener("change", (event) => {
  wanted = event.target.value;
  history.replaceState(null, "", `#job=${encodeURIComponent(wanted)}`); // an address that holds
  for (const title of [...charts.keys()]) removeChart(title);
  if (latest !== null) draw(latest);
});
$("all").addEventListener("click", () => {
  all = !all;
  if (latest !== null) draw(latest);
});
new ResizeObserver(redraw).observe($("curves"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
drawLegend();
look();
