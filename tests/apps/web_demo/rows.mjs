/** The logits of a row of the test vectors; tests/vectors/sampling.py has the formula. */
export const rowOf = (vocab, number) =>
  Array.from({ length: vocab }, (_, i) => {
    let x = (Math.imul(i + 1, 2654435761) + Math.imul(number + 1, 2246822519)) >>> 0;
    x = Math.imul(x ^ (x >>> 15), 2246822519) >>> 0;
    const z = ((x ^ (x >>> 13)) >>> 8) / 2 ** 24;
    return Math.fround(16 * z * z - 8);
  });
