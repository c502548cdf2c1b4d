"use strict";
(() => {
  // All of this is comfort: without it the page says the same.
  const cells = (table) => [...table.rows].map((row) => [...row.cells].map((cell) => cell.dataset.value ?? cell.innerText.trim()));
  const copyButton = (text, label) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = label;
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text());
        button.textContent = "copied";
      } catch {
        button.textContent = "select and copy by hand";
      }
      setTimeout(() => { button.textContent = label; }, 1500);
    });
    return button;
  };
  document.querySelectorAll(".command").forEach((code) => {
    code.after(copyButton(() => code.textContent, "copy command"));
  });
  document.querySelectorAll("table.sortable").forEach((table) => {
    table.closest(".scroll").after(copyButton(() => cells(table).map((row) => row.join("\t")).join("\n"), "copy table"));
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const key = (row) => row.cells[column].dataset.value ?? row.cells[column].innerText.trim();
        const rows = [...table.tBodies[0].rows].sort((one, other) => {
          const [a, b] = [key(one), key(other)];
          const order = a !== "" && b !== "" && !isNaN(a) && !isNaN(b) ? a - b : a.localeCompare(b);
          return down ? -order : order;
        });
        table.tBodies[0].append(...rows);
      });
    });
  });
  document.querySelectorAll("[data-timeline]").forEach((plot) => {
    const told = JSON.parse(document.getElementById(plot.dataset.timeline).textContent);
    const readout = document.getElementById(plot.dataset.readout);
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      const at = ((event.clientX - box.left) / box.width) * told.events[0];
      let index = told.at.findIndex((value) => value >= at);
      if (index < 0) index = told.at.length - 1;
      const parts = told.parts.map((name, place) => [name, told.gib[index][place]]).filter((pair) => pair[1] >= 0.01);
      readout.textContent = parts.map((pair) => `${pair[0]} ${pair[1].toFixed(2)}`).join(", ") +
        `; reserved ${told.reserved[index].toFixed(2)} GiB`;
    });
  });
})();
