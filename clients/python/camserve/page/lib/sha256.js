/** SHA-256 (FIPS 180-4): the browser's own is missing on pages without TLS, except on loopback. */

const ROUNDS = constants();

/** Return the first bits of the fractional parts of the cube and square roots of the first primes. */
function constants() {
  const primes = [];
  for (let number = 2; primes.length < 64; number++) if (primes.every((prime) => number % prime)) primes.push(number);
  const fraction = (value) => ((value - Math.floor(value)) * 2 ** 32) | 0;
  return { k: Int32Array.from(primes, (prime) => fraction(Math.cbrt(prime))), start: primes.slice(0, 8).map((prime) => fraction(Math.sqrt(prime))) };
}

const turn = (word, bits) => (word >>> bits) | (word << (32 - bits));

/** Return the SHA-256 of a Uint8Array in hexadecimal. */
export function sha256(bytes) {
  const padded = new DataView(new ArrayBuffer((((bytes.length + 8) >> 6) + 1) << 6));
  new Uint8Array(padded.buffer).set(bytes);
  padded.setUint8(bytes.length, 0x80);
  padded.setUint32(padded.byteLength - 8, Math.floor(bytes.length / 2 ** 29));
  padded.setUint32(padded.byteLength - 4, bytes.length << 3);
  const state = Int32Array.from(ROUNDS.start);
  const words = new Int32Array(64);
  for (let start = 0; start < padded.byteLength; start += 64) mix(state, words, padded, start);
  return Array.from(state, (word) => (word >>> 0).toString(16).padStart(8, "0")).join("");
}

function mix(state, words, block, start) {
  for (let t = 0; t < 16; t++) words[t] = block.getInt32(start + 4 * t);
  for (let t = 16; t < 64; t++) {
    const [one, other] = [words[t - 15], words[t - 2]];
    const low = turn(one, 7) ^ turn(one, 18) ^ (one >>> 3);
    const high = turn(other, 17) ^ turn(other, 19) ^ (other >>> 10);
    words[t] = (words[t - 16] + low + words[t - 7] + high) | 0;
  }
  let [a, b, c, d, e, f, g, h] = state;
  for (let t = 0; t < 64; t++) {
    const first = (h + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & f) ^ (~e & g)) + ROUNDS.k[t] + words[t]) | 0;
    const second = ((turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & b) ^ (a & c) ^ (b & c))) | 0;
    h = g; g = f; f = e; e = (d + first) | 0; d = c; c = b; b = a; a = (first + second) | 0;
  }
  [a, b, c, d, e, f, g, h].forEach((word, index) => (state[index] = (state[index] + word) | 0));
}
