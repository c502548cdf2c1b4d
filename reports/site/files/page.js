// The form, the address, and what an answer looks like. Texts of the answer are only ever set as text.
const form = document.getElementById("form");
const field = form.elements;
const [status, heard, brief, shown, section] = ["status", "heard", "brief", "shown", "answer"].map((id) => document.getElementById(id));
const FIELDS = ["model", "gpu", "host_ram", "frames", "resolution", "method", "trainer", "steps", "paste"];
const DEFAULTS = { model: "wan2.1-t2v-1.3b", gpu: "24GB", method: "lora", steps: "2000" };
const TYPING_MS = 300;

const make = (tag, text = "", className = "") => {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  return element;
};

// A line breaks between options, not behind their dashes.
const unbroken = (element) => {
  const words = element.textContent.split(/(\s+)/);
  element.replaceChildren(...words.map((word) => (word.includes("-") ? make("span", word, "word") : word)));
  return element;
};

// ---- the form and the address

const models = new Map();

function fillForm({ models: known, gpus, trainers, version }) {
  for (const model of known) {
    models.set(model.name, model);
    field.model.append(new Option(model.title, model.name));
  }
  for (const { name, title } of trainers) field.trainer.append(new Option(title, name));
  document.getElementById("gpus").append(...gpus.map((name) => new Option(name, name)));
  document.getElementById("version").textContent = `vplan ${version}.`;
}

function readAddress() {
  const said = new URLSearchParams(location.hash.slice(1));
  const values = said.size ? Object.fromEntries(said) : DEFAULTS;
  for (const name of FIELDS) {
    const element = field[name];
    element.value = values[name] ?? (element.tagName === "SELECT" ? DEFAULTS[name] ?? "" : "");
    if (element.tagName === "SELECT" && element.selectedIndex < 0) element.value = DEFAULTS[name] ?? "";
  }
  field.fill.checked = values.fill === "1";
  suit();
}

function writeAddress() {
  const said = new URLSearchParams(FIELDS.filter((name) => field[name].value.trim()).map((name) => [name, field[name].value]));
  if (field.fill.checked) said.set("fill", "1");
  history.replaceState(null, "", `#${said}`);
}

// What the form offers for its model, and which of its fields are asked: a paste says itself what the others would.
function suit() {
  const model = models.get(field.model.value);
  const pasted = field.paste.value.trim() !== "";
  for (const name of ["method", "steps", "trainer"]) field[name].disabled = pasted;
  for (const name of ["model", "frames", "resolution"]) field[name].disabled = pasted && !field.fill.checked;
  field.frames.disabled ||= !model.video;
  if (!model.video) field.frames.value = "";
  field.frames.placeholder = model.video ? String(model.frames) : "1";
  field.resolution.placeholder = model.resolutions[0];
  document.getElementById("sizes").replaceChildren(...model.resolutions.map((size) => new Option(size, size)));
  const lengths = model.video ? [1, 2, 4, 6, 8].map((part) => Math.round((model.frames * part) / 4 / model.step) * model.step + 1) : [];
  document.getElementById("lengths").replaceChildren(...lengths.map((length) => new Option(length, length)));
  document.getElementById("clear").hidden = !pasted;
}

function question() {
  const asked = Object.fromEntries(FIELDS.map((name) => [name, field[name].value]));
  return JSON.stringify({ ...asked, fill: field.fill.checked });
}

// ---- the worker

// From a blob, it has this page's policy: it can load from here and send nothing anywhere.
const source = `import ${JSON.stringify(new URL("worker.js", import.meta.url).href)};`;
const worker = new Worker(URL.createObjectURL(new Blob([source], { type: "text/javascript" })), { type: "module" });
let asked = 0;

function ask() {
  section.setAttribute("aria-busy", "true");
  shown.classList.add("stale"); // until the first part of the new answer is there
  worker.postMessage({ id: ++asked, question: question() });
}

worker.onmessage = ({ data: { loaded, stage, id, text, seconds, failure } }) => {
  if (loaded) status.textContent = `Loading the planner: ${(loaded / 1e6).toFixed(1)} MB (once; then your browser keeps it)`;
  if (stage) status.textContent = stage;
  if (id !== asked) return; // a newer question is on its way
  let answer;
  try {
    answer = JSON.parse(text);
  } catch (error) { // nothing came, or not what the planner said: without memory Pyodide hands over other bytes
    failure ??= `${error.message}; load the page again`;
    answer = { shown: { verdict: "error", sentence: `The planner failed: ${failure}`, facts: [] } };
  }
  show(answer);
  shown.classList.remove("stale");
  heard.textContent = brief.textContent = answer.shown.sentence;
  brief.className = answer.shown.verdict;
  const took = `Answered in ${seconds?.toFixed(1)} s, here in your browser.`;
  const next = answer.shown.verdict === "fits" ? "Working out what each option did…" : "Looking for changes that make it fit…";
  status.textContent = failure ? "" : answer.more ? `${took} ${next}` : took;
  section.setAttribute("aria-busy", String(Boolean(answer.more)));
};
worker.onerror = (error) => { status.textContent = `The planner could not be loaded: ${error.message || "see the console"}`; };

