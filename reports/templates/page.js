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
  const comfort = (root) => {
    root.querySelectorAll(".command").forEach((code) => {
      code.after(copyButton(() => code.textContent, "copy command"));
    });
    root.querySelectorAll("table.sortable").forEach((table) => {
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
    root.querySelectorAll("[data-timeline]").forEach((plot) => {
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
    root.querySelectorAll("[data-readings]").forEach((plot) => {
      const readings = JSON.parse(document.getElementById(plot.dataset.readings).textContent);
      const readout = document.getElementById(plot.dataset.readout);
      plot.addEventListener("pointermove", (event) => {
        const box = plot.getBoundingClientRect();
        const at = ((event.clientX - box.left) / box.width) * 100;
        let index = readings.at.findIndex((value) => value >= at);
        if (index < 0) index = readings.at.length - 1;
        readout.textContent = readings.words[index];
      });
    });
  };
  const parts = (root) => [...root.querySelectorAll("section[id]")];
  const shown = new Map(parts(document).map((part) => [part.id, part.outerHTML]));
  comfort(document);
  // A page that is served follows its run: the parts that have changed are replaced, and the others left alone.
  const follow = async () => {
    let news;
    try {
      const answer = await fetch(document.body.dataset.live, { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      news = new DOMParser().parseFromString(await answer.text(), "text/html");
    } catch {
      document.title = document.title.replace(/^(\(lost\) )?/, "(lost) ");
      return;
    }
    document.title = news.title;
    const fresh = parts(news);
    if (fresh.map((part) => part.id).join() !== parts(document).map((part) => part.id).join()) {
      location.reload();
      return;
    }
    fresh.forEach((part) => {
      if (shown.get(part.id) === part.outerHTML) return;
      shown.set(part.id, part.outerHTML);
      document.getElementById(part.id).replaceWith(part);
      comfort(part);
    });
  };
  if (document.body.dataset.live) setInterval(follow, 2000);
})();
