"use strict";
// The record of one sample as typed arrays, and the only questions that the page asks of it.
// A key with code c is held by query i  <=>  c >= epoch(i), the number of evictions up to i:
// codes index the sorted moments at which keys were evicted; "never" is one past the last.

function bytesOf(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let n = 0; n < raw.length; n++) bytes[n] = raw.charCodeAt(n);
  return bytes;
}

const floatsOf = (text) => new Float32Array(bytesOf(text).buffer);

async function unpack(text) {
  const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function codesOf(record) {
  const bytes = bytesOf(record.codes);
  const count = record.shape[0] * record.shape[1] * record.shape[2];
  const codes = new Uint16Array(count);
  if (record.bits === 16) {
    for (let n = 0; n < count; n++) codes[n] = bytes[2 * n] | (bytes[2 * n + 1] << 8);
    return codes;
  }
  const perByte = 8 / record.bits;
  const mask = (1 << record.bits) - 1;
  for (let n = 0; n < count; n++) {
    codes[n] = (bytes[Math.floor(n / perByte)] >> ((n % perByte) * record.bits)) & mask;
  }
  return codes;
}

class RecordView {
  constructor(record, promptLength) {
    [this.layers, this.heads, this.tokens] = record.shape;
    this.cells = this.layers * this.heads;
    this.moments = record.moments;
    this.codes = codesOf(record);
    this.promptLength = promptLength;
  }

  queryOf(answer) { return this.promptLength - 1 + answer; }

  epoch(query) {
    let low = 0, high = this.moments.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.moments[middle] <= query) low = middle + 1; else high = middle;
    }
    return low;
  }

  // How many of the chosen cells hold each token at this epoch.
  counts(epoch, chosen) {
    const counts = new Uint16Array(this.tokens);
    const { codes, tokens } = this;
    for (const cell of chosen) {
      const base = cell * tokens;
      for (let k = 0; k < tokens; k++) counts[k] += codes[base + k] >= epoch ? 1 : 0;
    }
    return counts;
  }

  // How many of the tokens from first up to last (not included) each cell holds at this epoch.
  heldPerCell(epoch, first, last) {
    const held = new Uint32Array(this.cells);
    const { codes, tokens } = this;
    for (let cell = 0; cell < this.cells; cell++) {
      const base = cell * tokens;
      for (let k = first; k < last; k++) held[cell] += codes[base + k] >= epoch ? 1 : 0;
    }
    return held;
  }

  // Share of the tokens up to the query that each cell holds. The prompt is counted once per epoch.
  cellShares(query) {
    const epoch = this.epoch(query);
    if (this.ofPrompt?.epoch !== epoch) {
      this.ofPrompt = { epoch, held: this.heldPerCell(epoch, 0, this.promptLength) };
    }
    const held = this.heldPerCell(epoch, this.promptLength, query + 1);
    return Float32Array.from(held, (count, cell) => (count + this.ofPrompt.held[cell]) / (query + 1));
  }

  holds(cell, token, query) {
    return token <= query && this.codes[cell * this.tokens + token] >= this.epoch(query);
  }

  // When a token was lost, in order: [{moment, cells}]; cells that never lost it are in none.
  losses(token) {
    const byCode = new Map();
    for (let cell = 0; cell < this.cells; cell++) {
      const code = this.codes[cell * this.tokens + token];
      if (code === this.moments.length) continue;
      if (!byCode.has(code)) byCode.set(code, []);
      byCode.get(code).push(cell);
    }
    return [...byCode.keys()].sort((a, b) => a - b)
      .map((code) => ({ moment: this.moments[code], cells: byCode.get(code) }));
  }

  // "layer 3: all heads; layer 4: heads 0, 2"; runs of layers with the same heads are one.
  describe(cells) {
    const heads = new Map();
    for (const cell of cells) {
      const layer = Math.floor(cell / this.heads);
      if (!heads.has(layer)) heads.set(layer, []);
      heads.get(layer).push(cell % this.heads);
    }
    const runs = [];
    for (const [layer, list] of heads) {
      const words = list.length === this.heads ? "all heads" : `head ${list.join(", ")}`;
      const last = runs[runs.length - 1];
      if (last && last.words === words && last.end === layer - 1) last.end = layer;
      else runs.push({ start: layer, end: layer, words });
    }
    return runs.map((r) => `layer ${r.start === r.end ? r.start : r.start + "–" + r.end}: ${r.words}`).join("; ");
  }
}

// Ground of a token: 0 = no head holds it, 8 = all do, 9 = it does not exist yet.
function level(count, of, exists) {
  if (!exists) return 9;
  if (count === 0) return 0;
  return count === of ? 8 : Math.min(7, Math.max(1, Math.round((8 * count) / of)));
}
