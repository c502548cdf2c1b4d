(() => {
  // The step chart as an instrument: a cursor that reads out, zoom, a pin. Places are in LONG units from the left.
  const LONG = 10000, LEAST = 60;
  const gib = (mib) => `${(mib / 1024).toFixed(2)} GiB`;
  const time = (seconds) => (seconds >= 100 ? `${seconds.toFixed(0)} s` : seconds >= 1 ? `${seconds.toFixed(1)} s` : `${(seconds * 1000).toFixed(0)} ms`);
  const nearest = (at, place) => {
    let low = 0, high = at.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (at[middle] < place) low = middle + 1; else high = middle;
    }
    return low > 0 && place - at[low - 1] < at[low] - place ? low - 1 : low;
  };
  const row = (texts, head) => {
    const line = document.createElement("tr");
    texts.forEach((text, place) => {
      const cell = document.createElement(head && !place ? "th" : "td");
      if (head && !place) cell.scope = "row";
      if (place === texts.length - 1 || (head && place && place < 3)) cell.className = head && place === 3 ? "" : "n";
      cell.append(text);
      line.append(cell);
    });
    return line;
  };
  const svgNode = (tag, attributes, text = "") => {
    const node = document.createElementNS(document.querySelector("svg").namespaceURI, tag);
    Object.entries(attributes).forEach(([name, value]) => node.setAttribute(name, value));
    node.textContent = text;
    return node;
  };
  const svgLine = (kind) => svgNode("line", { class: kind, y1: "0", y2: "100%", visibility: "hidden" });
  // Round numbers between two, about six.
  const rounded = (from, to) => {
    if (!(to > from)) return [];
    const least = (to - from) / 6, power = 10 ** Math.floor(Math.log10(least));
    const step = power * [1, 2, 5, 10].find((factor) => power * factor >= least);
    const first = Math.ceil(from / step - 1e-9);
    return Array.from({ length: Math.floor(to / step + 1e-9) - first + 1 }, (_, index) => Number(((first + index) * step).toPrecision(8)));
  };
  // The value of y where x is at a place, on the line through points.
  const between = (x, y, place) => {
    const right = x.findIndex((value) => value >= place);
    if (right <= 0) return right ? y[y.length - 1] : y[0];
    return y[right - 1] + ((y[right] - y[right - 1]) * (place - x[right - 1])) / (x[right] - x[right - 1]);
  };
  const single = (told, reading) => {
    const field = (name) => reading.querySelector(`[data-field="${name}"]`);
    const total = (index) => told.mib[index].reduce((sum, part) => sum + part, 0);
    return {
      at: told.at,
      show(index, words, pinned) {
        const device = told.reserved[index] + told.outside;
        const than = pinned === null || pinned === index ? "" : ` (${total(index) >= total(pinned) ? "+" : "−"}${gib(Math.abs(total(index) - total(pinned)))} to the pin)`;
        field("when").replaceChildren(Object.assign(document.createElement("strong"), { textContent: words }));
        field("time").textContent = `about ${time(told.seconds[index])}`;
        field("place").textContent = told.names[told.place[index]];
        field("operator").textContent = told.names[told.operator[index]];
        field("allocated").textContent = gib(total(index)) + than;
        field("reserved").textContent = gib(told.reserved[index]);
        field("device").textContent = gib(device);
        field("owners").replaceChildren(...told.owners[index].map(([name, mib]) => row([told.names[name], (mib / 1024).toFixed(2)])));
        return `${time(told.seconds[index])}, ${told.names[told.place[index]]}: ${gib(total(index))} allocated, ${gib(device)} on the device`;
      },
      peak: told.at.map((_, index) => index).reduce((best, index) => (total(index) > total(best) ? index : best), 0),
    };
  };
  const several = (told, reading) => {
    const body = reading.querySelector('[data-field="plans"]'), caption = reading.querySelector('[data-field="when"]');
    const marks = [...body.rows].map((line) => line.cells[0].firstElementChild);
    const first = told.series[0];
    return {
      at: first.at,
      show(index, words) {
        caption.textContent = `${words}, without fragmentation`;
        const said = told.series.map((plan, number) => {
          const own = nearest(plan.at, first.at[index]);
          const line = row([plan.name, (plan.mib[own] / 1024).toFixed(2), time(plan.seconds[own]), told.names[plan.place[own]]], true);
          line.cells[0].prepend(marks[number]);
          return [line, `${plan.name} ${gib(plan.mib[own])}`];
        });
        body.replaceChildren(...said.map((pair) => pair[0]));
        return said.map((pair) => pair[1]).join(", ");
      },
      peak: first.mib.indexOf(Math.max(...first.mib)),
    };
  };
  document.querySelectorAll("[data-step]").forEach((box) => {
    const told = JSON.parse(document.getElementById(box.dataset.step).textContent);
    const reading = document.getElementById(box.dataset.reading);
    const model = (told.series ? several : single)(told, reading);
    const svg = box.querySelector("svg"), plot = svg.querySelector(".plot"), over = svg.querySelector(".over");
    const [cross, pin] = [svgLine("cross"), svgLine("pin")];
    const band = svgNode("rect", { class: "band", height: "100%", visibility: "hidden" });
    const times = svgNode("g", { "aria-hidden": "true" });
    svg.querySelectorAll(".time").forEach((mark) => mark.remove());
    svg.append(times);
    over.append(band, pin, cross);
    const heard = Object.assign(document.createElement("p"), { className: "visually-hidden" });
    heard.setAttribute("role", "status");
    box.after(heard);
    let view = [0, LONG], cursor = model.peak, pinned = null, drag = null;
    const share = (place) => `${((place - view[0]) / (view[1] - view[0])) * 100}%`;
    const inside = (place) => place >= view[0] && place <= view[1];
    const line = (mark, index) => {
      mark.setAttribute("visibility", index !== null && inside(model.at[index]) ? "visible" : "hidden");
      if (index !== null) ["x1", "x2"].forEach((side) => mark.setAttribute(side, share(model.at[index])));
    };
    // The name of a pass where its band has room for it.
    const named = (mark) => {
      const text = mark.querySelector("text"), room = mark.getBoundingClientRect().width - 6;
      text.setAttribute("visibility", text.getComputedTextLength() > room ? "hidden" : "inherit");
    };
    const drawTimes = () => {
      if (!told.seconds) return;
      const [from, to] = view.map((place) => between(told.at, told.seconds, place));
      times.replaceChildren(...rounded(from, to).flatMap((seconds, index) => {
        const x = share(between(told.seconds, told.at, seconds)), place = parseFloat(x);
        const anchor = place < 3 ? "start" : place > 96 ? "end" : "middle";
        const text = svgNode("text", { class: "soft-text", x, y: 334, "text-anchor": anchor }, `${seconds}${index ? "" : " s"}`);
        return [svgNode("line", { class: "gridline", x1: x, x2: x, y1: 314, y2: 320 }), text];
      }));
    };
    const draw = () => {
      plot.setAttribute("viewBox", `${view[0]} 0 ${view[1] - view[0]} 1000`);
      svg.querySelectorAll("[data-at]").forEach((mark) => {
        const place = Number(mark.dataset.at);
        ["x", "cx", "x1", "x2"].filter((side) => mark.hasAttribute(side)).forEach((side) => mark.setAttribute(side, share(place)));
        mark.setAttribute("visibility", inside(place) ? "visible" : "hidden");
      });
      svg.querySelectorAll("[data-from]").forEach((mark) => {
        const [from, to] = [Math.max(Number(mark.dataset.from), view[0]), Math.min(Number(mark.dataset.to), view[1])];
        mark.setAttribute("visibility", to > from ? "visible" : "hidden");
        if (to <= from) return;
        if (mark.hasAttribute("width")) {
          mark.setAttribute("x", share(from));
          mark.setAttribute("width", `${((to - from) / (view[1] - view[0])) * 100}%`);
          named(mark);
        } else {
          mark.setAttribute("x1", share(from));
          mark.setAttribute("x2", share(to));
        }
      });
      drawTimes();
      line(cross, cursor);
      line(pin, pinned);
      whole.disabled = view[0] === 0 && view[1] === LONG;
      box.dataset.zoomed = whole.disabled ? "" : "yes";
    };
    const read = (index, words = "Under the cursor") => {
      cursor = index;
      line(cross, cursor);
      return model.show(index, index === pinned ? "Pinned" : words, pinned);
    };
    const zoom = (factor, around) => {
      const wide = Math.min(LONG, Math.max(LEAST, (view[1] - view[0]) * factor));
      const left = Math.min(Math.max(0, around - (around - view[0]) * (wide / (view[1] - view[0]))), LONG - wide);
      view = [left, left + wide];
      draw();
    };
    const see = (index) => {
      const wide = view[1] - view[0], at = model.at[index];
      if (!inside(at)) view = [Math.min(Math.max(0, at - wide / 2), LONG - wide), 0], (view[1] = view[0] + wide);
      draw();
      heard.textContent = read(index);
    };
    const toggle = (index) => {
      pinned = pinned === index ? null : index;
      draw();
      heard.textContent = `${pinned === null ? "not pinned" : "pinned"}: ${read(index)}`;
    };
    const reset = () => { view = [0, LONG]; draw(); };
    const placeOf = (event) => {
      const box = svg.getBoundingClientRect();
      const part = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      return view[0] + part * (view[1] - view[0]);
    };
    svg.addEventListener("pointerdown", (event) => {
      if (event.button || event.pointerType === "touch") return;
      drag = { from: placeOf(event), x: event.clientX };
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", (event) => {
      const place = placeOf(event);
      if (drag && Math.abs(event.clientX - drag.x) > 5) {
        const [from, to] = [Math.min(drag.from, place), Math.max(drag.from, place)];
        band.setAttribute("visibility", "visible");
        band.setAttribute("x", share(from));
        band.setAttribute("width", `${((to - from) / (view[1] - view[0])) * 100}%`);
      }
      read(nearest(model.at, place));
    });
    svg.addEventListener("pointerup", (event) => {
      if (!drag) return;
      const place = placeOf(event), moved = Math.abs(event.clientX - drag.x) > 5;
      const [from, to] = [Math.min(drag.from, place), Math.max(drag.from, place)];
      drag = null;
      band.setAttribute("visibility", "hidden");
      if (!moved) toggle(nearest(model.at, place));
      else if (to - from >= LEAST) { view = [from, to]; draw(); }
    });
    svg.addEventListener("click", (event) => { if (event.pointerType === "touch") toggle(nearest(model.at, placeOf(event))); });
    svg.addEventListener("pointercancel", () => { drag = null; band.setAttribute("visibility", "hidden"); });
    svg.addEventListener("pointerleave", () => { if (!drag && pinned !== null) read(pinned); });
    svg.addEventListener("dblclick", () => { pinned = null; reset(); });
    // The wheel alone scrolls the page, until the chart has the focus.
    svg.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && document.activeElement !== box) return;
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, placeOf(event));
    }, { passive: false });
    const last = model.at.length - 1;
    const keys = {
      ArrowLeft: (event) => see(Math.max(0, cursor - (event.shiftKey ? 10 : 1))),
      ArrowRight: (event) => see(Math.min(last, cursor + (event.shiftKey ? 10 : 1))),
      Home: () => see(0),
      End: () => see(last),
      "+": () => zoom(0.6, model.at[cursor]),
      "=": () => zoom(0.6, model.at[cursor]),
      "-": () => zoom(1 / 0.6, model.at[cursor]),
      0: reset,
      Enter: () => toggle(cursor),
      " ": () => toggle(cursor),
      Escape: () => { pinned = null; reset(); },
    };
    box.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target !== box || !keys[event.key]) return;
      event.preventDefault();
      keys[event.key](event);
    });
    const tools = Object.assign(document.createElement("div"), { className: "tools" });
    const tool = (words, label, work) => {
      const button = Object.assign(document.createElement("button"), { type: "button", className: "copy", textContent: words });
      if (label) button.setAttribute("aria-label", label);
      button.addEventListener("click", work);
      tools.append(button);
      return button;
    };
    tool("+", "zoom in", () => zoom(0.6, model.at[cursor]));
    tool("−", "zoom out", () => zoom(1 / 0.6, model.at[cursor]));
    tool("peak", "show the peak", () => see(model.peak));
    const whole = tool("whole step", "", reset);
    box.before(tools);
    draw();
    new ResizeObserver(() => requestAnimationFrame(draw)).observe(box);
  });
})();
