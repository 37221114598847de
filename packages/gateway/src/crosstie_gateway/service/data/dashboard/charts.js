// Small line charts over one time axis, drawn as SVG. A pointer over one of them reads all; what is dragged over, or a
// click, is a moment to be looked at.

const HEIGHT = 132;
const LEFT = 52;
const RIGHT = 6;
const TOP = 6;
const BOTTOM = 18;

function draw(tag, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text) element.textContent = text;
  return element;
}

// The next figure above a value that is easily read, and so is its half.
function round(value) {
  const scale = 10 ** Math.floor(Math.log10(value));
  return [1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10].find((step) => step * scale >= value * 0.9999) * scale;
}

export const clock = (at, pointS) => new Date(at * 1000).toLocaleTimeString("en-GB", pointS < 60 ? {} : { hour: "2-digit", minute: "2-digit" });

class Chart {
  constructor(charts) {
    this.charts = charts;
    this.title = document.createElement("h3");
    this.values = document.createElement("ul");
    this.svg = draw("svg", { role: "img", height: HEIGHT });
    this.node = document.createElement("figure");
    this.node.append(this.title, this.values, this.svg);
    const at = (event) => this.pointAt(event.clientX - this.svg.getBoundingClientRect().left);
    this.svg.addEventListener("pointermove", (event) => charts.point(at(event), charts.from));
    this.svg.addEventListener("pointerleave", () => charts.from === null && charts.point(null));
    this.svg.addEventListener("pointerdown", (event) => {
      this.svg.setPointerCapture(event.pointerId);
      charts.from = at(event);
    });
    this.svg.addEventListener("pointerup", (event) => charts.from !== null && charts.choose(charts.from, at(event)));
    this.svg.addEventListener("pointercancel", () => charts.point(null));
  }

  get wide() {
    return Math.max(this.node.clientWidth, 160);
  }

  x(point) {
    return LEFT + ((this.wide - LEFT - RIGHT) * (point + 0.5)) / this.charts.time.points;
  }

  pointAt(x) {
    const { points } = this.charts.time;
    const part = (x - LEFT) / (this.wide - LEFT - RIGHT);
    return Math.min(Math.max(Math.floor(part * points), 0), points - 1);
  }

  show(data) {
    this.data = data;
    this.title.textContent = data.name;
    const numbers = data.lines.flatMap((line) => line.values.filter((value) => value !== null));
    const most = Math.max(...numbers, 0, data.target ? data.target * 1.15 : 0);
    this.top = most > 0 ? round(most) : 1;
    const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / this.top);
    this.svg.setAttribute("width", this.wide);
    this.svg.replaceChildren();
    for (const value of [0, this.top / 2, this.top]) {
      this.svg.append(draw("line", { x1: LEFT, x2: this.wide - RIGHT, y1: y(value), y2: y(value), class: "grid" }));
      this.svg.append(draw("text", { x: LEFT - 5, y: y(value) + 4, "text-anchor": "end" }, data.format(value)));
    }
    this.drawHours();
    this.mark = draw("rect", { y: TOP, height: HEIGHT - TOP - BOTTOM, width: 0, class: "moment" });
    this.svg.append(this.mark);
    if (data.target) {
      this.svg.append(draw("line", { x1: LEFT, x2: this.wide - RIGHT, y1: y(data.target), y2: y(data.target), class: "target" }));
    }
    for (const line of data.lines) this.drawLine(line, y);
    if (!numbers.length) {
      this.svg.append(draw("text", { x: LEFT + 8, y: HEIGHT / 2, class: "none" }, data.empty || "No requests in this time."));
    }
    this.read(null);
    const said = [...this.values.children].map((item) => item.textContent).join(", ");
    this.svg.setAttribute("aria-label", `${data.name}: ${said || "no requests in this time"}`);
  }

  drawHours() {
    const { points, pointS, endsAt } = this.charts.time;
    const begins = endsAt - points * pointS;
    for (const part of [0, 1, 2]) {
      const point = (part * points) / 2;
      const anchor = ["start", "middle", "end"][part];
      const x = LEFT + ((this.wide - LEFT - RIGHT) * point) / points;
      this.svg.append(draw("text", { x, y: HEIGHT - 4, "text-anchor": anchor }, clock(begins + point * pointS, pointS)));
    }
  }

  drawLine(line, y) {
    let path = "";
    let open = false;
    line.values.forEach((value, point) => {
      if (value !== null) path += `${open ? "L" : "M"}${this.x(point).toFixed(1)} ${y(value).toFixed(1)}`;
      // A value between two gaps is a line of no length, which its round ends show.
      if (value !== null && !open) path += "h0";
      open = value !== null;
    });
    this.svg.append(draw("path", { d: path, class: `line ${line.colour}` }));
  }

  // The figures of a point; of the last one that has any where it is not given.
  read(point) {
    const { lines, format, target, promised } = this.data;
    const items = lines.map((line) => {
      const value = point === null ? line.values.findLast((one) => one !== null) : line.values[point];
      const item = document.createElement("li");
      item.className = line.colour;
      item.append(`${line.name} `, Object.assign(document.createElement("b"), { textContent: format(value ?? null) }));
      return item;
    });
    if (target) {
      items.push(Object.assign(document.createElement("li"), { className: "promised", textContent: `target ${promised}` }));
    }
    this.values.replaceChildren(...items);
  }

  select(from, to) {
    const half = (this.wide - LEFT - RIGHT) / this.charts.time.points / 2;
    this.mark.setAttribute("x", this.x(Math.min(from, to)) - half);
    this.mark.setAttribute("width", Math.abs(to - from) * 2 * half + 2 * half);
  }
}

export class Charts {
  // `onMoment`: told of the first and the last point that were chosen; `onPoint`: of the one that is read, or null.
  constructor(place, onMoment, onPoint) {
    this.place = place;
    this.onMoment = onMoment;
    this.onPoint = onPoint;
    this.charts = [];
    this.from = null;
    this.chosen = null;
    new ResizeObserver(() => this.shown && this.show(this.time, this.shown)).observe(place);
  }

  // `time`: {points, pointS, endsAt}; `shown`: of each chart its name, lines, format and target.
  show(time, shown) {
    if (this.from !== null) return;
    this.time = time;
    this.shown = shown;
    while (this.charts.length < shown.length) {
      const chart = new Chart(this);
      this.charts.push(chart);
      this.place.append(chart.node);
    }
    this.charts.forEach((chart, n) => chart.show(shown[n]));
    this.mark();
  }

  point(point, from = null) {
    for (const chart of this.charts) chart.read(point);
    if (point === null) this.from = null;
    if (point !== null && from === null) this.charts.forEach((chart) => chart.select(point, point));
    else if (point !== null) this.charts.forEach((chart) => chart.select(from, point));
    else this.mark();
    this.onPoint(point);
  }

  choose(one, other) {
    this.from = null;
    const { points, pointS, endsAt } = this.time;
    const [from, to] = [Math.min(one, other), Math.max(one, other)];
    const begins = endsAt - points * pointS;
    this.chosen = { from: begins + from * pointS, to: begins + (to + 1) * pointS };
    this.mark();
    this.onMoment(this.chosen.from, this.chosen.to);
  }

  // What was chosen stays marked while time goes on.
  mark() {
    const { points, pointS, endsAt } = this.time;
    const place = (at) => Math.round((at - (endsAt - points * pointS)) / pointS);
    for (const chart of this.charts) {
      if (this.chosen && place(this.chosen.from) >= 0) chart.select(place(this.chosen.from), place(this.chosen.to) - 1);
      else chart.mark.setAttribute("width", 0);
    }
  }
}
