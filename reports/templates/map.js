(() => {
  // The capacity map: a click on a cell, or the arrow keys, tell its plan and its command.
  document.querySelectorAll("table[data-map]").forEach((table) => {
    const map = JSON.parse(document.getElementById(table.dataset.map).textContent);
    const panel = document.getElementById(table.dataset.panel);
    const field = (name) => panel.querySelector(`[data-field="${name}"]`);
    const rows = [...table.tBodies[0].rows].map((row) => [...row.cells].slice(1));
    const cells = rows.flat(), wide = rows[0].length;
    const verdicts = { fits: "fits", tight: "is tight", no: "does not fit" };
    const buttons = cells.map((cell, place) => {
      const button = Object.assign(document.createElement("button"), { type: "button", tabIndex: -1 });
      const told = map.cells[place];
      button.title = `${told.shape}: ${verdicts[told.verdict]}, ${told.need} GiB`;
      button.append(...cell.childNodes);
      cell.append(button);
      cell.removeAttribute("title");
      return button;
    });
    let chosen = Math.max(0, cells.findIndex((cell) => cell.classList.contains("own")));
    buttons[chosen].tabIndex = 0;
    panel.querySelectorAll("button.copy").forEach((button) => { button.hidden = true; });
    const choose = (place, focus) => {
      buttons[chosen].tabIndex = -1;
      buttons[chosen].removeAttribute("aria-current");
      chosen = place;
      buttons[chosen].tabIndex = 0;
      buttons[chosen].setAttribute("aria-current", "true");
      if (focus) buttons[chosen].focus();
      const told = map.cells[place];
      field("hint").hidden = true;
      field("shape").textContent = told.shape;
      field("verdict").textContent = verdicts[told.verdict];
      field("verdict").className = `key ${told.verdict}`;
      field("need").textContent = Number(told.free) >= 0 ? `${told.need} GiB, ${told.free} free` : `${told.need} GiB, ${(-told.free).toFixed(2)} too many`;
      field("step").textContent = told.step ? `; ${told.step} a step` : "";
      field("way").textContent = told.way === null ? "Nothing that was tried fits this shape." : map.ways[told.way];
      field("notes").textContent = told.notes;
      const command = map.commands[told.command[0]].replace("{shape}", told.command[1]);
      // As in the page's own commands, no line ends in the dashes of an option.
      field("command").replaceChildren(...command.split(" ").flatMap((word, at) => {
        const part = word.includes("-") ? Object.assign(document.createElement("span"), { className: "flag", textContent: word }) : word;
        return at ? [" ", part] : [part];
      }));
      field("command").hidden = !command;
      panel.querySelectorAll("button.copy").forEach((button) => { button.hidden = !command; });
    };
    buttons.forEach((button, place) => button.addEventListener("click", () => choose(place, false)));
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -wide, ArrowDown: wide };
    table.addEventListener("keydown", (event) => {
      const to = chosen + (moves[event.key] ?? 0);
      const sideways = Math.abs(moves[event.key]) === 1 && Math.floor(to / wide) !== Math.floor(chosen / wide);
      if (!moves[event.key] || to < 0 || to >= cells.length || sideways) return;
      event.preventDefault();
      choose(to, true);
    });
  });
  // What is wider than the screen says so.
  const cue = (box) => { box.classList.toggle("wider", box.scrollWidth - box.clientWidth - box.scrollLeft > 4); };
  const boxes = [...document.querySelectorAll(".scroll")];
  boxes.forEach((box) => box.addEventListener("scroll", () => cue(box), { passive: true }));
  // In the next frame: the cue itself takes room, and sizes that change while they are told are an error to browsers.
  const later = (seen) => requestAnimationFrame(() => seen.forEach((entry) => cue(entry.target)));
  const watching = new ResizeObserver(later);
  boxes.forEach((box) => watching.observe(box));
})();
