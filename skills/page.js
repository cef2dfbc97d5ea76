// Everything out of the data becomes a text node or an attribute that cannot act: no markup is
// ever parsed from it.
const DATA = JSON.parse(document.getElementById("data").textContent);
const BATCH = 50;
const UNSEEN = /(\u27e8U\+[0-9A-F]{4,6}\u27e9)/;
const SIGNS = { active: "\u2713", candidate: "\u25cb", quarantined: "!", retired: "\u2717" };
const MINUS = "\u2212";
const byId = (id) => document.getElementById(id);

// -- elements --------------------------------------------------------------------------------

function nodes(text) {
  // The pieces of a text; codes of unseen characters are marked.
  return String(text).split(UNSEEN).filter(Boolean).map((piece) => {
    if (!UNSEEN.test(piece)) return document.createTextNode(piece);
    const code = document.createElement("span");
    code.className = "unseen";
    code.textContent = piece;
    return code;
  });
}

function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === "") continue;
    if (child instanceof Node) made.append(child);
    else made.append(...nodes(child));
  }
  return made;
}

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const text = (value, tag = "div") => el(tag, { class: "text", dir: "auto" }, value);
const hidden = (words) => el("span", { class: "hidden" }, words);
const brief = (words) => words.replace(/\b[0-9a-f]{64}\b/g, (hash) => hash.slice(0, 12));
const signed = (x) => (x < 0 ? MINUS : "+") + Math.abs(x).toFixed(2);
const share = (part, all) => (all ? `${Math.round((100 * part) / all)}\u00a0%` : "");
const count = (n, one, many) => `${n.toLocaleString("en")} ${n === 1 ? one : many || one + "s"}`;
const minute = (at) => at.slice(0, 16).replace("T", " ");

// -- one skill -------------------------------------------------------------------------------

function pill(status, pinned) {
  const known = SIGNS[status] ? status : "retired";
  const sign = el("span", { "aria-hidden": "true" }, SIGNS[known]);
  return el("span", { class: `status ${known}` }, sign, " " + status, pinned ? ", pinned" : "");
}

function bar(value) {
  return svg("svg", { class: "bar", viewBox: "0 0 100 8", preserveAspectRatio: "none",
    "aria-hidden": "true" },
    svg("rect", { class: "rail", width: 100, height: 8 }),
    svg("rect", { class: "fill", width: Math.max(1, 100 * value), height: 8 }));
}

function whisker(value, low, high) {
  // From -1 to 1; the tall line in the middle is no gain.
  const x = (v) => `${50 + 50 * Math.max(-1, Math.min(1, v))}%`;
  const line = (a, b, y, z, kind) => svg("line", { x1: x(a), x2: x(b), y1: y, y2: z, class: kind });
  const marks = [line(-1, 1, 6, 6, "rail"), line(0, 0, 0, 12, "zero")];
  if (low !== null && high !== null) {
    const ends = [[low, high, 6, 6], [low, low, 3, 9], [high, high, 3, 9]];
    marks.push(...ends.map((points) => line(...points, "span")));
  }
  marks.push(svg("circle", { cx: x(value), cy: 6, r: 3.5, class: "dot" }));
  return svg("svg", { class: "whisker", height: 12, "aria-hidden": "true" }, ...marks);
}

function utility(credit) {
  if (!credit.measured) {
    const start = el("small", {}, `starts at ${credit.utility.toFixed(2)}`);
    return el("span", { class: "cell none" }, hidden("utility "), "not measured", start);
  }
  const number = el("b", {}, credit.utility.toFixed(2));
  return el("span", { class: "cell" }, hidden("utility "), number, bar(credit.utility));
}

function gain(credit) {
  if (credit.gain === null) {
    return el("span", { class: "cell none" }, hidden("gain "), "not measured");
  }
  const { gain_low: low, gain_high: high } = credit;
  const known = low !== null && high !== null;
  const range = known ? `${signed(low)} to ${signed(high)}` : "no interval";
  return el("span", { class: "cell" }, hidden("gain "), el("b", {}, signed(credit.gain)),
    el("small", {}, range), whisker(credit.gain, low, high));
}

function uses(credit) {
  const wins = `${count(credit.num_success, "win")}, ${share(credit.num_success, credit.num_used)}`;
  return el("span", { class: "cell uses" }, hidden("uses "),
    el("b", {}, credit.num_used.toLocaleString("en")), credit.measured ? el("small", {}, wins) : null);
}

