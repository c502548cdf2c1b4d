// Python and the planner, beside the page: questions in, answers out. Of questions that wait, the newest is answered.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const HOME = "/home/pyodide";
const packs = new Map();
let loaded = 0;
let waiting = null; // the newest question
let busy = false;
const listed = get("manifest.json").then((bytes) => JSON.parse(new TextDecoder().decode(bytes)));
const started = start();

async function get(path) {
  const answer = await fetch(new URL(path, import.meta.url));
  if (!answer.ok) throw new Error(`${path}: the server said ${answer.status}`);
  const bytes = new Uint8Array(await answer.arrayBuffer());
  loaded += bytes.length;
  postMessage({ loaded });
  return bytes;
}

async function start() {
  const manifest = await listed;
  const archives = Promise.all([get(manifest.files.libraries), get(manifest.files.vplan)]);
  const env = { HOME, VPLAN_HOME: `${HOME}/vplan`, PYDANTIC_DISABLE_PLUGINS: "__all__" };
  const python = await loadPyodide({ indexURL: new URL("pyodide/", import.meta.url).href, env });
  const folders = ["/libraries", "/vplan"];
  (await archives).forEach((archive, at) => python.unpackArchive(archive, "zip", { extractDir: folders[at] }));
  python.runPython(`import sys; sys.path[:0] = ["/vplan", "/libraries"]`);
  postMessage({ stage: "Starting the planner…" });
  return { manifest, python, planner: python.pyimport("planner.browser") };
}

// The tapes of a model, asked for once; nothing for what is no model.
function pack(manifest, model) {
  if (!packs.has(model) && Object.hasOwn(manifest.packs, model)) {
    const arriving = get(manifest.packs[model]);
    arriving.catch(() => packs.delete(model)); // asked for again by the next question
    packs.set(model, arriving.then((archive) => ({ archive, unpacked: false })));
  }
  return packs.get(model);
}

async function answer({ id, question }) {
  const { manifest, python, planner } = await started;
  const model = planner.tapes_of(question);
  const found = await pack(manifest, model);
  if (found && !found.unpacked) {
    python.unpackArchive(found.archive, "zip", { extractDir: "/vplan" });
    found.unpacked = true;
    found.archive = null;
  }
  postMessage({ stage: "Working…" });
  const began = performance.now();
  const tell = (text) => postMessage({ id, text, seconds: (performance.now() - began) / 1000 });
  const answers = planner.answers(question, tell);
  for (const text of answers) {
    tell(text);
    await new Promise((heard) => setTimeout(heard)); // a newer question may have come
    if (waiting) break;
  }
  answers.destroy();
}

onmessage = async ({ data }) => {
  waiting = data;
  const { model, paste } = JSON.parse(data.question);
  if (!paste) listed.then((manifest) => pack(manifest, model)); // while Python starts
  if (busy) return;
  busy = true;
  while (waiting) {
    const asked = waiting;
    waiting = null;
    try {
      await answer(asked);
    } catch (error) {
      postMessage({ id: asked.id, failure: String(error) });
    }
  }
  busy = false;
};
