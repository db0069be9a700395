"use strict";
// The live views: controls, an image whose patches or a text whose tokens can be chosen, and what W does with them.

const COLOURS = [[0, 0, 4], [66, 10, 104], [147, 38, 103], [221, 81, 58], [252, 165, 10], [252, 255, 164]];
const DECADES = 4; // of the logarithmic colours
const OVERLAY = 0.6; // as in the pictures
const liveViews = {};

// The colour of a part between 0 and 1 of the scale.
function colourOf(part) {
  const place = Math.min(Math.max(part, 0), 1) * (COLOURS.length - 1);
  const below = Math.min(Math.floor(place), COLOURS.length - 2);
  return COLOURS[below].map((low, c) => Math.round(low + (COLOURS[below + 1][c] - low) * (place - below)));
}

// Where a weight is on the scale whose end is `most`.
function partOf(weight, most, logarithmic) {
  if (!logarithmic) return weight / most;
  return weight > 0 ? 1 + Math.log10(weight / most) / DECADES : 0;
}

function format(value) {
  return Number.isFinite(value) ? value.toPrecision(3) : "–";
}

function fill(select, names) {
  select.replaceChildren(...names.map((name, place) => new Option(name, place)));
}

// What both kinds of view share: the controls, the state they stand for, and the numbers below.
class LiveView {
  constructor(view, root) {
    this.view = view;
    this.root = root;
    this.query = view.start;
    this.decoded = view.items.map(() => null);
    this.item = this.control("item");
    this.layer = this.control("layer");
    this.head = this.control("head");
    this.factor = this.control("factor");
    this.logarithmic = this.control("logarithmic");
    fill(this.item, view.items.map((item) => item.name));
    fill(this.layer, view.layers.map((layer) => `layer ${layer.number}`));
    fill(this.head, Array.from({ length: view.heads }, (_, head) => `head ${head + 1}`));
    this.item.closest("label").hidden = view.items.length < 2;
    for (const control of [this.item, this.layer, this.head, this.factor, this.logarithmic]) {
      control.addEventListener("input", () => this.redraw());
    }
    this.control("learned").addEventListener("click", () => {
      this.factor.value = 0;
      this.redraw();
    });
  }

  control(name) {
    return this.root.querySelector(`[data-control="${name}"]`);
  }

  // The current row of W, and the sigma that it has.
  current() {
    const item = Number(this.item.value);
    const [layer, head] = [Number(this.layer.value), Number(this.head.value)];
    this.decoded[item] ??= decodeHalves(this.view.items[item].features);
    const learned = this.view.layers[layer].sigma[head];
    const sigma = learned * 2 ** Number(this.factor.value);
    const row = kernelRow(this.view, this.decoded[item], layer, head, this.query, sigma);
    return { row, sigma, learned, layer: this.view.layers[layer], head };
  }

  redraw() {
    const begun = performance.now();
    const now = this.current();
    this.draw(now);
    const changed = now.sigma === now.learned ? "the model's" : `the model's: ${format(now.learned)}`;
    this.control("sigma").textContent = `${format(now.sigma)} (${changed})`;
    this.factor.setAttribute("aria-valuetext", format(now.sigma));
    this.root.dataset.milliseconds = performance.now() - begun;
  }

  show(numbers) {
    const entries = Object.entries(numbers).flatMap(([name, value]) => {
      const [term, text] = [document.createElement("dt"), document.createElement("dd")];
      term.textContent = name;
      text.textContent = value;
      return [term, text];
    });
    this.control("numbers").replaceChildren(...entries);
  }
}

// An image; the chosen patch is outlined, and the weights that it gives all patches are over the image.
class ImageView extends LiveView {
  constructor(view, root) {
    super(view, root);
    this.canvas = root.querySelector("canvas");
    this.images = view.items.map((item) => {
      const image = new Image();
      image.onload = () => this.redraw();
      image.src = item.image;
      return image;
    });
    this.canvas.addEventListener("click", (event) => {
      const box = this.canvas.getBoundingClientRect();
      const [down, across] = [(event.clientY - box.top) / box.height, (event.clientX - box.left) / box.width];
      this.choose(down * view.rows, across * view.columns);
    });
    this.canvas.addEventListener("keydown", (event) => this.step(event));
    this.control("class").hidden = !view.hasClass;
    this.control("class").addEventListener("click", () => {
      this.query = 0;
      this.redraw();
    });
  }

  // The row and column of the chosen patch; null for a token before the patches.
  place() {
    const patch = this.query - this.view.prefix;
    return patch < 0 ? null : [Math.floor(patch / this.view.columns), patch % this.view.columns];
  }

  choose(row, column) {
    const inside = (value, count) => Math.min(Math.max(Math.floor(value), 0), count - 1);
    const { rows, columns, prefix } = this.view;
    this.query = prefix + inside(row, rows) * columns + inside(column, columns);
    this.redraw();
  }

  step(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    const [row, column] = this.place() ?? [0, 0];
    this.choose(row + move[0], column + move[1]);
  }