function row(skill) {
  const about = `${skill.id} \u00b7 ${skill.category} \u00b7 ${skill.kind}`;
  const name = el("span", { class: "name" }, el("span", { class: "title", dir: "auto" }, skill.title),
    el("small", {}, about));
  const summary = el("summary", {}, name, pill(skill.status, skill.pinned), utility(skill.credit),
    gain(skill.credit), uses(skill.credit));
  const details = el("details", {}, summary);
  details.addEventListener("toggle", () => {
    if (details.open && details.childElementCount === 1) details.append(full(skill));
  });
  return el("li", {}, details);
}

function full(skill) {
  const words = [["Principle", skill.principle, "div"], ["When to apply", skill.when, "div"],
    ["Body", skill.body, "pre"], ["Avoid", skill.avoid, "div"], ["Other fields", skill.extra, "pre"]];
  const parts = words.filter(([, says]) => says)
    .flatMap(([title, says, tag]) => [el("h3", {}, title), text(says, tag)]);
  return el("div", { class: "full" }, reasons(skill), el("div", { class: "words" }, parts),
    el("div", { class: "side" }, facts(skill), evidence(skill)), log(skill));
}

function reasons(skill) {
  if (!skill.safety.reasons.length) return null;
  const title = skill.status === "quarantined" ? "Why it is in quarantine" : "What checks found";
  return el("div", { class: "reasons" }, el("h3", {}, title),
    el("ul", {}, skill.safety.reasons.map((reason) => el("li", { dir: "auto" }, reason))));
}

function facts(skill) {
  const { credit, safety, lineage } = skill;
  const rate = (part, all) => `${part} of ${all} succeeded, ${share(part, all)}`;
  const pairs = [
    ["With it", credit.measured ? rate(credit.num_success, credit.num_used) : "not measured"],
    ["Without it", credit.num_without ? rate(credit.num_success_without, credit.num_without)
      : "not measured"],
    ["Tokens saved", credit.tokens_saved ? `${credit.tokens_saved.toFixed(0)} per use` : ""],
    ["Votes", String(credit.votes)],
    ["Risk", `${safety.risk} of 5, ancestors ${safety.lineage_risk}; `
      + count(safety.num_harm, "harm event")],
    ["Level", skill.level],
    ["Only for", skill.scope.join(", ")],
    ["Author", lineage.author],
    ["Origin", lineage.op.toLowerCase()],
    ["Run", lineage.run],
    ["Prompt", lineage.prompt_version],
    ["Step", steps(lineage)],
    ["Parents", lineage.parents.length ? parents(lineage.parents) : ""],
    ["In the bank", skill.since && `since ${minute(skill.since)}`],
    ["Text", skill.text.slice(0, 12)],
  ];
  return el("dl", { class: "facts" }, pairs.filter(([, value]) => value).flatMap(
    ([name, value]) => [el("dt", {}, name), el("dd", { dir: "auto" }, value)]));
}

function steps({ created_step: created, updated_step: updated }) {
  if (created === null) return "";
  return updated === null ? `made at ${created}` : `made at ${created}, changed at ${updated}`;
}

function parents(names) {
  const links = names.map((name) => {
    const skill = DATA.skills.find((one) => one.text === name || one.id === name);
    const short = /^[0-9a-f]{64}$/.test(name) ? `text ${name.slice(0, 12)}` : name;
    return el("li", {}, skill ? link(skill.id, skill.title) : short);
  });
  return el("ul", { class: "plain" }, links);
}

function link(id, words) {
  return el("a", { href: "#" + new URLSearchParams({ skill: id }), dir: "auto" }, words);
}

function evidence(skill) {
  if (!skill.num_evidence) return el("p", { class: "none" }, "No evidence is recorded.");
  const entries = skill.evidence.map(([name, outcome, step]) => el("li", { dir: "auto" },
    el("span", { class: outcome === "success" ? "yes" : "no" },
      outcome === "success" ? "\u2713 success" : "\u2717 failure"),
    ` ${name}`, step === null ? "" : `, step ${step}`));
  const more = skill.num_evidence - skill.evidence.length;
  return [el("h3", {}, count(skill.num_evidence, "trajectory", "trajectories")),
    el("ul", { class: "plain" }, entries, more > 0 ? el("li", {}, `and ${more} more`) : null)];
}

function log(skill) {
  const first = skill.history.length ? skill.history[0][0] : Infinity;
  const events = [...skill.history, ...DATA.rollbacks.filter(([seq]) => seq > first)]
    .sort((a, b) => a[0] - b[0]);
  const body = events.map(([, at, op, actor, reason]) => el("tr", {}, el("td", {}, minute(at)),
    el("td", {}, op), el("td", { dir: "auto" }, actor), el("td", { dir: "auto" }, reason)));
  const heads = ["When", "What", "By", "Why"].map((name) => el("th", { scope: "col" }, name));
  const table = el("table", {}, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, body));
  const earlier = skill.num_earlier ? `, ${skill.num_earlier} earlier lines left out` : "";
  return el("div", { class: "log" }, el("h3", {}, `History${earlier}`),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "History" }, table));
}

