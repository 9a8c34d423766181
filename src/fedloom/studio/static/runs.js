// The table of runs: lines change in place, so that neither a choice nor the focus is lost.

import { announce, listen } from "./events.js";

const table = document.querySelector("table.runs tbody"), filter = document.getElementById("filter");
const compare = document.querySelector("#runs button"), MOST = Number(compare.dataset.most);

function element(row) {
  const template = document.createElement("template");
  template.innerHTML = row; // the server has escaped whatever a run says
  return template.content.firstElementChild;
}

function sift() {
  const words = filter.value.toLowerCase().split(/\s+/);
  for (const row of table.rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
}

function count() {
  const chosen = table.querySelectorAll("input:checked").length;
  compare.disabled = chosen < 2 || chosen > MOST;
  compare.title = compare.disabled ? `Choose 2 to ${MOST} runs first` : "";
}

function renew(old, fresh) {
  [...fresh.cells].forEach((cell, place) => {
    const before = old.cells[place];
    const chosen = before && before.classList.contains("choose") && cell.classList.contains("choose");
    if (!before) old.append(cell.cloneNode(true));
    else if (!chosen && before.outerHTML !== cell.outerHTML) before.replaceWith(cell.cloneNode(true));
  });
  while (old.cells.length > fresh.cells.length) old.lastElementChild.remove();
  old.dataset.state = fresh.dataset.state;
}

// Many lines may come at once: what looks at all of them waits until they are there.
let waiting = 0;
function settle() {
  waiting ||= requestAnimationFrame(() => {
    waiting = 0;
    document.getElementById("none").hidden = table.rows.length > 0;
    sift();
    count();
  });
}

listen([], (run, gone) => {
  const old = document.getElementById(`run-${run.key}`);
  if (gone) {
    if (old) old.remove();
  } else {
    const fresh = element(run.row);
    announce(run, old?.dataset.state);
    if (old) renew(old, fresh);
    else table.prepend(fresh);
  }
  settle();
});
table.addEventListener("change", count);
filter.addEventListener("input", sift);
sift();
count();
