"use strict";
// Rows of W from stored features, for the live views. W follows from features and sigma alone (paper, equations 3, 4):
// W[i][j] = exp(-|x_i - k_j|^2 / (2 sigma^2)), divided by the sum over the tokens j that i sees.
// The operator adds 1e-6 to that sum where keys are queries; here nothing is added.

// The IEEE 754 half-precision numbers of a base64 string, little-endian.
function decodeHalves(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const halves = new DataView(bytes.buffer);
  const values = new Float32Array(bytes.length / 2);
  for (let place = 0; place < values.length; place++) {
    const bits = halves.getUint16(2 * place, true);
    const sign = bits >> 15 ? -1 : 1;
    const exponent = (bits >> 10) & 31;
    const fraction = (bits & 1023) / 1024;
    values[place] = sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction) : 2 ** -14 * fraction);
  }
  return values;
}

// The weights that query `query` gives all tokens, as an array of view.tokens numbers that sum to 1; 0 where hidden.
// features: (layers, tokens, heads, dim) in one array. A layer may be causal, have a window (so many tokens before the
// query) and keyOffsets (by head: slot j holds the key of token j - offset, or of token 0).
function kernelRow(view, features, layer, head, query, sigma) {
  const { tokens, heads, dim } = view;
  const { causal, window, keyOffsets } = view.layers[layer];
  const first = window === null ? 0 : Math.max(0, query - window);
  const last = causal ? query : tokens - 1;
  const start = (token) => ((layer * tokens + token) * heads + head) * dim;
  const own = start(query);
  const row = new Float64Array(tokens);
  let nearest = Infinity;
  for (let slot = first; slot <= last; slot++) {
    const key = start(Math.max(0, slot - keyOffsets[head]));
    let squared = 0;
    for (let channel = 0; channel < dim; channel++) {
      const difference = features[own + channel] - features[key + channel];
      squared += difference * difference;
    }
    row[slot] = squared;
    nearest = Math.min(nearest, squared);
  }
  let sum = 0;
  for (let slot = first; slot <= last; slot++) {
    // Less the nearest: with offsets no key may be near, and all weights would be 0 for a small sigma.
    row[slot] = Math.exp((nearest - row[slot]) / (2 * sigma * sigma));
    sum += row[slot];
  }
  for (let slot = first; slot <= last; slot++) row[slot] /= sum;
  return row;
}

// The row by the token whose value is mixed, not by its slot: they differ in heads whose values come later.
function readTokens(row, offset) {
  const read = new Float64Array(row.length);
  row.forEach((weight, slot) => (read[Math.max(0, slot - offset)] += weight));
  return read;
}

// exp(entropy): 1 if one token has all the weight, the number of tokens if they share it equally.
function effectiveTokens(row) {
  return Math.exp(row.reduce((sum, weight) => (weight > 0 ? sum - weight * Math.log(weight) : sum), 0));
}

// Of a row over an image: the mean pixels from patch `query` to the patches, weighted. NaN for other tokens.
function patchDistance(view, row, query) {
  const { columns, patch, prefix } = view;
  let weights = 0;
  let sum = 0;
  for (let token = prefix; token < row.length; token++) {
    const down = (Math.floor((token - prefix) / columns) - Math.floor((query - prefix) / columns)) * patch[0];
    const across = (((token - prefix) % columns) - ((query - prefix) % columns)) * patch[1];
    sum += row[token] * Math.hypot(down, across);
    weights += row[token];
  }
  return query < prefix ? NaN : sum / weights;
}

// Of a row over a text: the mean number of tokens back, weighted.
function tokensBack(row, query) {
  return row.reduce((sum, weight, token) => sum + weight * (query - token), 0);
}
