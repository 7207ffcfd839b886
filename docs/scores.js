// Order of the search results: as Sphinx scores them, but records of decisions and the changelog come last, because they
// have words of every subject.
var Scorer = {
  score: ([page, , , , score]) => (/^(decisions|project)\//.test(page) ? score - 100 : score),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