// -- the list --------------------------------------------------------------------------------

const plain = (value) => value.normalize("NFKC").toLowerCase();
const IDS = new Set(DATA.skills.map((skill) => skill.id));
const isHere = (id) => IDS.has(id);
const HAY = DATA.skills.map((s) => plain([s.title, s.principle, s.when, s.category, s.id].join("\n")));
// The places of all skills in each order, sorted when an order is first asked for.
const ORDERS = {};
const value = (i) => (DATA.skills[i].credit.measured ? DATA.skills[i].credit.utility : -1);
const SORTS = {
  utility: ["Utility, best first", (a, b) => value(b) - value(a) || a - b],
  newest: ["Age, newest first", (a, b) => b - a],
  oldest: ["Age, oldest first", (a, b) => a - b],
  uses: ["Uses, most first", (a, b) =>
    DATA.skills[b].credit.num_used - DATA.skills[a].credit.num_used || a - b],
};
let found = [];
let drawn = 0;

function options(select, pairs) {
  select.replaceChildren(...pairs.map(([name, words]) => el("option", { value: name }, words)));
}

function tally(name) {
  const counts = new Map();
  for (const skill of DATA.skills) counts.set(skill[name], (counts.get(skill[name]) || 0) + 1);
  return counts;
}

function fillControls() {
  const statuses = tally("status"), categories = tally("category");
  options(byId("status"), [["", "all"], ...Object.keys(SIGNS).filter((s) => statuses.has(s))
    .map((s) => [s, `${s} (${statuses.get(s)})`])]);
  options(byId("category"), [["", "all"], ...[...categories.keys()].sort()
    .map((c) => [c, `${c} (${categories.get(c)})`])]);
  options(byId("sort"), Object.entries(SORTS).map(([name, [words]]) => [name, words]));
}

function search() {
  const words = plain(byId("q").value).split(/\s+/).filter(Boolean);
  const status = byId("status").value, category = byId("category").value;
  const sort = byId("sort").value;
  ORDERS[sort] ??= DATA.skills.map((_, i) => i).sort(SORTS[sort][1]);
  found = ORDERS[sort].filter((i) => {
    const skill = DATA.skills[i];
    return (!status || skill.status === status) && (!category || skill.category === category)
      && words.every((word) => HAY[i].includes(word));
  });
  byId("skills").replaceChildren();
  drawn = 0;
  draw(BATCH);
  const all = DATA.skills.length;
  byId("count").textContent = found.length === all ? count(all, "skill")
    : found.length ? `${found.length.toLocaleString("en")} of ${count(all, "skill")}`
      : "No skill has all of these words; try fewer, or another filter.";
  byId("columns").hidden = !found.length;
}

function draw(upTo) {
  const list = byId("skills");
  for (; drawn < Math.min(upTo, found.length); drawn += 1) {
    list.append(row(DATA.skills[found[drawn]]));
  }
  const left = found.length - drawn;
  byId("more").hidden = left === 0;
  byId("more").textContent = `Show ${Math.min(BATCH, left)} more of ${left.toLocaleString("en")}`;
}

const KEPT = { q: "", status: "", category: "", sort: "utility" };
function remember() {
  const set = Object.keys(KEPT).filter((name) => byId(name).value !== KEPT[name]);
  const words = new URLSearchParams(set.map((name) => [name, byId(name).value]));
  history.replaceState(null, "", set.length ? `#${words}` : location.pathname);
}

function recall() {
  // The address may carry a search, #q=heat&status=active, or one skill, #skill=gen_001.
  const words = new URLSearchParams(location.hash.slice(1));
  const skill = words.get("skill");
  if (location.hash && !location.hash.includes("=")) return;
  for (const [name, fallback] of Object.entries(KEPT)) {
    const field = byId(name);
    field.value = words.get(name) ?? fallback;
    if (field.value === "" && field !== byId("q")) field.value = fallback;
  }
  search();
  if (skill !== null) show(skill);
}

function show(id) {
  const place = found.findIndex((i) => DATA.skills[i].id === id);
  byId("count").textContent += place < 0 ? `; this version has no skill ${id}` : "";
  if (place < 0) return;
  draw(Math.max(drawn, place + 1));
  const details = byId("skills").children[place].firstElementChild;
  details.open = true;
  details.scrollIntoView({ block: "start" });
  details.firstElementChild.focus({ preventScroll: true });
}

