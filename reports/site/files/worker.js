// Python and the planner, beside the page: questions in, answers out. Of questions that wait, the newest is answered.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const HOME = "/home/pyodide";
const started = start();
const packs = new Map();
let loaded = 0;

async function get(path) {
  const answer = await fetch(new URL(path, import.meta.url));
  if (!answer.ok) throw new Error(`${path}: the server said ${answer.status}`);
  const bytes = new Uint8Array(await answer.arrayBuffer());
  loaded += bytes.length;
  postMessage({ loaded });
  return bytes;
}

async function start() {
  const manifest = JSON.parse(new TextDecoder().decode(await get("manifest.json")));
  const archives = Promise.all([get(manifest.files.libraries), get(manifest.files.vplan)]);
  const env = { HOME, VPLAN_HOME: `${HOME}/vplan`, PYDANTIC_DISABLE_PLUGINS: "__all__" };
  const python = await loadPyodide({ indexURL: new URL("pyodide/", import.meta.url).href, env });
  const folders = ["/libraries", "/vplan"];
  (await archives).forEach((archive, at) => python.unpackArchive(archive, "zip", { extractDir: folders[at] }));
  python.runPython(`import sys; sys.path[:0] = ["/vplan", "/libraries"]`);
  postMessage({ stage: "Starting the planner…" });
  return { manifest, python, planner: python.pyimport("planner.browser") };
}

function pack(manifest, model) {
  if (!packs.has(model)) {
    const arriving = get(manifest.packs[model]);
    arriving.catch(() => packs.delete(model)); // asked for again by the next question
    packs.set(model, arriving.then((archive) => ({ archive, unpacked: false })));
  }
  return packs.get(model);
}

async function answer({ id, question }) {
  const { manifest, python, planner } = await started;
  const model = planner.tapes_of(question);
  if (Object.hasOwn(manifest.packs, model)) {
    const found = await pack(manifest, model);
    if (!found.unpacked) python.unpackArchive(found.archive, "zip", { extractDir: "/vplan" });
    found.unpacked = true;
    found.archive = null;
  }
  postMessage({ stage: "Working…" });
  const began = performance.now();
  const answers = planner.answers(question);
  for (const text of answers) {
    postMessage({ id, text, seconds: (performance.now() - began) / 1000 });
    await new Promise((heard) => setTimeout(heard)); // a newer question may have come
    if (waiting) break;
  }
  answers.destroy();
}

let waiting = null;
let busy = false;

onmessage = async ({ data }) => {
  waiting = data;
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