  draw({ row }) {
    const { rows, columns, prefix, hasClass } = this.view;
    const { width, height } = this.canvas;
    const image = this.images[Number(this.item.value)];
    const context = this.canvas.getContext("2d");
    this.control("plain").src = image.src;
    context.drawImage(image, 0, 0, width, height);
    const most = row.subarray(prefix).reduce((a, b) => Math.max(a, b), 1e-300);
    const cell = [width / columns, height / rows];
    for (let token = prefix; token < row.length; token++) {
      const [down, across] = [Math.floor((token - prefix) / columns), (token - prefix) % columns];
      const colour = colourOf(partOf(row[token], most, this.logarithmic.checked));
      context.fillStyle = `rgb(${colour.join(" ")} / ${OVERLAY})`;
      context.fillRect(across * cell[0], down * cell[1], cell[0], cell[1]);
    }
    const place = this.place();
    const frame = Math.min(3, cell[0] / 12);
    const frames = place ? [["#000", 2 * frame], ["#2ff", frame]] : [];
    for (const [colour, wide] of frames) {
      context.strokeStyle = colour;
      context.lineWidth = wide;
      const [left, top] = [place[1] * cell[0] + frame, place[0] * cell[1] + frame];
      context.strokeRect(left, top, cell[0] - 2 * frame, cell[1] - 2 * frame);
    }
    this.control("scale").textContent = this.logarithmic.checked
      ? `colours: ${format(most / 10 ** DECADES)} to ${format(most)}, logarithmic`
      : `colours: 0 to ${format(most)}`;
    const name = place ? `patch in row ${place[0] + 1}, column ${place[1] + 1}` : "class token";
    const numbers = { row: `${name}, ${this.layer.selectedOptions[0].text}, ${this.head.selectedOptions[0].text}` };
    numbers["weight of itself"] = format(row[this.query]);
    if (hasClass && place) numbers["weight of the class token"] = format(row[0]);
    numbers["effective tokens"] = `${format(effectiveTokens(row))} of ${row.length}`;
    numbers["mean distance"] = place ? `${format(patchDistance(this.view, row, this.query))} pixels` : "–";
    this.show(numbers);
  }
}

// A text; its tokens are coloured by the weight with which the chosen one reads them.
class TextView extends LiveView {
  constructor(view, root) {
    super(view, root);
    const words = root.querySelector("[data-control=text]");
    this.spans = view.words.map((word, token) => {
      const span = document.createElement("span");
      span.textContent = word;
      span.setAttribute("role", "option");
      for (const event of ["pointerenter", "focus", "click"]) span.addEventListener(event, () => this.choose(token));
      return span;
    });
    words.replaceChildren(...this.spans);
    words.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
      const ends = { Home: 0, End: view.tokens - 1 }[event.key];
      if (move === undefined && ends === undefined) return;
      event.preventDefault();
      this.spans[ends ?? Math.min(Math.max(this.query + move, 0), view.tokens - 1)].focus();
    });
    this.redraw();
  }

  choose(token) {
    if (this.query === token) return;
    this.query = token;
    this.redraw();
  }

  draw({ row, layer, head }) {
    const read = readTokens(row, layer.valueOffsets[head]);
    const most = read.reduce((a, b) => Math.max(a, b), 1e-300);
    this.spans.forEach((span, token) => {
      const chosen = token === this.query;
      span.tabIndex = chosen ? 0 : -1;
      span.setAttribute("aria-selected", chosen);
      span.classList.toggle("later", token > this.query);
      const part = Math.max(partOf(read[token], most, this.logarithmic.checked), 0);
      span.style.setProperty("--weight", `${Math.round(100 * part)}%`);
      span.title = token > this.query ? "later than the chosen token" : `weight ${format(read[token])}`;
    });
    const back = layer.window < this.view.tokens - 1 ? `, ${layer.window} tokens back at most` : "";
    const late = (what, by) => (by ? `; ${what} come ${by === 1 ? "a token" : `${by} tokens`} late` : "");
    const pairs = late("keys", layer.keyOffsets[head]), reads = late("values", layer.valueOffsets[head]);
    this.show({
      row: `token ${this.query + 1} of ${this.view.tokens}${back}${pairs}${reads}`,
      "weight of itself": format(read[this.query]),
      "effective tokens": `${format(effectiveTokens(read))} of ${this.query + 1}`,
      "mean distance": `${format(tokensBack(read, this.query))} tokens back`,
    });
  }
}

for (const root of document.querySelectorAll("[data-view]")) {
  const view = JSON.parse(root.querySelector("script").textContent);
  liveViews[root.dataset.view] = new (view.words ? TextView : ImageView)(view, root);
}
for (const bar of document.querySelectorAll(".bar")) {
  bar.style.background = `linear-gradient(to right, ${COLOURS.map((c) => `rgb(${c.join(" ")})`).join(", ")})`;
}

// On paper nothing can be opened: claims and commands are, and closed again.
const opened = [];
addEventListener("beforeprint", () => {
  opened.push(...document.querySelectorAll("section details:not([open])"));
  for (const details of opened) details.open = true;
});
addEventListener("afterprint", () => {
  for (const details of opened.splice(0)) details.open = false;
});
