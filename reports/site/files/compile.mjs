// node compile.mjs PYODIDE IN.zip OUT.zip: the modules of an archive, compiled by the Python that will import them.
import { readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [folder, sources, compiled] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(`${folder}/pyodide.mjs`));
const python = await loadPyodide({ indexURL: `${folder}/` });
python.unpackArchive(new Uint8Array(readFileSync(sources)), "zip", { extractDir: "/sources" });
python.runPython(`
import pathlib, py_compile, zipfile

unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
with zipfile.ZipFile("/compiled.zip", "w") as archive:
    for path in sorted(pathlib.Path("/sources").rglob("*.py")):
        name = path.relative_to("/sources").as_posix()
        archive.write(py_compile.compile(path, f"{path}c", f"/{name}", doraise=True, invalidation_mode=unchecked), f"{name}c")
`);
writeFileSync(compiled, python.FS.readFile("/compiled.zip"));
