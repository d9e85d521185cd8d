// The one figure for what is held: of all entries of a text, one for each token, layer and KV head, those in the cache.

export function percent(share) {
  const n = 100 * share;
  if (n > 99 && n < 100) return `${(Math.floor(10 * n) / 10).toFixed(1)} %`; // what lacks a little is not all
  return `${n.toFixed(n > 0 && n < 10 ? 1 : 0)} %`;
}