// -- changes ---------------------------------------------------------------------------------

function label(change) {
  const ends = change.ends.map((id) => id.slice(0, 8)).join(" \u2192 ");
  if (!change.at) return `${ends}, the two that were asked for`;
  const lines = Object.entries(change.ops).map(([op, n]) => `${op.toLowerCase()} \u00d7${n}`).join(", ");
  return [`${minute(change.at)} by ${change.actor}`, lines, ends].filter(Boolean).join("; ");
}

function parted(old, now) {
  // Both texts, with the middle marked in which their words differ.
  const a = old.split(/(\s+)/), b = now.split(/(\s+)/);
  let head = 0, tail = 0;
  const least = Math.min(a.length, b.length);
  while (head < least && a[head] === b[head]) head += 1;
  while (tail < least - head && a[a.length - 1 - tail] === b[b.length - 1 - tail]) tail += 1;
  return [[a, "del"], [b, "ins"]].map(([words, tag]) => {
    const end = words.length - tail;
    const middle = words.slice(head, end).join("");
    return [words.slice(0, head).join(""), middle ? el(tag, {}, middle) : null,
      words.slice(end).join("")];
  });
}

function edit([id, title, status, fields]) {
  const parts = fields.map(([name, old, now]) => {
    const [before, after] = parted(brief(old), brief(now));
    const side = (words, content) => el("div", { class: "text", dir: "auto" }, hidden(words),
      content.some(Boolean) ? content : el("span", { class: "none" }, "nothing"));
    return el("div", { class: "field" }, el("h4", {}, name), side("before: ", before),
      side("after: ", after));
  });
  const heads = el("div", { class: "field heads", "aria-hidden": "true" },
    ["field", "before", "after"].map((name) => el("span", {}, name)));
  return el("li", {}, heading("~", "changed", id, title, status), heads, parts);
}

function heading(sign, words, id, title, status) {
  const name = isHere(id) ? link(id, title) : el("bdi", {}, title);
  return el("p", { class: `line ${words}` }, el("b", { "aria-hidden": "true" }, sign),
    el("span", {}, hidden(words + " "), name, " ", el("small", {}, `${id}, ${status}`)));
}

function entry(sign, words, [id, title, status, says]) {
  // A skill that is not in the list above says here what it said.
  const lost = says && !isHere(id) ? el("div", { class: "text says", dir: "auto" }, says) : null;
  return el("li", {}, heading(sign, words, id, title, status), lost);
}

function change(number) {
  const { counts, added, removed, edits, problem } = DATA.changes[number];
  if (problem) return el("p", { class: "alert" }, `This change cannot be shown: ${problem}`);
  const [plus, minus, other] = counts;
  const more = plus + minus + other - added.length - removed.length - edits.length;
  const ends = DATA.changes[number].ends.map((id) => id.slice(0, 12)).join(" ");
  const rest = more && el("p", { class: "none" },
    `${more.toLocaleString("en")} more; all of them: `
    + `distill skills diff ${ends} --bank ${DATA.bank}`);
  const list = el("ul", { class: "changes" },
    added.map((one) => entry("+", "added", one)),
    removed.map((one) => entry(MINUS, "removed", one)),
    edits.map(edit));
  const sums = `${plus} added, ${minus} removed, ${other} changed`;
  return el("div", {}, el("p", { class: "count", role: "status" }, sums),
    plus + minus + other ? el("div", { class: "card" }, list, rest || null)
      : el("p", { class: "none" }, "Both versions hold the same skills."));
}

function fillChanges() {
  const place = byId("change");
  if (!DATA.changes.length) {
    place.append(el("p", { class: "none" }, "There was no change before this version."));
    return;
  }
  const select = el("select", { id: "which" });
  options(select, DATA.changes.map((one, i) => [String(i), label(one)]));
  const shown = el("div", {});
  const draw = () => shown.replaceChildren(change(Number(select.value)));
  select.addEventListener("change", draw);
  place.append(el("div", { class: "controls" }, el("label", { class: "wide" }, "Change ", select)),
    shown);
  draw();
}

if (DATA.skills.length) {
  byId("finder").hidden = false;
  fillControls();
  recall();
  for (const name of Object.keys(KEPT)) {
    byId(name).addEventListener("input", () => { search(); remember(); });
  }
  byId("more").addEventListener("click", () => {
    const next = drawn;
    draw(drawn + BATCH);
    byId("skills").children[next].querySelector("summary").focus();
  });
  window.addEventListener("hashchange", recall);
  window.addEventListener("beforeprint", () => draw(found.length));
}
fillChanges();
