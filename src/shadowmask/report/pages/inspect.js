"use strict";
// The page of one or two samples. Moving the slider repaints only tokens in view whose look changes.

const CHUNK = 128;                                     // tokens that scroll into view together
const TARGET = 16, PICKED = 32, CULPRIT = 64;          // flags beside a token's level
const CULPRITS = 3;                                    // spans marked per answer token

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

const nats = (value) => (Number.isFinite(value) ? value.toFixed(2).replace("-", "−") : "");
const shown = (piece) => (piece === "" ? "▫" : piece);
const quoted = (text) => `“${text.replace(/\s+/g, " ").trim()}”`;
const inline = (piece) => JSON.stringify(shown(piece)).slice(1, -1).replaceAll('\\"', '"');

class SampleView {
  constructor(sample, number, page) {
    this.sample = sample;
    this.page = page;
    this.record = new RecordView(sample.record, sample.prompt_length);
    this.answers = sample.pieces.length - sample.prompt_length;
    for (const name of ["sparse_logprobs", "shadow_logprobs", "dense_logprobs", "kl"]) {
      this[name] = floatsOf(sample[name]);
    }
    this.removed = sample.restored ? floatsOf(sample.restored.kl_removed) : null;
    this.chosen = new Set(Array(this.record.cells).keys());
    this.picked = this.hovered = null;
    this.answer = 0;
    this.build(number);
  }

  // -- building, once --------------------------------------------------------------------------------

  build(number) {
    const { sample } = this;
    this.detail = make("div", { className: "detail" });
    this.detail.setAttribute("aria-live", "polite");
    this.worst = make("div", { className: "worst" });
    this.element = make("section", { className: "sample", id: `sample-${number}` },
      make("h2", { textContent: sample.title }),
      this.buildFacts(),
      make("h3", { textContent: "What the cache held" }), this.buildScale(), this.buildText(),
      this.detail,
      make("h3", { textContent: "Layers (columns) and KV heads (rows): share of tokens held" }), this.buildMap(),
      make("h3", { textContent: "What the answer lost (log-probabilities and KL in nats)" }),
      this.worst, this.buildAnswers());
    this.buildWorst();
  }

  buildFacts() {
    const { sample, record } = this;
    const facts = {
      tokens: `${sample.prompt_length} prompt, ${this.answers} answer`,
      record: `${record.layers} layers × ${record.heads} heads, ${record.moments.length === 1 ? "one eviction" : `${record.moments.length} evictions`}`,
      ...sample.facts,
    };
    if (sample.reward !== null) facts.reward = String(+sample.reward.toFixed(4));
    const list = make("dl", { className: "facts" });
    for (const [name, value] of Object.entries(facts)) {
      list.append(make("dt", { textContent: name }), make("dd", { textContent: value }));
    }
    return list;
  }

  buildScale() {
    const scale = make("div", { className: "scale" }, "held by");
    for (const [step, word] of [[0, "no head"], [2, "¼"], [4, "½"], [6, "¾"], [8, "all"], [9, "not yet sampled"]]) {
      scale.append(make("span", { className: `k l${step}`, textContent: word }));
    }
    scale.append(make("span", { className: "k answer", textContent: "answer" }));
    if (this.removed) scale.append(make("span", { className: "k culprit", textContent: "its loss changed this answer token" }));
    return scale;
  }

