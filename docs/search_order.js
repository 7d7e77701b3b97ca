// Guides before the reference, and lab pages between them; the matches' own weights are Sphinx's.
var Scorer = {
  score: ([page, title, anchor, description, score]) =>
    score - (page.startsWith("reference/") ? 100 : page.startsWith("lab/") ? 50 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: {0: 15, 1: 5, 2: -5},
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
