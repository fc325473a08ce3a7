'use strict';
// Sorts a table in .sortable by the column whose title is clicked: numbers first from the highest, text from A.
document.addEventListener('click', event => {
  const button = event.target.closest('.sortable th button');
  if (!button) return;
  const title = button.parentElement, table = title.closest('table'), column = title.cellIndex;
  const isNumber = title.classList.contains('number');
  const first = isNumber ? 'descending' : 'ascending';
  const direction = title.ariaSort === first ? (isNumber ? 'ascending' : 'descending') : first;
  for (const other of title.parentElement.cells) other.ariaSort = other === title ? direction : null;
  const value = row => row.cells[column].textContent;
  const number = row => Number(value(row).replace(/[, %]/g, ''));
  const compare = isNumber ? (a, b) => number(a) - number(b) : (a, b) => value(a).localeCompare(value(b), 'en', {numeric: true});
  const rows = [...table.tBodies[0].rows].sort((a, b) => direction === 'ascending' ? compare(a, b) : compare(b, a));
  table.tBodies[0].append(...rows);
});