// ---- the answer

function show({ command, code, json, shown: told }) {
  const parts = [make("p", told.sentence, `verdict ${told.verdict}`)];
  if (told.job) parts.push(make("p", told.job));
  if (told.bar) parts.push(bar(told.bar, told.verdict));
  if (told.facts.length) {
    const list = make("dl");
    for (const [name, text] of told.facts) list.append(make("dt", name), make("dd", text));
    parts.push(list);
  }
  if (told.text) parts.push(make("pre", told.text));
  for (const change of told.changes ?? []) parts.push(...changed(change));
  for (const { title, text } of told.copies ?? []) parts.push(...copied(title, text));
  if (told.table) parts.push(table(told.table));
  if (told.notes?.length) {
    const list = make("ul");
    list.append(...told.notes.map((note) => unbroken(make("li", note))));
    parts.push(make("h3", told.verdict === "error" ? "What to change" : "Assumed, and not sure of"), list);
  }
  if (command) parts.push(...copied("The same on the command line", command));
  shown.replaceChildren(...parts);
  shown.answer = { command, code, json }; // for tests and measurements
}

function bar({ need, low, high, budget }, verdict) {
  const whole = Math.max(budget, high) * 1.04;
  const place = (className, from, to) => {
    const part = make("i", "", className);
    part.style.left = `${(100 * from) / whole}%`;
    if (to !== undefined) part.style.width = `${(100 * (to - from)) / whole}%`;
    return part;
  };
  const element = make("div", "", "bar");
  element.setAttribute("role", "img");
  element.setAttribute("aria-label", `${need.toFixed(1)} GiB needed, ${low.toFixed(1)} to ${high.toFixed(1)}, of ${budget.toFixed(1)} GiB`);
  element.append(place(`need of-${verdict}`, 0, need), place("range", low, high), place("budget", budget));
  const box = make("div");
  box.append(element, make("p", `${Math.round((100 * need) / budget)} % of the budget, which is the line; hatched: the range`, "help"));
  return box;
}

function table({ head, rows }) {
  const element = make("table");
  const heads = make("tr");
  for (const name of head) {
    const cell = make("th", name);
    cell.scope = "col";
    heads.append(cell);
  }
  element.append(make("thead"), make("tbody"));
  element.tHead.append(heads);
  for (const row of rows) {
    const line = make("tr");
    line.append(...row.map((text) => make("td", text)));
    element.tBodies[0].append(line);
  }
  return element;
}

function copied(title, text) {
  const button = make("button", "copy");
  button.type = "button";
  button.setAttribute("aria-label", `copy: ${title}`);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "copied";
    } catch {
      button.textContent = "select and copy by hand";
    }
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
  const line = make("div", "", "title");
  line.append(make("h3", title), button);
  const box = unbroken(make("pre", text));
  box.tabIndex = 0; // it may scroll
  return [line, box];
}

function changed({ title, lines, effect, marked }) {
  const parts = [unbroken(make("h3", `${title}: ${lines.join("  ")}`))];
  if (effect) parts.push(unbroken(make("p", effect, "help")));
  if (marked) {
    const box = make("pre", "", "marked");
    const words = { "-": "gone", "+": "new" };
    box.append(...marked.map(([mark, line]) => unbroken(make("span", `${mark} ${line}`, words[mark] ?? ""))));
    box.tabIndex = 0;
    parts.push(box);
  }
  return parts;
}

// ---- theme, events

const theme = document.getElementById("theme");
theme.addEventListener("change", () => { document.documentElement.dataset.theme = theme.value; });

// Not by links: the address behind the # is the question's.
for (const id of ["skip", "brief"]) document.getElementById(id).addEventListener("click", () => { section.focus(); section.scrollIntoView(); });

let typing;
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("input", () => {
  clearTimeout(typing);
  suit();
  typing = setTimeout(() => { writeAddress(); ask(); }, TYPING_MS);
});
field.model.addEventListener("change", () => { field.resolution.value = ""; field.frames.value = ""; suit(); });
document.getElementById("clear").addEventListener("click", () => {
  field.paste.value = "";
  field.paste.focus();
  form.dispatchEvent(new Event("input"));
});
window.addEventListener("hashchange", () => { readAddress(); ask(); });

fillForm(await (await fetch("manifest.json")).json());
readAddress();
ask();
