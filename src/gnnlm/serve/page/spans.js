// The passages that a text follows word for word, found as the server finds them (gnnlm/write/sources.py), but while
// it is being written. 20 sources a token hold every row with a share of at least 0.05, so both find the same.

export const SOURCES = 20;
export const LEAST_SHARE = 0.05;

// Spans { first, last, document, start, end, share }, and of whom (origin.js); no token is in two.
export function spansOf(tokens) {
  const runs = runsOf(tokens).filter((run) => run.length > 1);
  runs.sort((a, b) => b.length - a.length || b.share - a.share || a.first - b.first);
  const taken = new Set();
  const spans = [];
  for (const run of runs) {
    const places = Array.from({ length: run.length }, (_, step) => run.first + step);
    if (places.some((place) => taken.has(place))) continue;
    places.forEach((place) => taken.add(place));
    const { document, start, kind, text } = run.rows[0];
    const { end } = run.rows.at(-1);
    spans.push({
      first: run.first,
      last: run.first + run.length - 1,
      document,
      start,
      end,
      kind,
      text,
      share: run.share / run.length,
    });
  }
  return spans.sort((a, b) => a.first - b.first);
}

function runsOf(tokens) {
  const closed = [];
  let open = new Map(); // by the position that would go on
  tokens.forEach((token, place) => {
    const next = new Map();
    for (const row of strong(token)) {
      const before = open.get(row.position) ?? { first: place, length: 0, share: 0, rows: [] };
      open.delete(row.position);
      next.set(row.position + 1, {
        first: before.first,
        length: before.length + 1,
        share: before.share + row.share,
        rows: [...before.rows, row],
      });
    }
    closed.push(...open.values());
    open = next;
  });
  return [...closed, ...open.values()];
}

export const strong = (token) => (token.sources ?? []).filter((source) => source.share >= LEAST_SHARE);

// The documents that support a text: { name, words: Map(token place -> share), best }, those with the most first.
export function supporters(tokens) {
  const found = new Map();
  tokens.forEach((token, place) => {
    for (const source of strong(token)) {
      const one = found.get(source.document) ?? {
        name: source.document,
        words: new Map(),
        total: 0,
        best: { share: 0 },
      };
      one.words.set(place, (one.words.get(place) ?? 0) + source.share);
      one.total += source.share;
      if (source.share > one.best.share) one.best = source;
      found.set(source.document, one);
    }
  });
  return [...found.values()].sort((a, b) => b.total - a.total);
}