  buildText() {
    this.spans = [];
    this.painted = new Int16Array(this.record.tokens).fill(-1);
    this.codes = new Int16Array(this.record.tokens);
    this.inView = new Set();
    this.text = make("div", { className: "text", tabIndex: 0 });
    this.text.setAttribute("role", "group");
    this.text.setAttribute("aria-label", "prompt and answer; arrow keys pick a token");
    const observer = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const chunk = entry.target.chunk;
        if (entry.isIntersecting) { this.inView.add(chunk); this.paint(chunk); } else this.inView.delete(chunk);
      }
    }, { root: this.text, rootMargin: "200px" });
    for (let start = 0; start < this.record.tokens; start += CHUNK) {
      const chunk = make("span", { chunk: start / CHUNK });
      for (let k = start; k < Math.min(start + CHUNK, this.record.tokens); k++) {
        const span = make("span", { textContent: shown(this.sample.pieces[k]), token: k });
        this.spans.push(span);
        chunk.append(span);
      }
      this.text.append(chunk);
      observer.observe(chunk);
    }
    this.text.addEventListener("pointerover", (event) => this.hover(event.target.token));
    this.text.addEventListener("pointerleave", () => this.hover(undefined));
    this.text.addEventListener("click", (event) => this.pick(event.target.token));
    this.text.addEventListener("keydown", (event) => this.textKey(event));
    return this.text;
  }

  buildMap() {
    const { layers, heads } = this.record;
    this.cells = [];
    const table = make("table");
    table.setAttribute("role", "grid");
    table.setAttribute("aria-multiselectable", "true");
    const range = (count) => [...Array(count).keys()];
    const top = make("tr", {}, make("th", { textContent: "all", choice: range(this.record.cells) }));
    for (const layer of range(layers)) {
      const choice = range(heads).map((head) => layer * heads + head);
      top.append(make("th", { textContent: layer, title: `layer ${layer}`, choice }));
    }
    table.append(top);
    for (const head of range(heads)) {
      const choice = range(layers).map((layer) => layer * heads + head);
      const row = make("tr", {}, make("th", { textContent: `head ${head}`, choice }));
      for (const cell of choice) {
        this.cells[cell] = make("td", { choice: [cell] });
        row.append(this.cells[cell]);
      }
      table.append(row);
    }
    for (const element of table.querySelectorAll("th, td")) element.tabIndex = -1;
    top.firstChild.tabIndex = 0;
    table.addEventListener("click", (event) => event.target.choice && this.choose(event.target.choice));
    table.addEventListener("keydown", (event) => this.mapKey(event));
    return make("div", { className: "map" }, table);
  }

  buildAnswers() {
    this.rows = [];
    const head = make("div", { className: "r head" });
    for (const name of ["#", "token", "sparse", "shadow", "dense", "KL", ""]) head.append(make("span", { textContent: name }));
    const list = make("div", { className: "answers", tabIndex: 0 }, head);
    list.setAttribute("role", "listbox");
    list.setAttribute("aria-label", "answer tokens");
    const most = Math.max(0.05, ...this.kl);
    for (let c = 0; c < this.answers; c++) {
      const row = make("div", { className: "r", answer: c },
        make("span", { textContent: c + 1 }), make("span", { textContent: inline(this.sample.pieces[this.sample.prompt_length + c]) }));
      for (const name of ["sparse_logprobs", "shadow_logprobs", "dense_logprobs", "kl"]) {
        row.append(make("span", { textContent: nats(this[name][c]) }));
      }
      const bar = make("span", { className: "bar" });
      bar.style.width = `${Math.max(0, (100 * this.kl[c]) / most)}%`;
      row.append(bar);
      row.setAttribute("role", "option");
      this.rows.push(row);
      list.append(row);
    }
    list.addEventListener("click", (event) => {
      const row = event.target.closest(".r");
      if (row && row.answer !== undefined) this.page.move(row.answer);
    });
    this.list = list;
    return list;
  }

  buildWorst() {
    this.ranking = [...Array(this.answers).keys()].sort((a, b) => this.kl[b] - this.kl[a]);
    this.worst.append(make("span", { className: "quiet", textContent: "most changed:" }));
    for (const c of this.ranking.slice(0, 5)) {
      const text = `${c + 1} ${inline(this.sample.pieces[this.sample.prompt_length + c])} ${nats(this.kl[c])}`;
      this.worst.append(make("button", { textContent: text, onclick: () => this.page.move(c) }));
    }
  }

  // -- moving ----------------------------------------------------------------------------------------

  move(answer) {
    this.rows[this.answer]?.setAttribute("aria-selected", "false");
    this.answer = Math.min(answer, this.answers - 1);
    const row = this.rows[this.answer];
    if (row) {
      row.setAttribute("aria-selected", "true");
      const top = row.offsetTop - this.list.offsetTop, height = this.list.clientHeight;
      if (top < this.list.scrollTop + 30 || top > this.list.scrollTop + height - 30) this.list.scrollTop = top - height / 2;
    }
    this.refresh();
  }

  // Culprits: the spans whose return would take away most of this answer token's KL.
  culprits() {
    if (!this.removed) return [];
    return this.sample.restored.spans
      .map(([start, end], s) => ({ start, end, removed: this.removed[s * this.answers + this.answer] }))
      .filter((span) => span.removed > 0.02)
      .sort((a, b) => b.removed - a.removed).slice(0, CULPRITS);
  }

  refresh() {
    const { record } = this;
    const query = record.queryOf(this.answer);
    const key = `${record.epoch(query)}|${[...this.chosen]}`;
    if (key !== this.countKey) {
      this.countKey = key;
      this.counts = record.counts(record.epoch(query), this.chosen);
    }
    for (let k = 0; k < record.tokens; k++) this.codes[k] = level(this.counts[k], this.chosen.size, k <= query);
    for (const { start, end } of this.culprits()) for (let k = start; k < end; k++) this.codes[k] |= CULPRIT;
    if (query + 1 < record.tokens) this.codes[query + 1] |= TARGET;
    const token = this.hovered ?? this.picked;
    if (token !== null) this.codes[token] |= PICKED;
    for (const chunk of this.inView) this.paint(chunk);
    this.paintMap(query, token);
    this.tell(query, token);
  }

  paint(chunk) {
    const end = Math.min((chunk + 1) * CHUNK, this.record.tokens);
    for (let k = chunk * CHUNK; k < end; k++) {
      const code = this.codes[k];
      if (code === this.painted[k]) continue;
      this.painted[k] = code;
      this.spans[k].className = `k l${code & 15}${k >= this.sample.prompt_length ? " answer" : ""}` +
        `${code & TARGET ? " target" : ""}${code & PICKED ? " picked" : ""}${code & CULPRIT ? " culprit" : ""}`;
    }
  }

  paintMap(query, token) {
    const shares = token === null ? this.record.cellShares(query) : null;
    this.cells.forEach((element, cell) => {
      const name = `layer ${Math.floor(cell / this.record.heads)}, head ${cell % this.record.heads}`;
      const holds = token !== null && this.record.holds(cell, token, query);
      const look = token === null ? `l${level(Math.round(shares[cell] * 1000), 1000, true)}` : holds ? "here" : token <= query ? "gone" : "";
      const words = token === null ? `${name}: ${(100 * shares[cell]).toFixed(0)} % of tokens held` : `${name}: ${holds ? "holds it" : "does not hold it"}`;
      const selected = String(this.chosen.has(cell) && this.chosen.size < this.record.cells);
      const state = `${look}|${words}|${selected}`;
      if (element.state === state) return;              // writing to the page costs more than comparing
      element.state = state;
      element.className = look;
      element.title = words;
      element.setAttribute("aria-label", words);
      element.setAttribute("aria-selected", selected);
    });
  }

  // -- words -----------------------------------------------------------------------------------------

  tell(query, token) {
    const lines = token === null ? this.tellAnswer(query) : this.tellToken(query, token);
    this.detail.replaceChildren(...lines.map((line) => make("p", { textContent: line })));
  }

  tellAnswer(query) {
    const c = this.answer, pieces = this.sample.pieces;
    if (!this.answers) return ["There is no answer."];
    let gone = 0;
    for (let k = 0; k <= query; k++) gone += this.counts[k] === 0 ? 1 : 0;
    const lines = [
      `Answer token ${c + 1} ${quoted(inline(pieces[query + 1]))}: ${nats(this.shadow_logprobs[c])} with this cache, ` +
      `${nats(this.dense_logprobs[c])} with everything; KL ${nats(this.kl[c])}. ` +
      `${gone} of ${query + 1} tokens were held by none of the ${this.chosen.size} chosen heads.`,
    ];
    for (const { start, end, removed } of this.culprits()) {
      lines.push(`Giving back ${quoted(pieces.slice(start, end).join(""))} would take ${nats(removed)} of these ${nats(this.kl[c])} away.`);
    }
    if (this.removed && lines.length === 1) lines.push("No single span of the prompt, given back, would change it by more than 0.02.");
    return lines;
  }

  tellToken(query, token) {
    const { record } = this;
    const losses = record.losses(token);
    const lost = losses.reduce((sum, loss) => sum + loss.cells.length, 0);
    const by = losses.filter((l) => l.moment <= query).reduce((sum, loss) => sum + loss.cells.length, 0);
    const place = token < record.promptLength ? `prompt token ${token + 1}` : `answer token ${token - record.promptLength + 1}`;
    const lines = [`${place} ${quoted(inline(this.sample.pieces[token]))}: ` + (token > query ? "not sampled yet; " : `held by ${record.cells - by} of ${record.cells} heads now; `) +
      (lost ? `${lost} lose it in the end:` : "never lost.")];
    for (const { moment, cells } of losses) {
      const first = moment - record.promptLength + 2;  // the first answer token that is sampled without it
      const when = first > this.answers ? "after the last answer token" : first < 1 ? `at prompt token ${moment + 1}` : `from answer token ${first} on`;
      lines.push(`${when} (${cells.length}): ${record.describe(cells)}`);
    }
    return lines;
  }

  // -- pointer and keys ------------------------------------------------------------------------------

  hover(token) {
    const next = token === undefined ? null : token;
    if (next === this.hovered) return;
    this.hovered = next;
    this.refresh();
  }

  pick(token) {
    this.picked = token === undefined || token === this.picked ? null : token;
    this.refresh();
  }

  textKey(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10 };
    if (event.key === "Escape") this.picked = null;
    else if (event.key in steps) {
      const from = this.picked ?? this.record.queryOf(this.answer) + (steps[event.key] < 0 ? 1 : -1);
      this.picked = Math.min(this.record.tokens - 1, Math.max(0, from + steps[event.key]));
      this.spans[this.picked].scrollIntoView({ block: "nearest" });
    } else return;
    event.preventDefault();
    event.stopPropagation();
    this.refresh();
  }

  // The first choice narrows to what was clicked; further ones add or remove. Nothing left means all.
  choose(cells) {
    const all = this.chosen.size === this.record.cells;
    if (all || cells.length === this.record.cells) this.chosen = new Set(cells);
    else {
      const remove = cells.every((cell) => this.chosen.has(cell));
      for (const cell of cells) remove ? this.chosen.delete(cell) : this.chosen.add(cell);
    }
    if (!this.chosen.size) this.chosen = new Set(Array(this.record.cells).keys());
    this.refresh();
  }

  mapKey(event) {
    const from = event.target.closest("th, td");
    const row = from.parentElement, column = [...row.children].indexOf(from);
    const to = { ArrowLeft: from.previousSibling, ArrowRight: from.nextSibling,
      ArrowUp: row.previousSibling?.children[column], ArrowDown: row.nextSibling?.children[column] };
    if (event.key === " " || event.key === "Enter") this.choose(from.choice);
    else if (event.key === "Escape") this.choose([...Array(this.record.cells).keys()]);
    else if (event.key in to) {
      const next = to[event.key];
      if (next) { from.tabIndex = -1; next.tabIndex = 0; next.focus(); }
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

class Page {
  constructor(samples) {
    this.views = samples.map((sample, n) => new SampleView(sample, n, this));
    this.slider = document.getElementById("position");
    this.last = Math.max(0, ...this.views.map((view) => view.answers - 1));
    this.slider.max = this.last;
    this.slider.addEventListener("input", () => this.move(Number(this.slider.value)));
    document.getElementById("worse").onclick = () => this.worse();
    const help = document.getElementById("help"), keys = document.getElementById("keys");
    keys.onclick = () => { help.hidden = !help.hidden; keys.setAttribute("aria-expanded", String(!help.hidden)); };
    document.addEventListener("keydown", (event) => this.key(event));
    document.getElementById("samples").replaceChildren(...this.views.map((view) => view.element));
    const first = this.views[0];
    this.move(first.ranking[0] ?? 0);
    for (const view of this.views) view.text.scrollTop = view.text.scrollHeight;
  }

  move(answer) {
    this.answer = Math.min(this.last, Math.max(0, answer));
    this.slider.value = this.answer;
    document.getElementById("at").value = `${this.answer + 1} of ${this.last + 1}, as its query saw the text`;
    this.slider.setAttribute("aria-valuetext", `answer token ${this.answer + 1} of ${this.last + 1}`);
    if (this.waiting) return;
    this.waiting = true;                                // one repaint per frame, however fast the slider moves
    requestAnimationFrame(() => {
      this.waiting = false;
      for (const view of this.views) view.move(this.answer);
    });
  }

  worse() {
    const ranking = this.views[0].ranking;
    this.move(ranking[(ranking.indexOf(this.answer) + 1) % ranking.length] ?? 0);
  }

  nextEviction() {
    const { moments, promptLength } = this.views[0].record;
    const next = moments.map((moment) => moment - promptLength + 1).find((answer) => answer > this.answer);
    if (next !== undefined) this.move(next);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {
      ArrowLeft: () => this.move(this.answer - 1), ArrowRight: () => this.move(this.answer + 1),
      Home: () => this.move(0), End: () => this.move(this.last),
      n: () => this.worse(), e: () => this.nextEviction(),
    };
    if (!(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
  }
}

unpack(document.getElementById("data").textContent.trim())
  .then((document_) => { window.page = new Page(document_.samples); })
  .catch((error) => { document.getElementById("wait").textContent = `The record cannot be unpacked: ${error}`; });
